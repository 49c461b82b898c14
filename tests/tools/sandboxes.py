"""Sandboxes for tests: the backends that work on this machine."""

import functools

import pytest

from turnwise.errors import InputError
from turnwise.tools.sandbox.backends import Limits, choose
from turnwise.tools.sandbox.session import Session

BACKENDS = ("sandlock", "bubblewrap")


@functools.cache
def why_unusable(backend: str) -> str:
    """Return why a backend does not work here; "" if it works."""
    try:
        choose(backend)
    except InputError as error:
        return str(error)
    return ""


def session(backend: str, limits: Limits | None = None, *, shell: bool = False) -> Session:
    """Return a new session, or skip the test where the backend does not work."""
    if reason := why_unusable(backend):
        pytest.skip(reason)
    return Session(backend, limits or Limits(), shell=shell)
