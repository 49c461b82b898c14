"""The systems that Turnwise is compared with, each run in a process of its own."""
