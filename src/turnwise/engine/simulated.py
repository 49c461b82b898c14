"""An engine without a model: seeded tokens, a latency model, failures on demand, virtual time.

It makes router, server and fault tests fast: `run_virtually` runs a coroutine on an event loop
whose clock jumps to the next timer, so hours of a thousand engines pass in seconds. A token is a
function of all ids before it and the seed, so a completion that moves to another engine with the
same seed goes on as it would have, and a test can tell every lost or repeated token.
"""

import asyncio
import selectors
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import (
    STREAM_INTERVAL,
    Chunk,
    Completion,
    FinishReason,
    InFlight,
    PauseMode,
    Route,
    collect,
)
from turnwise.errors import EngineError

_T = TypeVar("_T")
_PRIME = (1 << 61) - 1
_BLOCK = 32
_QUANTUM = 4


@dataclass(frozen=True, slots=True)
class Latency:
    """How long things take, in seconds; the defaults are near a small model on one CPU core."""

    prefill_token: float = 2e-5
    step: float = 4e-3
    """One decoding step, however many requests share it."""
    step_request: float = 1e-4
    """What each request adds to it."""


@dataclass(slots=True, eq=False)
class _Request:
    prompt: list[int]
    max_tokens: int
    state: int
    stream_interval: int
    sampled: int = 0
    cached: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chunks: "asyncio.Queue[Chunk | EngineError]" = field(default_factory=asyncio.Queue)


class SimulatedEngine:
    """Behaves like an engine at `latency`.

    Args:
        name: What errors call it.
        seed: Of the tokens; engines of one fleet share it as they would share weights.
        vocab_size: Ids are 1 to `vocab_size - 1`; 0 ends a completion.
        mean_tokens: Mean length of a completion that nothing else ends.
        max_num_seqs: Requests computed together; others queue.
        cache_blocks: Prompt blocks of 32 tokens that the prefix cache holds.
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
        """Everything takes this many times longer."""
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self._seed = seed
        self._vocab_size = vocab_size
        self._mean_tokens = mean_tokens
        self._max_num_seqs = max_num_seqs
        self._latency = latency or Latency()
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._cache_blocks = cache_blocks
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._by_id: dict[str, _Request] = {}
        self._task: asyncio.Task[None] | None = None
        self._dead = False
        self._awake = asyncio.Event()
        self._awake.set()

    def token(self, state: int) -> tuple[int, float]:
        """The token after a context, and its log-prob."""
        mixed = (state * 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed ^= mixed >> 29
        ends = mixed % self._mean_tokens == 0
        token = 0 if ends else 1 + (mixed >> 8) % (self._vocab_size - 1)
        return token, -1e-3 * (1 + (mixed >> 20) % 4000)

    def state(self, token_ids: Sequence[int]) -> int:
        """A number that stands for a context."""
        state = self._seed + 1
        for token in token_ids:
            state = (state * 1_000_003 + token + 7) % _PRIME
        return state

    def expected(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What a request samples, computed at once."""
        state, sampled = self.state(prompt_token_ids), list[int]()
        while len(sampled) < max_tokens:
            token, _ = self.token(state)
            sampled.append(token)
            if token == 0:
                break
            state = (state * 1_000_003 + token + 7) % _PRIME
        return sampled

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        chunks = self.stream(prompt_token_ids, sampling, request_id, seed, route)
        return await collect(chunks, self.name)

    async def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        if self._dead:
            raise EngineError(f"{self.name} is dead")
        prompt = list(prompt_token_ids)
        interval = getattr(sampling, "stream_interval", None) or STREAM_INTERVAL
        request = _Request(prompt, sampling.max_tokens, self.state(prompt), interval)
        self._by_id[request_id] = request
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            while True:
                chunk = await request.chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._forget(request)
            self._by_id.pop(request_id, None)

    async def _serve(self) -> None:
        latency = self._latency
        while self._waiting or self._running:
            await self._awake.wait()
            prefilled = 0
            while self._waiting and len(self._running) < self._max_num_seqs:
                request = self._waiting.pop(0)
                request.cached = self._look_up(request)
                prefilled += len(request.prompt) - request.cached
                self._running.append(request)
            step = latency.step + latency.step_request * len(self._running)
            await asyncio.sleep(
                self.slowdown * (prefilled * latency.prefill_token + _QUANTUM * step)
            )
            await self._awake.wait()
            for request in list(self._running):
                self._advance(request)

    def _advance(self, request: _Request) -> None:
        finish: FinishReason | None = None
        for _ in range(_QUANTUM):
            token, logprob = self.token(request.state)
            request.state = (request.state * 1_000_003 + token + 7) % _PRIME
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            request.sampled += 1
            if token == 0 or request.sampled >= request.max_tokens:
                finish = "stop" if token == 0 else "length"
                break
        if finish or len(request.token_ids) >= request.stream_interval:
            self._deliver(request, finish)

    def _deliver(self, request: _Request, finish: FinishReason | None) -> None:
        chunk = Chunk(
            request.token_ids,
            request.logprobs,
            request.versions,
            finish,
            cached_tokens=request.cached,
        )
        request.token_ids, request.logprobs, request.versions = [], [], []
        request.chunks.put_nowait(chunk)
        if finish is not None:
            self._forget(request)

    def _look_up(self, request: _Request) -> int:
        """Prompt tokens that the prefix cache holds; all of the prompt's blocks are then in it."""
        cached = 0
        self.prompt_tokens += len(request.prompt)
        block = 0
        for end in range(_BLOCK, len(request.prompt), _BLOCK):
            block = hash((block, *request.prompt[end - _BLOCK : end]))
            if block in self._cache:
                cached = end
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)
        self.cached_tokens += cached
        return cached

    def _forget(self, request: _Request) -> None:
        for requests in (self._running, self._waiting):
            if request in requests:
                requests.remove(request)

    def die(self) -> None:
        """Fail every request, now and later."""
        self._dead = True
        error = EngineError(f"{self.name} died")
        for request in [*self._running, *self._waiting]:
            self._forget(request)
            request.chunks.put_nowait(error)

    def hang(self) -> None:
        """Make no progress any more, without saying so."""
        self._awake.clear()

    async def abort(self, request_id: str) -> None:
        if (request := self._by_id.get(request_id)) is not None:
            self._deliver(request, "abort")

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

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], str]]
    ) -> None:
        pass

    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout: float | None = None,
    ) -> None:
        pass

    async def check_update(self, manifest: dict[str, Any]) -> list[str]:
        await self.check_health()
        return ["simulated"]

    async def update_weights(
        self, manifest: dict[str, Any], in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        await self.pause("wait" if in_flight == "drain" else in_flight)
        self.version = manifest["version"]
        self._cache.clear()
        await self.resume()
        return self.version

    async def reset_prefix_cache(self) -> None:
        self._cache.clear()

    async def check_health(self) -> None:
        if self._dead:
            raise EngineError(f"{self.name} is dead")
        await self._awake.wait()

    async def load(self) -> int:
        return len(self._running) + len(self._waiting)

    async def shutdown(self) -> None:
        self.die()


def run_virtually(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a clock that jumps over every wait.

    Raises:
        TimeoutError: when the work waits for what can never happen.
    """
    with asyncio.Runner(loop_factory=_VirtualTimeLoop) as runner:
        return runner.run(work)


class _VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.DefaultSelector):
    """A selector that, where nothing is ready, moves the clock instead of waiting."""

    def __init__(self, loop: _VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else _REAL_SECONDS)
        if not ready:
            if timeout is None:
                raise TimeoutError("everything waits, and no timer is set")
            self._loop.jump(timeout)
        return ready


_REAL_SECONDS = 30.0
"""For what a thread still has to tell, when no timer is left."""
