"""Rung 4 of the ladder: an agent behind a base URL."""
