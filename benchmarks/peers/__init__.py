"""What Turnwise is compared to, each in a process of its own."""
