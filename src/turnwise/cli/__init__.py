"""The command line, `turnwise`."""

from turnwise.cli.commands import app, main

__all__ = ["app", "main"]
