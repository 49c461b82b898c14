"""Word problems solved by code that is written, and run, in the middle of the answer."""
