"""The driver's side of any transport: brings what the trainer published to engines.

Knows neither tensors nor processes, only a trainer and engines that do. Outcomes are told engine
by engine, so that whoever keeps the engines can tell the lost from the well.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from turnwise.engine.protocol import Engine, InFlight
from turnwise.errors import DeadlineError, EngineError, TurnwiseError

_T = TypeVar("_T")
_STREAMED = ("ipc", "collective")
_LASTING = ("shm", "disk")
"""What is published by these stays readable until the version after the next."""
_CHECK_SHARE = 0.25
"""Of the time for an update: what engines have to say whether it fits."""

Outcome = int | TurnwiseError
"""The version that an engine serves, or why it does not."""


class Trainer(Protocol):
    """All ranks of a trainer as one; each call reaches every rank, in the order of the calls."""

    async def publish(self) -> dict[str, Any]:
        """Every rank's `Outlet.publish`, of the weights as they are; returns rank 0's manifest."""
        ...

    async def send(self, devices: Sequence[str]) -> None:
        """Every rank's `Outlet.send`, of the weights as they are."""
        ...

    async def rendezvous(self) -> tuple[str, int]:
        """Rank 0's `Outlet.rendezvous`."""
        ...

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        """Every rank's `Outlet.join`."""
        ...


class WeightSource(Protocol):
    """Where engines get the current weights from."""

    async def check(self, engines: Sequence[Engine]) -> list[TurnwiseError | None]:
        """Ask each engine whether it can load what is on offer; touches no weight.

        Where none refuses (`WeightUpdateError`), the offer is from now on what is current.
        """
        ...

    async def deliver(self, engines: Sequence[Engine], in_flight: InFlight) -> list[Outcome]:
        """Bring what is current to engines that were just checked, side by side."""
        ...

    async def catch_up(self, engine: Engine, in_flight: InFlight) -> int:
        """Bring what is current to one engine that comes later; returns its version.

        Where the trainer has to send it anew, it is what the trainer has by then.

        Raises:
            TurnwiseError: when it did not land.
        """
        ...


class Delivery:
    """A `WeightSource` that brings a trainer's weights by whichever transport it publishes them.

    Args:
        trainer: Whose weights they are.
        timeout: Seconds for an update to land (`weights.update_timeout`).
        patience: Seconds that an engine which comes later waits for a trainer that is busy.
    """

    def __init__(self, trainer: Trainer, timeout: float, patience: float) -> None: ...

    async def publish(self) -> dict[str, Any]:
        """Have the trainer publish its weights, and offer them; returns their manifest."""
        ...
