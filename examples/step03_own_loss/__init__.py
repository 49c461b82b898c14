"""Rung 3 of the ladder: your own agent loop and loss."""
