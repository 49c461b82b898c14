"""Fixtures of the tests of rollouts."""

import threading
from collections.abc import Iterator

import pytest

from tests.scripted import Scripted
from turnwise.core import endpoint


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE", 0.01)
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()
