"""TRL's trainer and configuration, environments and reward functions."""
