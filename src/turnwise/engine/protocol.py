"""The protocol of an inference engine: token ids in, token ids out.

Engines know nothing of text, messages or tools. Every call has a deadline; a call that misses it
raises `DeadlineError` with the engine's name, and a dead engine raises `EngineError`.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import EngineError
from turnwise.trajectory.prompt import Prompt

if TYPE_CHECKING:
    from prometheus_client import Metric

    from turnwise.internals.vllm import SamplingParams

Sampling: TypeAlias = "SamplingConfig | SamplingParams"
"""Sampling parameters of a request: ours, or vLLM's own, which have more options."""
Alternatives: TypeAlias = list[list[tuple[int, float, int]]]
"""For each token, (id, log-prob, rank from 1) of it and of the others that were asked for."""
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
InFlight = Literal["drain", "abort", "keep", "keep_cache"]
PAUSE_MODES: dict[InFlight, PauseMode] = {
    "drain": "wait",
    "abort": "abort",
    "keep": "keep",
    "keep_cache": "keep",
}
"""Pause of an engine during an update, for each value of `weights.in_flight`."""

WEIGHT_BACKEND = "turnwise"
"""Name under which a worker extension registers its loader of weights with vLLM."""
VLLM_METRICS = "vllm:"  # prefix of the names of vLLM's own statistics
STREAM_INTERVAL = 32
"""Tokens in a chunk, and so the most that are sampled again when an engine dies."""


@dataclass(frozen=True, slots=True)
class Route:
    """Session and group of a request, which routers keep on one engine, and its adapter."""

    session: str = ""
    """Name of the trajectory; "" for a request that belongs to none."""
    group: str = ""
    """Name of the group of trajectories that begin with one prompt; "" for none."""
    adapter: str = ""
    """Name in `serving.adapters`, or in `rollout.policies`, of the adapter that samples; "" for the
    policy of a run that has one."""
    folder: str = ""
    """Folder in PEFT's format of an adapter under a name of its own, from which an engine loads it
    when it needs it; "" for those that an engine holds."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how one completion of it is sampled; a list of ids becomes a `Prompt`."""

    prompt: Prompt
    sampling: Sampling
    id: str
    """Name, which no other unfinished request of the engine has."""
    seed: int | None = None
    """Seed of this request; None takes the sampling parameters' own, or the engine's."""
    route: Route = Route()
    whole: bool = False
    """Whether no token is passed on before the last: then a request whose worker died can begin
    again where it cannot be continued."""
    urgent: bool = False
    """Whether the engine computes it before all that wait, and in the place of one that runs if it
    has no room: for what the fleet itself asks, such as the check of a weight update."""
    record_allowed: bool = False
    """Whether the last chunk has the ids that the request's grammar allowed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", Prompt.of(self.prompt))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `T` tokens of a completion; `T` may be 0 in the last chunk only."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probabilities, as in `Completion`."""
    weight_versions: list[int]
    """As in `Completion`."""
    finish_reason: FinishReason | None = None
    """Reason in the last chunk; None in all others."""
    stop_reason: int | str | None = None
    """Stop token or string that ended the completion; None if it was the model's own, or if
    there was none."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused; known in the last chunk at the latest."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token in the first chunk, if requested; None otherwise."""
    alternatives: Alternatives = field(default_factory=list)
    """Those of the chunk's tokens, if requested."""
    prompt_alternatives: Alternatives = field(default_factory=list)
    """Those of the prompt's tokens but the first, in the first chunk, if requested."""
    first_token_age: float | None = field(default=None, compare=False)
    """Seconds since the request's first token; None if the engine does not measure it."""
    queued: float | None = field(default=None, compare=False)
    """Seconds that the request waited in vLLM's queue; None without vLLM's statistics
    (`engine.metrics`)."""
    worker: str = field(default="", compare=False)
    """In a scheduler's last chunk, the name of the worker that sampled the last token."""
    experts: bytes = b""
    """In the last chunk, with `engine.routing_replay`: a row of `Turn.experts` for each id
    of prompt and completion but the last."""
    stored_tokens: int = 0
    """Prompt tokens that the request added to the prefix cache; known when `cached_tokens` is."""
    allowed: Sequence[bytes] = ()
    """In the last chunk of a request with a grammar, `Turn.allowed` of the whole completion."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion of `T` tokens, including the stop token.

    EngineError when tokens, log-probs and weight versions are not of one length.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each token under the processed sampling distribution."""
    weight_versions: list[int]
    """Version of the weights that sampled each token; `trajectory.FORCED` for one that a logits
    processor forced."""
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token if requested, and None for the first; None if not requested."""
    first_token_at: float | None = field(default=None, compare=False)
    """Time of the first token, in seconds since the epoch; None if it is not known."""
    queued: float | None = field(default=None, compare=False)
    """As in `Chunk`."""
    worker: str = field(default="", compare=False)
    """Name of the worker that sampled the last token; "" if there is only an engine."""
    experts: bytes = b""
    """As in `Chunk`."""
    alternatives: Alternatives = field(default_factory=list)
    """As in `Chunk`."""
    prompt_alternatives: Alternatives = field(default_factory=list)
    """As in `Chunk`."""
    allowed: Sequence[bytes] = ()
    """As in `Chunk`."""

    @property
    def as_turn(self) -> JsonObject:
        """The arguments by which `Trajectory.add_turn` records it after its prompt."""
        return {
            "completion_token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "weight_versions": self.weight_versions,
            "finish_reason": self.finish_reason,
            "prompt_logprobs": self.prompt_logprobs,
            "experts": self.experts,
            "allowed": self.allowed,
        }

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.weight_versions):
            raise EngineError(
                f"an engine returned {len(self.token_ids)} tokens with {len(self.logprobs)} "
                f"log-probs and weight versions for {len(self.weight_versions)} of them"
            )


class TurnTimes(NamedTuple):
    """When a turn was sampled, in seconds since the epoch, and by which worker."""

    turn: int
    """Its index in `Trajectory.turns`."""
    asked: float
    first_token: float | None
    """None if it is not known."""
    ended: float
    worker: str
    queued: float | None = None
    """Seconds in vLLM's queue; None without vLLM's statistics (`engine.metrics`)."""
    tools: float | None = None
    """Seconds of tools and environment after the turn; None if they ran in an agent."""


class Rendezvous(NamedTuple):
    """The process group of a trainer and its engines, as one engine joins it."""

    rank_prefix: int
    """The engine's first rank, counted after the trainer's; each of its workers takes one."""
    ip: str
    port: int
    world_size: int
    train_world_size: int


class Occupancy(NamedTuple):
    """The load of an engine at one moment."""

    running: int
    """Number of sequences in its batch."""
    waiting: int
    """Number of requests that wait for a place in it, or for room in the cache."""
    cache: float
    """Share of its KV cache that running sequences use, from 0 to 1."""


class WeightUpdate(Protocol):
    """The description of one weight update, as engines see it."""

    @property
    def version(self) -> int: ...

    def to_dict(self) -> JsonObject:
        """Return it as plain values, for the engine's own processes."""


class Generator(Protocol):
    """A source of completions: an engine, or the scheduler of many."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample one completion, whatever `sampling.n` is, `STREAM_INTERVAL` tokens at a time.

        Closing the stream aborts it.
        """


class Engine(Generator, Protocol):
    """One inference engine."""

    name: str
    """Name in errors."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing: `abort` and `wait` end the requests in flight, `keep` freezes them."""

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Abort the requests in flight, and free memory where the platform can."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again: all, or the parts in `tags` (weights, kv_cache)."""

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        """Join the trainer's process group. Nothing is computed until all ranks have joined.

        Raises:
            DeadlineError: when one has not after `timeout` (`engine.request_timeout`) seconds.
            InputError: when the group cannot be made.
        """

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        """Check that an update can be loaded, or raise `WeightUpdateError`; changes no weights.

        Returns:
            The device of each of the engine's workers: the GPU's UUID, or the host of CPUs.
        """

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        """Load the weights that the manifest describes, and return the version that is now served.

        Requests in flight are treated as `weights.in_flight` says; later ones never use cached
        prefixes of older weights. With a stream, requests keep running until the first chunk
        arrives. An engine of a trained adapter (`weights.lora: adapter`) pauses none: requests in
        flight keep their adapter unless they are to be aborted.

        Raises:
            WeightUpdateError: when the update does not fit, and the old weights stay in place; or
                when loading fails, and the engine stays paused until an update succeeds.
            DeadlineError: likewise, when it is not done within `timeout`
                (`engine.request_timeout`) seconds.
        """

    async def reset_prefix_cache(self) -> None: ...

    async def check_health(self) -> Occupancy | None:
        """Raise `EngineError` when the engine is dead, `DeadlineError` when it hangs; return what
        it computes, or None if that is not known."""

    async def num_in_flight(self) -> int:
        """Return the number of unfinished requests."""

    async def metrics(self) -> "list[Metric]":
        """Return the engine's own statistics, vLLM's by name; empty if it keeps none."""

    async def shutdown(self) -> None: ...


async def generate(generator: Generator, request: Request) -> Completion:
    """Sample one completion; EngineError when it fails. Cancelling aborts the request."""
    async with aclosing(generator.stream(replace(request, whole=True))) as chunks:
        return await collect(chunks, request.id)


async def unbroken(generator: Generator, request: Request) -> AsyncGenerator[Chunk, None]:
    """Stream a completion for a client, who must not take a part of an answer for all of it;
    EngineError when an update or a sleep of the engine ends it early. A scheduler continues it."""
    async with aclosing(generator.stream(request)) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason == "abort":
                raise EngineError(f"an update or a sleep of the engine ended {request.id} early")
            yield chunk


async def collect(chunks: AsyncIterator[Chunk], request_id: str) -> Completion:
    return completion_of([chunk async for chunk in chunks], request_id)


def completion_of(chunks: Sequence[Chunk], request_id: str) -> Completion:
    """Join the chunks of a whole stream; EngineError without a finish reason."""
    whole = join(chunks) if chunks else None
    if whole is None or whole.finish_reason is None:
        raise EngineError(f"{request_id} ended without an answer")
    return Completion(
        whole.token_ids,
        whole.logprobs,
        whole.weight_versions,
        whole.finish_reason,
        whole.cached_tokens,
        whole.prompt_logprobs,
        None if whole.first_token_age is None else time.time() - whole.first_token_age,
        whole.queued,
        whole.worker,
        whole.experts,
        whole.alternatives,
        whole.prompt_alternatives,
        whole.allowed,
    )


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Join consecutive chunks; the finish reason, counts and times are the last one's."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        weight_versions=[version for chunk in chunks for version in chunk.weight_versions],
        prompt_logprobs=next((c.prompt_logprobs for c in chunks if c.prompt_logprobs), None),
        alternatives=[one for chunk in chunks for one in chunk.alternatives],
        prompt_alternatives=[one for chunk in chunks for one in chunk.prompt_alternatives],
    )
