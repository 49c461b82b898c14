"""Rung 7 of the ladder: a game whose sides the model plays itself."""
