"""The command line, `turnwise`."""

from turnwise.cli.runs import app, main

__all__ = ["app", "main"]
