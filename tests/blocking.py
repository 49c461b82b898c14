"""Tests block user code with a gate, which opens at their end, or with a lack of threads.

A separate module, because an environment's module is imported once by pytest and once by its name
in a configuration.
"""

import asyncio
import threading
from typing import Any

_gates = [threading.Event()]


def new_gate() -> threading.Event:
    """Make the gate of one test; `gate` returns it until the next test makes another."""
    _gates.append(threading.Event())
    return _gates[-1]


def gate() -> threading.Event:
    return _gates[-1]


async def tick(ticks: list[None]) -> None:
    """Add to `ticks` every 10 ms for as long as the event loop runs freely."""
    while True:
        await asyncio.sleep(0.01)
        ticks.append(None)


class NeverIdle(list[Any]):
    """The idle threads of a machine that has none, also when calls of earlier tests return."""

    def append(self, inbox: Any) -> None:
        pass
