"""The driver's side of every transport: brings the trainer's weights to engines.

This module handles neither tensors nor processes, only a `Trainer` and `Engine`s. It returns one
result per engine, so that the manager knows which engines to restart. After an update each engine
scores a fixed prompt, the canary, and must get the trainer's log-probs. This check finds errors
that checksums cannot find, such as tensors that arrived intact but were packed, tied or cached
wrongly inside the engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from turnwise.config import SamplingConfig
from turnwise.core.aio import task_group, together
from turnwise.core.deadlines import StallClock, deadline
from turnwise.engine.protocol import Engine, InFlight, Rendezvous, Request, Route, generate
from turnwise.errors import InputError, TurnwiseError, WeightUpdateError
from turnwise.trajectory import FORCED, Prompt, PromptLike
from turnwise.weights.manifest import Manifest, StateDictInfo
from turnwise.weights.transport import find_transport

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_CHECK_SHARE = 0.25
"""Fraction of an update's time in which engines must check whether the update fits; also the
minimum fraction that they have to score the canary."""
_ANSWER_SECONDS = 10.0
"""Seconds in which an engine must answer after the trainer has given up sending an update."""
_CANARY_SAMPLING = SamplingConfig(n=1, max_tokens=1, prompt_logprobs=True)


class Updated(NamedTuple):
    """The version that an engine serves, and the mean and largest absolute difference between its
    canary's log-probs and the trainer's, in nats."""

    version: int
    mean: float = 0.0
    largest: float = 0.0


UpdateResults: TypeAlias = dict[Engine, Updated | TurnwiseError]
"""Each engine's state after an update, or the error that prevented it."""
_Devices: TypeAlias = Mapping[Engine, list[str]]
"""The engines that can load an update, each with the devices of its workers."""


class Trainer(Protocol):
    """All ranks of a trainer as one; each call reaches every rank, in the order of the calls."""

    async def publish(self) -> Manifest:
        """Call every rank's `WeightSender.publish` with the current weights; return the manifest of
        rank 0."""

    async def send(self, devices: Sequence[str]) -> None:
        """Call every rank's `WeightSender.send` with the current weights."""

    async def rendezvous(self) -> tuple[str, int]:
        """Return the address of rank 0's node, and a free port there."""

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        """Call every rank's `WeightSender.join`."""


class WeightSync:
    """Brings a trainer's weights to engines, by the transport with which the weights were
    published.

    Args:
        trainer: Source of the weights.
        timeout: Seconds for an update (`weights.update_timeout`).
        patience: Seconds that an engine that starts later waits for a busy trainer.
        published_again: Called after the trainer has published its weights again for an engine that
            starts later, so that the trainer can free memory that it held for this.
        tolerance: Maximum difference of a canary's log-probs, in nats; None skips the check.

    Example:
        sync = WeightSync(trainer, timeout=120.0, patience=300.0)
        published = await sync.publish()
        await manager.update_weights(sync)  # which calls `update` with its engines
    """

    def __init__(
        self,
        trainer: Trainer,
        timeout: float,
        patience: float,
        published_again: Callable[[], Awaitable[object]] | None = None,
        tolerance: float | None = None,
    ) -> None:
        self.current: Manifest | None = None
        """The last version that no engine refused; engines that start later get this version."""
        self._trainer = trainer
        self._timeout = timeout
        self._patience = patience
        self._published_again = published_again
        self._tolerance = tolerance
        self._offered: Manifest | None = None
        self._expected: StateDictInfo | None = None
        """The tensors of the first update; every later update must have the same tensors. None
        before the first update."""
        self._group: list[Engine] = []
        """Engines in the trainer's process group, in the order of their ranks."""

    @property
    def sends_newest(self) -> bool:
        """Whether an engine that starts later gets the trainer's newest weights instead of
        `current`."""
        return not find_transport(_published(self.current).transport).lasting

    async def publish(self) -> Manifest:
        """Have the trainer publish its weights, and offer them to engines."""
        self._offered = await self._publish(self._timeout)
        return self._offered

    async def update(
        self,
        engines: Iterable[Engine],
        in_flight: InFlight,
        take_results: Callable[[Mapping[Engine, object]], None] = lambda results: None,
    ) -> UpdateResults:
        """Bring the offered weights to all engines, or to no engine if one refuses them; return the
        results.

        Args:
            take_results: Called with each engine's result after each of three steps (check, push,
                canaries); an engine with an error must stop serving. If `take_results` raises, the
                update ends.

        Raises:
            WeightUpdateError: when an engine refuses the weights, so that all engines keep their
                weights; or when an engine's canary log-probs differ from the trainer's.
        """
        offered, engines = _published(self._offered), list(engines)
        ends = asyncio.get_running_loop().time() + self._timeout
        if differs := offered.mismatch(self._expected):
            raise WeightUpdateError(f"refused a weight update: {differs}")
        fit, errors = await self._check(engines, offered, self._timeout)
        _raise_refusals(errors)
        self.current = offered
        if self._expected is None:
            self._expected = offered.info
        take_results({engine: errors.get(engine) for engine in engines})
        pushed = await self._push(offered, fit, in_flight, self._timeout)
        take_results(pushed)
        loaded = [engine for engine, result in pushed.items() if isinstance(result, Updated)]
        compared = await self._compare(offered, loaded, ends)
        take_results(compared)
        return errors | pushed | compared

    async def update_one(self, engine: Engine, in_flight: InFlight) -> int:
        """Bring weights to one engine that starts later, and return their version: the current
        weights, or the trainer's newest (see `sends_newest`)."""
        published, seconds = _published(self.current), self._timeout
        clock = asyncio.get_running_loop().time
        if self.sends_newest:  # the trainer may be busy training before it sends
            seconds = self._patience
            published = await self._publish(seconds)
        try:
            ends = clock() + seconds
            fit, results = await self._check([engine], published, self._timeout)
            results |= await self._push(published, fit, in_flight, seconds)
        finally:
            if self.sends_newest and self._published_again is not None:
                await self._published_again()
        result = results[engine]
        # If the trainer made a step between publishing and sending, the weights are newer than the
        # canary's log-probs, which then cannot be compared.
        if isinstance(result, Updated) and result.version == published.version:
            result = (await self._compare(published, [engine], ends)).get(engine, result)
        if isinstance(result, TurnwiseError):
            raise result
        return result.version

    async def _publish(self, seconds: float) -> Manifest:
        async with deadline(seconds, "the trainer did not publish its weights"):
            return await self._trainer.publish()

    async def _check(
        self, engines: Iterable[Engine], published: Manifest, seconds: float
    ) -> tuple[dict[Engine, list[str]], UpdateResults]:
        """Return the devices of each engine that can load a version, and the errors of the other
        engines. Each engine must answer within `_CHECK_SHARE` of the update's `seconds`."""

        async def check(engine: Engine) -> list[str]:
            missed = f"{engine.name} did not check the update to version {published.version}"
            async with deadline(seconds * _CHECK_SHARE, missed):
                return await engine.check_update(published)

        fit: dict[Engine, list[str]] = {}
        errors: UpdateResults = {}
        for engine, result in (await _outcomes(engines, check)).items():
            if isinstance(result, TurnwiseError):
                errors[engine] = result
            else:
                fit[engine] = result
        return fit, errors

    async def _push(
        self, published: Manifest, fit: _Devices, in_flight: InFlight, seconds: float
    ) -> UpdateResults:
        """Update engines that were just checked. If an engine dies and this breaks the stream for
        all engines, send the update once more to the remaining engines. With deltas, send it once
        more to all failed engines, as all tensors."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        results = await self._attempt(published, fit, in_flight, seconds)
        failed = {e: result for e, result in results.items() if not isinstance(result, Updated)}
        deltas = published.checksum is not None
        if failed and (deltas or find_transport(published.transport).streamed):
            healthy, _ = await self._check(failed, published, max(0.0, end - clock()))
            again = healthy and (deltas or len(healthy) < len(failed))
            if again and (left := end - clock()) > 0:
                logger.info("%s get an update once more: %s", len(healthy), [*failed.values()])
                results |= await self._attempt(published, healthy, in_flight, left)
        return results

    async def _compare(
        self, published: Manifest, engines: Iterable[Engine], ends: float
    ) -> UpdateResults:
        """Have engines score the canary, and compare the log-probs with the trainer's.

        Args:
            ends: The update's deadline, in the event loop's time.
        """
        if not len(published.prompt) or (tolerance := self._tolerance) is None:
            return {}
        expected = (published.prompt, published.logprobs, tolerance, published.version)
        by = published.adapter

        left = ends - asyncio.get_running_loop().time()
        seconds = max(left, self._timeout * _CHECK_SHARE)

        async def compare(engine: Engine) -> Updated:
            missed = f"{engine.name} did not score the canary of version {published.version}"
            async with deadline(seconds, missed):
                return Updated(published.version, *await check_canary(engine, *expected, by))

        results = await _outcomes(engines, compare)
        _raise_refusals(results)
        return results

    async def _attempt(
        self, published: Manifest, fit: _Devices, in_flight: InFlight, seconds: float
    ) -> UpdateResults:
        async def update(engine: Engine) -> Updated:
            return Updated(await engine.update_weights(published, in_flight, seconds))

        transport = find_transport(published.transport)
        if not fit:
            return {}
        grouped = not transport.needs_group or self._group == list(fit)
        if not grouped and (error := await self._make_group(fit, seconds)) is not None:
            return dict.fromkeys(fit, error)
        if not transport.streamed:
            return await _outcomes(fit, update)

        async def send() -> None:
            async with deadline(seconds, "the trainer did not send its weights"):
                await self._trainer.send([device for each in fit.values() for device in each])

        failure, results = await _beside(send(), fit, update)
        if failure is not None:
            self._group = []
            # If an engine failed too, its own error is more specific.
            if all(isinstance(result, Updated) for result in results.values()):
                raise failure
        return results

    async def _make_group(self, fit: _Devices, seconds: float) -> TurnwiseError | None:
        """Have the trainer and these engines join a new process group; return the error, or None if
        all have joined."""
        self._group = []
        try:
            async with deadline(seconds, "the trainer did not open a rendezvous address"):
                ip, port = await self._trainer.rendezvous()
        except TurnwiseError as error:
            return error
        *starts, workers = accumulate(map(len, fit.values()), initial=0)
        first = dict(zip(fit, starts, strict=True))

        async def join(engine: Engine) -> None:
            place = Rendezvous(first[engine], ip, port, 1 + workers, 1)
            await engine.init_collective(place, seconds)

        joining = self._trainer.join(ip, port, workers, seconds)
        failure, joined = await _beside(joining, fit, join)
        for answer in (*joined.values(), failure):
            if isinstance(answer, TurnwiseError):
                return answer
        self._group = list(fit)
        return None


def _published(manifest: Manifest | None) -> Manifest:
    if manifest is None:
        raise WeightUpdateError("no weights have been published yet")
    return manifest


def _raise_refusals(results: UpdateResults) -> None:
    for result in results.values():
        if isinstance(result, WeightUpdateError):
            raise result


async def _outcomes(
    engines: Iterable[Engine], call: Callable[[Engine], Awaitable[_T]]
) -> dict[Engine, _T | TurnwiseError]:
    """Call all engines at once; return the result or error of each."""

    async def outcome(engine: Engine) -> _T | TurnwiseError:
        try:
            return await call(engine)
        except TurnwiseError as error:
            return error

    engines = list(engines)
    return dict(zip(engines, await together(map(outcome, engines)), strict=True))


async def _beside(
    trainers: Coroutine[object, object, None],
    engines: Iterable[Engine],
    call: Callable[[Engine], Awaitable[_T]],
) -> tuple[TurnwiseError | None, dict[Engine, _T | TurnwiseError]]:
    """Call all engines while the trainer does its half of the work; return the trainer's error, and
    each engine's result or error.

    After the trainer has given up, a silent engine (for example on a node that is cut off) has only
    `_ANSWER_SECONDS` to answer, so that time remains to update the other engines without it.
    """
    clock = StallClock(_ANSWER_SECONDS)
    clock.stopped = True

    async def lead() -> TurnwiseError | None:
        try:
            await trainers
        except TurnwiseError as error:
            clock.stopped = False
            return error
        return None

    async def answer(engine: Engine) -> _T:
        async with clock.watching(f"{engine.name} did not answer after the trainer had given up"):
            return await call(engine)

    async with task_group() as tasks:
        leading = tasks.create_task(lead())
        results = await _outcomes(engines, answer)
    return leading.result(), results


async def check_canary(
    engine: Engine,
    prompt: PromptLike,
    expected_logprobs: Sequence[float],
    tolerance: float,
    version: int,
    adapter: str = "",
) -> tuple[float, float]:
    """Compare the engine's log-probs of the prompt's tokens 1..T-1, without image tokens, with the
    trainer's log-probs; return the mean and the largest absolute difference, in nats.

    Args:
        adapter: Name of the adapter that scores the prompt; "" for the policy.

    Raises:
        WeightUpdateError: when the largest difference exceeds the tolerance, log-probs are missing,
            or the engine samples from a version other than `version`.
    """
    canary, route = Prompt.of(prompt), Route(adapter=adapter)
    # Urgent, so that the engine computes it before all waiting requests.
    name = f"canary-{version}"
    request = Request(canary, _CANARY_SAMPLING, name, route=route, urgent=True)
    completion = await generate(engine, request)
    if others := set(completion.weight_versions) - {version, FORCED}:
        raise WeightUpdateError(
            f"after the update to version {version} the engine samples from version {others.pop()}"
        )
    inside = {at for one in canary.images for at in range(one.start, one.end)}
    given = enumerate(completion.prompt_logprobs or [])
    scored = [value for at, value in given if at and at not in inside]
    if len(scored) != len(expected_logprobs):
        raise WeightUpdateError(f"the canary of version {version} came back without log-probs")
    differences = [
        abs((value if value is not None else float("nan")) - expected)
        for value, expected in zip(scored, expected_logprobs, strict=True)
    ]
    largest = max(differences, key=lambda d: float("inf") if d != d else d)
    if not largest <= tolerance:
        raise WeightUpdateError(
            f"after the update to version {version} the engine's log-probs differ from the "
            f"trainer's by up to {largest:.3g} (weights.canary_tolerance is {tolerance:g}): its "
            "weights are not the trainer's, or it rounds much more than the trainer"
        )
    return sum(differences) / len(differences), largest


def check_transport(name: str, streamed: str) -> None:
    """Raise `InputError` if a transport (`weights.transport`) cannot be loaded, or if it is a
    streamed one and `streamed` is not "".

    Args:
        streamed: The error's text if a streamed transport does not fit the configuration; "" if it
            does. The configuration itself can check this only for our own transports.
    """
    if find_transport(name).streamed and streamed:
        raise InputError(streamed)
