"""What an inference engine is to the rest of turnwise: token ids in, token ids out.

Text, messages and tools do not exist here. Every call has a deadline; a call that misses it
raises `DeadlineError` with the engine's name, and a dead engine raises `EngineError`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from turnwise.config import SamplingConfig
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from prometheus_client import Metric

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
InFlight = Literal["drain", "abort", "keep", "keep_cache"]
PAUSE_MODES: dict[InFlight, PauseMode] = {
    "drain": "wait",
    "abort": "abort",
    "keep": "keep",
    "keep_cache": "keep",
}
"""How an engine pauses for an update."""

VLLM_METRICS = "vllm:"
"""Prefix of the names of vLLM's own statistics."""
STREAM_INTERVAL = 32
"""Tokens in a chunk: how much is sampled again, at most, when an engine dies."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a completion were sampled by weight `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Route:
    """Whose request it is: routers keep a session on one engine and a group's start together.

    Engines themselves need none of it.
    """

    session: str = ""
    """One trajectory's name; "" is a request of its own."""
    group: str = ""
    """The problem whose trajectories begin with one prompt; "" is none."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `T` tokens of a completion that is streamed, `T` at least 1 but in the last one."""

    token_ids: list[int]
    logprobs: list[float]
    """As in `Completion`."""
    weight_versions: list[int]
    finish_reason: FinishReason | None = None
    """In the last chunk."""
    stop_reason: int | str | None = None
    """The stop token or string that ended the completion, where it is not the model's own."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused; told at the latest in the last chunk."""
    prompt_logprobs: list[float | None] | None = None
    """In the last chunk, where asked for."""
    alternatives: list[list[tuple[int, float, int]]] = field(default_factory=list)
    """Where asked for: for each token, (id, log-prob, rank from 1) of it and of the likeliest."""

    def __add__(self, following: "Chunk") -> "Chunk":
        """Both as one; how it ended is told by the second."""
        return Chunk(
            self.token_ids + following.token_ids,
            self.logprobs + following.logprobs,
            self.weight_versions + following.weight_versions,
            following.finish_reason,
            following.stop_reason,
            following.cached_tokens or self.cached_tokens,
            following.prompt_logprobs,
            self.alternatives + following.alternatives,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What one call of the engine sampled: `T` tokens, the stop token included."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each token under the processed sampling distribution."""
    version_spans: list[VersionSpan]
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token where asked for; the first token has none."""

    def __post_init__(self) -> None:
        covered = [i for span in self.version_spans for i in range(span.start, span.end)]
        if len(self.logprobs) != len(self.token_ids) or covered != [*range(len(self.token_ids))]:
            raise EngineError(
                f"an engine returned {len(self.token_ids)} tokens with {len(self.logprobs)} "
                f"log-probs and weight versions for {len(covered)} of them"
            )

    @property
    def weight_versions(self) -> list[int]:
        """The version of each of the `T` tokens."""
        return [span.version for span in self.version_spans for _ in range(span.start, span.end)]


class Generator(Protocol):
    """What samples completions: an engine, or the scheduler before many."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> Completion:
        """Sample one completion; `sampling.n` is the caller's business. Cancelling aborts."""
        ...

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Any,
        request_id: str,
        seed: int | None = None,
        route: Route | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """The same, piece by piece, `STREAM_INTERVAL` tokens at a time. Closing it aborts.

        `sampling` is a `SamplingConfig`, or vLLM's own `SamplingParams`, which know more.
        """
        ...


class Engine(Generator, Protocol):
    """One inference engine."""

    name: str
    """What errors call it."""

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled, as `abort`."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing: `abort` and `wait` end the requests in flight, `keep` freezes them."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """End the requests in flight, as `abort`, and give memory back where the platform can."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take it again: all, or a part (weights, kv_cache)."""
        ...

    async def prepare_refit_info(
        self, state_dict_info: Mapping[str, tuple[Sequence[int], Any]]
    ) -> None:
        """Say which tensors every update must bring: shape and torch type, or its name, by name."""
        ...

    async def init_collective(
        self,
        rank_prefix: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int,
        timeout: float | None = None,
    ) -> None:
        """Join the trainer's process group with `train_world_size + rank_prefix` and the ranks
        after it, one a worker; nothing is computed until all ranks are there.

        Raises:
            DeadlineError: when one is not within `timeout` (`engine.request_timeout`) seconds.
            InputError: when the group cannot be made.
        """
        ...

    async def check_update(self, manifest: dict[str, Any]) -> list[str]:
        """Whether an update could be loaded; touches no weight.

        Returns:
            Where each of the engine's workers computes: the GPU's UUID, or the host of CPUs.

        Raises:
            WeightUpdateError: when it could not, and why.
        """
        ...

    async def update_weights(
        self, manifest: dict[str, Any], in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        """Load the weights that the manifest names, by its transport.

        Requests in flight are finished first (`drain`), ended with what they have, as `abort`
        (`abort`), or frozen meanwhile and continued under the new weights, with their cache
        computed anew (`keep`) or as it is (`keep_cache`). No later request is given anything that
        older weights computed. What is sent (`ipc`, `collective`) is waited for while requests go
        on.

        Returns:
            The version that is served now: the manifest's, or the one that was sent.

        Raises:
            WeightUpdateError: with the old weights in place when the update does not fit; paused,
                until an update succeeds, when loading fails.
            DeadlineError: likewise, when it is not done within `timeout`
                (`engine.request_timeout`) seconds.
        """
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def check_health(self) -> None:
        """Raises `EngineError` when the engine is dead, `DeadlineError` when it hangs."""
        ...

    async def load(self) -> int:
        """Requests in flight."""
        ...

    async def metrics(self) -> "list[Metric]":
        """The engine's own statistics, vLLM's by name; empty where it keeps none."""
        ...

    async def shutdown(self) -> None: ...


async def collect(chunks: AsyncIterator[Chunk], name: str) -> Completion:
    """A stream's chunks as one completion.

    Raises:
        EngineError: when the stream ended without a finish reason.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    last: Chunk | None = None
    async for last in chunks:
        token_ids += last.token_ids
        logprobs += last.logprobs
        versions += last.weight_versions
    if last is None or last.finish_reason is None:
        raise EngineError(f"{name} ended a request without an answer")
    return Completion(
        token_ids,
        logprobs,
        spans(versions),
        last.finish_reason,
        last.cached_tokens,
        last.prompt_logprobs,
    )


def spans(weight_versions: Sequence[int]) -> list[VersionSpan]:
    """Runs of equal versions, one per token, as spans."""
    result: list[VersionSpan] = []
    start = 0
    for end in range(1, len(weight_versions) + 1):
        if end == len(weight_versions) or weight_versions[end] != weight_versions[start]:
            result.append(VersionSpan(weight_versions[start], start, end))
            start = end
    return result
