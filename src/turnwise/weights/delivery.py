"""The driver's side of any transport: brings what the trainer published to engines.

Knows neither tensors nor processes, only a trainer and engines that do. Outcomes are told engine
by engine, so that whoever keeps the engines can tell the lost from the well.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from turnwise.engine.protocol import Engine, InFlight
from turnwise.errors import DeadlineError, TurnwiseError, WeightUpdateError

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

    def __init__(self, trainer: Trainer, timeout: float, patience: float) -> None:
        self._trainer = trainer
        self._timeout = timeout
        self._patience = patience
        self._offered: dict[str, Any] = {}
        self._current: dict[str, Any] = {}
        self._devices: WeakKeyDictionary[Engine, list[str]] = WeakKeyDictionary()
        """Of the workers of each engine that has been told what updates bring."""
        self._group: list[Engine] = []
        """Who is in the trainer's process group, in the order of their ranks."""

    async def publish(self) -> dict[str, Any]:
        """Have the trainer publish its weights, and offer them; returns their manifest."""
        self._offered = await self._publish(self._timeout)
        return self._offered

    async def check(self, engines: Sequence[Engine]) -> list[TurnwiseError | None]:
        manifest = self._offered
        errors = await asyncio.gather(*(self._check(engine, manifest) for engine in engines))
        if not any(isinstance(error, WeightUpdateError) for error in errors):
            self._current = manifest
        return errors

    async def deliver(self, engines: Sequence[Engine], in_flight: InFlight) -> list[Outcome]:
        return await self._deliver(self._current, engines, in_flight, self._timeout)

    async def catch_up(self, engine: Engine, in_flight: InFlight) -> int:
        manifest, seconds = self._current, self._timeout
        if manifest["transport"] not in _LASTING:
            # It may have begun to train again before it sends.
            manifest, seconds = await self._publish(self._patience), self._patience
        if error := await self._check(engine, manifest):
            raise error
        (outcome,) = await self._deliver(manifest, [engine], in_flight, seconds)
        if isinstance(outcome, TurnwiseError):
            raise outcome
        return outcome

    async def _publish(self, seconds: float) -> dict[str, Any]:
        return await _within(seconds, "the trainer", "publish its weights", self._trainer.publish())

    async def _check(self, engine: Engine, manifest: dict[str, Any]) -> TurnwiseError | None:
        seconds, version = self._timeout * _CHECK_SHARE, manifest["version"]

        async def ask() -> None:
            if engine not in self._devices:
                await engine.prepare_refit_info(_info(manifest))
            self._devices[engine] = await engine.check_update(manifest)

        try:
            await _within(seconds, engine.name, f"say whether version {version} fits", ask())
        except TurnwiseError as error:
            return error
        return None

    async def _deliver(
        self,
        manifest: dict[str, Any],
        engines: Sequence[Engine],
        in_flight: InFlight,
        seconds: float,
    ) -> list[Outcome]:
        """Deliver; where one engine's death spoils what is sent to all, send again without it."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        outcomes = await self._attempt(manifest, engines, in_flight, seconds)
        failed = [e for e, o in zip(engines, outcomes, strict=True) if isinstance(o, TurnwiseError)]
        if manifest["transport"] not in _STREAMED or not failed:
            return outcomes
        errors = await asyncio.gather(*(self._check(engine, manifest) for engine in failed))
        well = [e for e, error in zip(failed, errors, strict=True) if error is None]
        left = end - clock()
        if not well or len(well) == len(failed) or left <= 0:
            return outcomes
        again = await self._attempt(manifest, well, in_flight, left)
        second = dict(zip(map(id, well), again, strict=True))
        return [second.get(id(e), o) for e, o in zip(engines, outcomes, strict=True)]

    async def _attempt(
        self,
        manifest: dict[str, Any],
        engines: Sequence[Engine],
        in_flight: InFlight,
        seconds: float,
    ) -> list[Outcome]:
        async def update(engine: Engine) -> Outcome:
            try:
                return await engine.update_weights(manifest, in_flight, seconds)
            except TurnwiseError as error:
                return error

        if manifest["transport"] not in _STREAMED or not engines:
            return await asyncio.gather(*map(update, engines))
        if manifest["transport"] == "collective" and self._group != list(engines):
            try:
                await self._meet(engines, seconds)
            except TurnwiseError as error:
                return [error] * len(engines)
        sending = asyncio.create_task(self._send(engines, seconds))
        outcomes = await asyncio.gather(*map(update, engines))
        if (failure := await sending) is not None:
            self._group = []
            if all(isinstance(outcome, int) for outcome in outcomes):
                raise failure
        return outcomes

    async def _send(self, engines: Sequence[Engine], seconds: float) -> TurnwiseError | None:
        devices = [device for engine in engines for device in self._devices[engine]]
        try:
            await _within(seconds, "the trainer", "send its weights", self._trainer.send(devices))
        except TurnwiseError as error:
            return error
        return None

    async def _meet(self, engines: Sequence[Engine], seconds: float) -> None:
        """Make a process group of the trainer's rank 0 and the engines' workers."""
        self._group = []
        rendezvous = self._trainer.rendezvous()
        ip, port = await _within(seconds, "the trainer", "tell where to meet", rendezvous)
        *starts, workers = accumulate((len(self._devices[e]) for e in engines), initial=0)
        joined = await asyncio.gather(
            *(
                engine.init_collective(start, ip, port, 1 + workers, 1, seconds)
                for engine, start in zip(engines, starts, strict=True)
            ),
            self._trainer.join(ip, port, workers, seconds),
            return_exceptions=True,
        )
        for error in joined:
            if isinstance(error, BaseException):
                raise error
        self._group = list(engines)


def _info(manifest: dict[str, Any]) -> dict[str, tuple[Sequence[int], str]]:
    """What `prepare_refit_info` wants to know of a manifest's tensors."""
    return {entry["name"]: (entry["shape"], entry["dtype"]) for entry in manifest["tensors"]}


async def _within(seconds: float, who: str, what: str, reply: Awaitable[_T]) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await reply
    except TimeoutError:
        raise DeadlineError(f"{who} did not {what} within {seconds:g} s") from None
