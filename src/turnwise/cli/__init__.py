"""The command line, `turnwise`."""

from turnwise.cli import commands, run_commands  # each adds its commands to `app`
from turnwise.cli.app import app, main

__all__ = ["app", "commands", "main", "run_commands"]
