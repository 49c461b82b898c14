"""One run: its runtime, the training loop, its folder, metrics, trackers and display."""
