"""TRL: its trainer and configuration, its environments and its reward functions."""
