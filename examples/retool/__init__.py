"""Arithmetic solved with Python in a sandbox, in the middle of the answer."""
