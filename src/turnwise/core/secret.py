"""A secret that the processes of one run share, in an environment variable.

The process that starts Ray generates it, and Ray passes it to the others.
"""

import os
import secrets

VARIABLE = "TURNWISE_SECRET"


def make() -> str:
    """Return the run's secret, made at the first call."""
    return os.environ.setdefault(VARIABLE, secrets.token_hex(16))


def known() -> str:
    """Return the run's secret, or a public word if turnwise did not start Ray."""
    return os.environ.get(VARIABLE, "turnwise")
