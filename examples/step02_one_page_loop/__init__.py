"""Rung 2 of the ladder: the RL loop on one page."""
