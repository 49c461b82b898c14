"""Rung 6 of the ladder: another model plays the user."""
