"""An engine without a model: seeded tokens, a latency model, and failures on demand.

It makes tests of router, server and faults fast: in virtual time (`tests.virtual_time`) a thousand
engines run for hours in seconds. A token is a function of the seed and all ids before it, so a
completion that moves to another engine with the same seed continues unchanged, and a test finds
every lost or repeated token.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import (
    PAUSE_MODES,
    STREAM_INTERVAL,
    Chunk,
    FinishReason,
    InFlight,
    PauseMode,
    Rendezvous,
    Request,
    Route,
    WeightUpdate,
)
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from prometheus_client import Metric

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x5851F42D4C957F2D
BLOCK = 32
_QUANTUM = 4


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations in seconds; the defaults approximate a small model on one CPU core.

    Example:
        SimulatedEngine(latency=Latency(step=1e-3))
    """

    prefill_token: float = 2e-5
    """Time to compute one token of a prompt."""
    step: float = 4e-3
    """Time of one decoding step, however many requests share it."""
    step_request: float = 1e-4
    """Time that each request adds to a step."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request in an engine."""

    prompt: Sequence[int]
    route: Route
    token_ids: list[int]
    """All tokens that it will sample: known from the start, and returned as time passes."""
    logprobs: list[float]
    stream_interval: int
    scored: bool
    """Whether log-probs of the prompt are asked for."""
    likeliest: tuple[int, int] = (0, 0)
    """Numbers of likeliest tokens that are asked for at prompt and completion: always 1, 2 ..."""
    sampled: int = 0
    delivered: int = 0
    cached: int = 0
    versions: list[int] = field(default_factory=list)
    """Weight versions of the tokens between `delivered` and `sampled`."""
    chunks: "asyncio.Queue[Chunk | EngineError]" = field(default_factory=asyncio.Queue)


class SimulatedEngine:
    """An engine that samples seeded tokens at `latency`.

    Args:
        name: Name in errors.
        seed: Seed of the tokens; engines of one fleet share it as they would share weights.
        vocab_size: Ids are 1 to `vocab_size - 1`; 0 ends a completion.
        mean_tokens: Mean length of a completion without other limits.
        max_num_seqs: Requests computed together; others queue.
        cache_blocks: Prompt blocks of 32 tokens that the prefix cache holds.

    Example:
        engine = SimulatedEngine(seed=1)
        completion = await generate(engine, Request([5, 6, 7], SamplingConfig(), "request-1"))
    """

    def __init__(
        self,
        *,
        name: str = "engine",
        seed: int = 0,
        vocab_size: int = 1000,
        mean_tokens: int = 48,
        max_num_seqs: int = 256,
        cache_blocks: int = 65_536,
        latency: Latency | None = None,
    ) -> None:
        self.name = name
        self.version = 0
        self.slowdown = 1.0
        """Factor that multiplies all durations."""
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self._seed = seed
        self._vocab_size = vocab_size
        self._mean_tokens = mean_tokens
        self._max_num_seqs = max_num_seqs
        self._latency = latency or Latency()
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cache_blocks = cache_blocks
        self._waiting: dict[Asked, None] = {}
        self._running: dict[Asked, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._dead = False
        self._awake = asyncio.Event()
        self._awake.set()

    def expected(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that a request would sample, without waiting."""
        return self._sample(prompt_token_ids, max_tokens)[0]

    def _ids(self, request: Request) -> Sequence[int]:
        return request.prompt.tolist()

    def _sample(
        self, prompt_token_ids: Sequence[int], max_tokens: int
    ) -> tuple[list[int], list[float]]:
        """Return a completion's tokens and their log-probs."""
        state, token_ids, logprobs = self._state(prompt_token_ids), list[int](), list[float]()
        mean_tokens, words = self._mean_tokens, self._vocab_size - 1
        for _ in range(max_tokens):
            mixed = (state * 0x9E3779B97F4A7C15) & _MASK
            mixed ^= mixed >> 29
            token = 1 + (mixed >> 8) % words if mixed % mean_tokens else 0
            token_ids.append(token)
            logprobs.append(-1e-3 * (1 + (mixed >> 20) % 4000))
            if token == 0:
                break
            state = (state * _MULTIPLIER + token + 7) & _MASK
        return token_ids, logprobs

    def _state(self, token_ids: Sequence[int]) -> int:
        """Hash a context: `state * _MULTIPLIER + token + 7`, token by token."""
        ids = np.array([self._seed, *token_ids], dtype=np.uint64) + np.uint64(7)
        return int(ids @ _powers(len(ids))) & _MASK

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._dead:
            raise EngineError(f"{self.name} is dead")
        prompt, sampling = self._ids(request), request.sampling
        seen = [int(one.image.hash, 16) % 2**32 for one in request.prompt.images]
        interval, scored = STREAM_INTERVAL, bool(sampling.prompt_logprobs)
        if not isinstance(sampling, SamplingConfig):
            interval = sampling.stream_interval or STREAM_INTERVAL
            scored = sampling.prompt_logprobs is not None  # 0 asks for the prompt's own tokens
        tokens = self._sample([*seen, *prompt] if seen else prompt, sampling.max_tokens)
        asked = Asked(prompt, request.route, *tokens, interval, scored)
        if not isinstance(sampling, SamplingConfig):
            asked.likeliest = sampling.prompt_logprobs or 0, sampling.logprobs or 0
        if request.urgent:  # it takes the place of one that runs
            last = [*self._running][self._max_num_seqs - 1 :]
            self._waiting = dict.fromkeys([asked, *last, *self._waiting])
            for each in last:
                del self._running[each]
        else:
            self._waiting[asked] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            while True:
                chunk = await asked.chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._forget(asked)

    async def _serve(self) -> None:
        latency = self._latency
        while self._waiting or self._running:
            await self._awake.wait()
            prefilled = 0
            while self._waiting and len(self._running) < self._max_num_seqs:
                request = next(iter(self._waiting))
                del self._waiting[request]
                request.cached = self._look_up(request)
                prefilled += len(request.prompt) - request.cached
                self._running[request] = None
            step = latency.step + latency.step_request * len(self._running)
            await asyncio.sleep(
                self.slowdown * (prefilled * latency.prefill_token + _QUANTUM * step)
            )
            await self._awake.wait()
            for request in list(self._running):
                self._advance(request)

    def _advance(self, request: Asked) -> None:
        before = request.sampled
        request.sampled = min(before + _QUANTUM, len(request.token_ids))
        request.versions += [self.version] * (request.sampled - before)
        if request.sampled == len(request.token_ids):
            self._deliver(request, "length" if request.token_ids[-1] else "stop")
        elif request.sampled - request.delivered >= request.stream_interval:
            self._deliver(request, None)

    def _deliver(self, request: Asked, finish: FinishReason | None) -> None:
        new = slice(request.delivered, request.sampled)
        first = request.scored and not request.delivered
        scores = [(token, -1e-3 * token, 1) for token in request.prompt[1:]] if first else []
        at_prompt, at_token = (
            [(token, -0.5 * token, token) for token in range(1, count + 1)]
            for count in request.likeliest
        )
        chunk = Chunk(
            request.token_ids[new],
            request.logprobs[new],
            request.versions,
            finish,
            cached_tokens=request.cached,
            prompt_logprobs=[None, *(score for _, score, _ in scores)] if first else None,
            alternatives=[
                [(*pair, 1), *at_token]
                for pair in zip(request.token_ids[new], request.logprobs[new], strict=True)
                if at_token
            ],
            prompt_alternatives=[[each, *at_prompt] for each in scores],
        )
        request.delivered, request.versions = request.sampled, []
        request.chunks.put_nowait(chunk)
        if finish is not None:
            self._forget(request)

    def _look_up(self, request: Asked) -> int:
        """Return the cached prompt tokens, and add all of the prompt's blocks to the cache."""
        cached = 0
        self.prompt_tokens += len(request.prompt)
        block = 0
        for end in range(BLOCK, len(request.prompt), BLOCK):
            block = hash((block, *request.prompt[end - BLOCK : end]))
            if block in self._cache:
                cached = end
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)
        self.cached_tokens += cached
        return cached

    def _forget(self, request: Asked) -> None:
        self._running.pop(request, None)
        self._waiting.pop(request, None)

    def die(self) -> None:
        """Fail every request, now and later."""
        self._dead = True
        error = EngineError(f"{self.name} died")
        for request in [*self._running, *self._waiting]:
            self._forget(request)
            request.chunks.put_nowait(error)

    def hang(self) -> None:
        """Stop making progress, without an error."""
        self._awake.clear()

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            for request in [*self._running, *self._waiting]:
                self._deliver(request, "abort")
        if mode == "wait" and self._task is not None:
            await asyncio.wait([self._task])
        self._awake.clear()

    async def resume(self) -> None:
        self._awake.set()

    async def sleep(self) -> None:
        await self.pause("abort")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.resume()

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        pass

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        await self.check_health()
        return ["simulated"]

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        await self.pause(PAUSE_MODES[in_flight])
        self.version = manifest.version
        self._cache.clear()
        await self.resume()
        return self.version

    async def reset_prefix_cache(self) -> None:
        self._cache.clear()

    async def metrics(self) -> "list[Metric]":
        return []

    async def check_health(self) -> None:
        if self._dead:
            raise EngineError(f"{self.name} is dead")
        await self._awake.wait()

    async def num_in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    async def shutdown(self) -> None:
        self.die()


def _powers(count: int) -> npt.NDArray[np.uint64]:
    """Return `count` powers of the multiplier modulo 2 to the 64th, the highest first."""
    global _known_powers
    if count > len(_known_powers):
        factors = np.full(2 * count, _MULTIPLIER, dtype=np.uint64)
        factors[-1] = 1
        _known_powers = np.multiply.accumulate(factors[::-1])[::-1]
    return _known_powers[-count:]


_known_powers: npt.NDArray[np.uint64] = np.ones(1, dtype=np.uint64)
