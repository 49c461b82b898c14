"""Rung 5 of the ladder: a pipeline."""
