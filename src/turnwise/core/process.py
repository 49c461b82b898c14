"""This process: variables of its environment, its run's secret, and memory that it has freed."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

SECRET = "TURNWISE_SECRET"
"""Variable with a secret that the processes of one run share: the one that starts Ray makes it, and
Ray passes it to the others."""


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for a `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def known_secret() -> str:
    """Return the run's secret, or a public word if turnwise did not start Ray."""
    return os.environ.get(SECRET, "turnwise")


def give_back() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    glibc keeps freed blocks of up to 32 MiB for later ones; after a phase with many of them, such
    as the loading of a model, the process would stay as large as it was at its peak.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
