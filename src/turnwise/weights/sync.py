"""The driver's side of every transport: brings the trainer's weights to engines.

It handles neither tensors nor processes, only a `Trainer` and `Engine`s. It returns one result per
engine, so the manager knows which to restart.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Protocol
from weakref import WeakKeyDictionary

from turnwise.core.aio import task_group, together
from turnwise.core.deadlines import deadline
from turnwise.engine.protocol import Engine, InFlight
from turnwise.errors import TurnwiseError, WeightUpdateError
from turnwise.weights.manifest import Manifest, Publication, StateDictInfo
from turnwise.weights.transport import find_transport

_CHECK_SHARE = 0.25
"""Fraction of an update's time in which engines check whether it fits."""

UpdateResult = int | TurnwiseError
"""The version that an engine serves after an update, or the error that prevented it."""


class Trainer(Protocol):
    """All ranks of a trainer as one; each call reaches every rank, in the order of the calls.

    Example:
        trainer: Trainer = await TrainerGroup.start(config, folder)
    """

    async def publish(self) -> Publication:
        """Call every rank's `WeightSender.publish` with the current weights; returns rank 0's."""
        ...

    async def send(self, devices: Sequence[str]) -> None:
        """Call every rank's `WeightSender.send` with the current weights."""
        ...

    async def rendezvous(self) -> tuple[str, int]:
        """Return the address of rank 0's node and a free port of it."""
        ...

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        """Call every rank's `WeightSender.join`."""
        ...


class WeightSync:
    """Brings a trainer's weights to engines, by the transport with which they were published.

    Args:
        trainer: Source of the weights.
        timeout: Seconds for an update (`weights.update_timeout`).
        patience: Seconds that an engine which starts later waits for a busy trainer.
        published_again: Called after the trainer published its weights for such an engine, which
            may have taken memory for it.

    Example:
        sync = WeightSync(trainer, timeout=120.0, patience=300.0)
        published = await sync.publish()
        await manager.update_weights(sync)  # which checks and pushes
    """

    def __init__(
        self,
        trainer: Trainer,
        timeout: float,
        patience: float,
        published_again: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._trainer = trainer
        self._timeout = timeout
        self._patience = patience
        self._published_again = published_again
        self._offered: Manifest | None = None
        self._current: Manifest | None = None
        self._devices: WeakKeyDictionary[Engine, list[str]] = WeakKeyDictionary()
        """Worker devices of each engine that has been given the tensors to expect."""
        self._group: list[Engine] = []
        """Engines in the trainer's process group, in the order of their ranks."""

    async def publish(self) -> Publication:
        """Have the trainer publish its weights, and offer them to engines."""
        published = await self._publish(self._timeout)
        self._offered = published.manifest
        return published

    async def check(self, engines: Sequence[Engine]) -> list[TurnwiseError | None]:
        """Ask each engine whether it can load the offered weights; changes no weights.

        If none refuses (`WeightUpdateError`), the offered weights become the current ones.
        """
        manifest = _published(self._offered)
        errors = await together(self._check(engine, manifest) for engine in engines)
        if not any(isinstance(error, WeightUpdateError) for error in errors):
            self._current = manifest
        return errors

    async def push(self, engines: Sequence[Engine], in_flight: InFlight) -> list[UpdateResult]:
        """Bring the current weights to engines that were just checked, in parallel."""
        return await self._push(_published(self._current), engines, in_flight, self._timeout)

    async def sync_one(self, engine: Engine, in_flight: InFlight) -> int:
        """Bring the current weights to one engine that starts later; return their version.

        If the trainer has to send them again, it sends its newest.

        Raises:
            TurnwiseError: when they did not arrive.
        """
        manifest = _published(self._current)
        if find_transport(manifest.transport).lasting:
            return await self._bring(manifest, engine, in_flight, self._timeout)
        # The trainer may be training again before it sends.
        manifest = (await self._publish(self._patience)).manifest
        try:
            return await self._bring(manifest, engine, in_flight, self._patience)
        finally:
            if self._published_again is not None:
                await self._published_again()

    async def _bring(
        self, manifest: Manifest, engine: Engine, in_flight: InFlight, seconds: float
    ) -> int:
        if error := await self._check(engine, manifest):
            raise error
        (outcome,) = await self._push(manifest, [engine], in_flight, seconds)
        if isinstance(outcome, TurnwiseError):
            raise outcome
        return outcome

    async def _publish(self, seconds: float) -> Publication:
        async with deadline(seconds, "the trainer did not publish its weights"):
            return await self._trainer.publish()

    async def _check(self, engine: Engine, manifest: Manifest) -> TurnwiseError | None:
        seconds = self._timeout * _CHECK_SHARE
        missed = f"{engine.name} did not check the update to version {manifest.version}"
        try:
            async with deadline(seconds, missed):
                if engine not in self._devices:
                    await engine.prepare_refit_info(_state_dict_info(manifest))
                self._devices[engine] = await engine.check_update(manifest)
        except TurnwiseError as error:
            return error
        return None

    async def _push(
        self, manifest: Manifest, engines: Sequence[Engine], in_flight: InFlight, seconds: float
    ) -> list[UpdateResult]:
        """Push; if one engine's death breaks the stream for all, push again without it."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        outcomes = await self._attempt(manifest, engines, in_flight, seconds)
        failed = [e for e, o in zip(engines, outcomes, strict=True) if isinstance(o, TurnwiseError)]
        if not failed or not find_transport(manifest.transport).streamed:
            return outcomes
        errors = await together(self._check(engine, manifest) for engine in failed)
        healthy = [e for e, error in zip(failed, errors, strict=True) if error is None]
        left = end - clock()
        if not healthy or len(healthy) == len(failed) or left <= 0:
            return outcomes
        again = await self._attempt(manifest, healthy, in_flight, left)
        second = dict(zip(map(id, healthy), again, strict=True))
        return [second.get(id(e), o) for e, o in zip(engines, outcomes, strict=True)]

    async def _attempt(
        self, manifest: Manifest, engines: Sequence[Engine], in_flight: InFlight, seconds: float
    ) -> list[UpdateResult]:
        async def update(engine: Engine) -> UpdateResult:
            try:
                return await engine.update_weights(manifest, in_flight, seconds)
            except TurnwiseError as error:
                return error

        transport = find_transport(manifest.transport)
        if not engines:
            return []
        if transport.needs_group and self._group != list(engines):
            try:
                await self._make_group(engines, seconds)
            except TurnwiseError as error:
                return [error] * len(engines)
        if not transport.streamed:
            return await together(map(update, engines))
        async with task_group() as tasks:
            sending = tasks.create_task(self._send(engines, seconds))
            outcomes = await together(map(update, engines))
        if (failure := sending.result()) is not None:
            self._group = []
            if all(isinstance(outcome, int) for outcome in outcomes):
                raise failure
        return outcomes

    async def _send(self, engines: Sequence[Engine], seconds: float) -> TurnwiseError | None:
        devices = [device for engine in engines for device in self._devices[engine]]
        try:
            async with deadline(seconds, "the trainer did not send its weights"):
                await self._trainer.send(devices)
        except TurnwiseError as error:
            return error
        return None

    async def _make_group(self, engines: Sequence[Engine], seconds: float) -> None:
        """Create a process group of the trainer's rank 0 and the engines' workers."""
        self._group = []
        async with deadline(seconds, "the trainer did not open a rendezvous address"):
            ip, port = await self._trainer.rendezvous()
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


def _published(manifest: Manifest | None) -> Manifest:
    if manifest is None:
        raise WeightUpdateError("no weights have been published yet")
    return manifest


def _state_dict_info(manifest: Manifest) -> StateDictInfo:
    """Return the argument of `prepare_refit_info` for a manifest's tensors."""
    return {entry.name: (entry.shape, entry.dtype) for entry in manifest.tensors}
