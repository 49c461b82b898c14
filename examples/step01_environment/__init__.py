"""Rung 1 of the ladder: your own environment."""
