"""Rung 8 of the ladder: a game whose players are policies of their own, trained at once."""
