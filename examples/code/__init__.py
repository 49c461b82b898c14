"""Word problems solved with code that runs in the middle of the answer."""
