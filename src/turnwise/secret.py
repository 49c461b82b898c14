"""A word that the processes of one run share, and strangers do not know.

The process that starts Ray makes it; Ray brings it to the others in their environment.
"""

import os
import secrets

VARIABLE = "TURNWISE_SECRET"


def make() -> str:
    """The run's secret, made at the first call."""
    return os.environ.setdefault(VARIABLE, secrets.token_hex(16))


def known() -> str:
    """The run's secret; where Ray was not started by us, a word that everybody knows."""
    return os.environ.get(VARIABLE, "turnwise")
