"""Sandboxes for tests: the backends that work on this machine."""

import pytest

from turnwise.config.rollout import CodeToolConfig as Limits
from turnwise.errors import InputError
from turnwise.tools.code import CodeSession, choose
from turnwise.tools.sandbox.backends import Backend

BACKENDS = ("first", pytest.param("second", marks=pytest.mark.slow))
"""The backend that `auto` chooses, and the other one, which `make test-all` tests."""


def backend(which: str) -> Backend:
    """Return the first or the second backend of this machine; skip the test if there is none."""
    try:
        first = choose("auto")
        return first if which == "first" else choose("bubblewrap" if first == "sandlock" else "-")
    except InputError as error:
        pytest.skip(str(error))


def session(which: str, limits: Limits | None = None, *, shell: bool = False) -> CodeSession:
    """Return a new session with the first or the second backend."""
    return CodeSession(backend(which), limits or Limits(), shell=shell)
