"""This process: variables of its environment, its run's secret, and memory that it has freed."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

SECRET = "TURNWISE_SECRET"
"""Variable with a secret that the processes of one run share, which Ray passes to them."""


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


def trim_memory() -> None:
    """Give freed memory back to the system if the C library can (glibc). glibc keeps freed blocks
    of up to 32 MiB, so the process would otherwise stay as large as at its peak."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
