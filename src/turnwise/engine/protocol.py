"""The protocol of an inference engine: token ids in, token ids out.

Engines know nothing about text, messages or tools. Every call has a deadline; a call that misses
its deadline raises `DeadlineError` with the engine's name. A dead engine raises `EngineError`.
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
"""Sampling parameters for a request: ours, or vLLM's own parameters, which have more options."""
Alternatives: TypeAlias = list[list[tuple[int, float, int]]]
"""For each position, (id, log-prob, rank from 1) of the token itself and of each further token
whose log-prob was requested."""
FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
InFlight = Literal["drain", "abort", "keep", "keep_cache"]
PAUSE_MODES: dict[InFlight, PauseMode] = {
    "drain": "wait",
    "abort": "abort",
    "keep": "keep",
    "keep_cache": "keep",
}
"""The engine's pause mode during an update, for each value of `weights.in_flight`."""

WEIGHT_BACKEND = "turnwise"
"""Name under which a worker extension registers its weight loader with vLLM."""
VLLM_METRICS = "vllm:"  # prefix of the names of vLLM's own statistics
STREAM_INTERVAL = 32
"""Number of tokens in a chunk, which is also the maximum number of a request's tokens that are
sampled again when an engine dies."""


@dataclass(frozen=True, slots=True)
class Route:
    """Session, group and adapter of a request. Routers keep the requests of a session or group on
    one engine."""

    session: str = ""
    """Name of the trajectory; "" for a request without a trajectory."""
    group: str = ""
    """Name of the group of trajectories that begin with the same prompt; "" without a group."""
    adapter: str = ""
    """Name of the adapter that samples, from `serving.adapters` or `rollout.policies`, or a unique
    name for the adapter in `folder`; "" for the only policy of a run."""
    folder: str = ""
    """Folder in PEFT's format from which an engine loads the adapter when a request needs it; "" if
    the engine holds the adapter already."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the settings to sample one completion; a list of ids becomes a `Prompt`."""

    prompt: Prompt
    sampling: Sampling
    id: str
    """The request's name; unique among the engine's unfinished requests."""
    seed: int | None = None
    """Seed of this request; None takes the seed of the sampling parameters, or else the engine's
    seed."""
    route: Route = Route()
    whole: bool = False
    """Whether the caller gets no token before the completion is whole. If so, a request whose
    worker died, and which cannot be continued, can begin again."""
    urgent: bool = False
    """Whether the engine computes this request before all waiting requests, and preempts running
    requests if it has no room. For our own requests, such as the check of a weight update."""
    record_allowed: bool = False
    """Whether the last chunk contains the ids that the request's grammar allowed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", Prompt.of(self.prompt))

    def as_whole(self) -> "Request":
        return Request(  # `replace` takes five times as long, for each turn
            *(self.prompt, self.sampling, self.id, self.seed, self.route),
            whole=True,
            urgent=self.urgent,
            record_allowed=self.record_allowed,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `T` tokens of a completion; `T` may be 0 in the last chunk only."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probabilities, as in `Completion`."""
    weight_versions: list[int]
    """As in `Completion`."""
    finish_reason: FinishReason | None = None
    """The finish reason in the last chunk; None in all earlier chunks."""
    stop_reason: int | str | None = None
    """Stop token or string that ended the completion; None if the model's own EOS token or no stop
    token ended it."""
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused; known in the last chunk at the latest."""
    prompt_logprobs: list[float | None] | None = None
    """In the first chunk, if requested: one value per prompt token. None otherwise."""
    alternatives: Alternatives = field(default_factory=list)
    """Alternatives of the chunk's tokens, if requested."""
    prompt_alternatives: Alternatives = field(default_factory=list)
    """In the first chunk, if requested: alternatives of the prompt's tokens except the first."""
    first_token_age: float | None = field(default=None, compare=False)
    """Seconds since the request's first token; None if the engine does not measure it."""
    queued: float | None = field(default=None, compare=False)
    """Seconds that the request waited in vLLM's queue; None without vLLM's statistics
    (`engine.metrics`)."""
    worker: str = field(default="", compare=False)
    """In a scheduler's last chunk, the name of the worker that sampled the last token."""
    experts: bytes = b""
    """In the last chunk, with `engine.routing_replay`: the routed experts of each id of the prompt
    and the completion, except the last id, in the format of `Turn.experts`."""
    stored_tokens: int = 0
    """Prompt tokens that the request added to the prefix cache; known when `cached_tokens` is
    known."""
    allowed: Sequence[bytes] = ()
    """In the last chunk of a request with a grammar, `Turn.allowed` of the whole completion."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion of `T` tokens, including the stop token.

    Raises:
        EngineError: when there are not as many log-probs or weight versions as tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each token under the processed sampling distribution."""
    weight_versions: list[int]
    """Version of the weights that sampled each token; `trajectory.FORCED` for a token that a logits
    processor forced."""
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose KV cache was reused."""
    prompt_logprobs: list[float | None] | None = None
    """One value per prompt token, which is None for the first token; None if not requested."""
    first_token_at: float | None = field(default=None, compare=False)
    """Time of the first token, in seconds since the epoch; None if it is not known."""
    queued: float | None = field(default=None, compare=False)
    """As in `Chunk`."""
    worker: str = field(default="", compare=False)
    """Name of the worker that sampled the last token; "" without a scheduler."""
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
        """The arguments of `Trajectory.add_turn` that record this completion as a turn, without the
        prompt."""
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
    """The turn's index in `Trajectory.turns`."""
    asked: float
    first_token: float | None
    """Time of the first token; None if it is not known."""
    ended: float
    worker: str
    queued: float | None = None
    """Seconds in vLLM's queue; None without vLLM's statistics (`engine.metrics`)."""
    tools: float | None = None
    """Seconds that tools and environment took after the turn; None if an agent ran them."""


class Rendezvous(NamedTuple):
    """The ranks of one engine in the process group of a trainer and its engines, and the group's
    address."""

    rank_prefix: int
    """The engine's first rank, counted after the trainer's ranks; each of its workers takes one
    rank."""
    ip: str
    port: int
    world_size: int
    train_world_size: int


class Occupancy(NamedTuple):
    """The load of an engine at one moment."""

    running: int
    """Number of sequences in its batch."""
    waiting: int
    """Number of requests that wait for a slot in the batch, or for room in the cache."""
    cache: float
    """Fraction of the engine's KV cache that running sequences use, from 0 to 1."""


class WeightUpdate(Protocol):
    """The description of one weight update, as engines see it."""

    @property
    def version(self) -> int: ...

    def to_dict(self) -> JsonObject:
        """Return the description as plain values, for the engine's own processes."""


class Generator(Protocol):
    """A source of completions: an engine, or a scheduler of many engines."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Sample one completion in chunks of `STREAM_INTERVAL` tokens; `sampling.n` is ignored.

        Closing the stream aborts the request.
        """


class Engine(Generator, Protocol):
    """One inference engine."""

    name: str
    """Name in errors."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing. `abort` aborts the requests in flight, `wait` waits until they have
        finished, and `keep` freezes them."""

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Abort the requests in flight, and free memory if the platform supports this."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the freed memory again: all of it, or only for `tags` (weights, kv_cache)."""

    async def init_collective(self, group: Rendezvous, timeout: float | None = None) -> None:
        """Join the trainer's process group. Nothing is computed until all ranks have joined.

        Raises:
            DeadlineError: when a rank has not joined after `timeout` seconds (by default
                `engine.request_timeout`).
            InputError: when the group cannot be made.
        """

    async def check_update(self, manifest: WeightUpdate) -> list[str]:
        """Check that an update can be loaded; raise `WeightUpdateError` if it cannot. No weights
        are changed.

        Returns:
            The device of each of the engine's workers: a GPU's UUID; on a CPU, `HOST-PROCESS_ID`.
        """

    async def update_weights(
        self, manifest: WeightUpdate, in_flight: InFlight = "keep", timeout: float | None = None
    ) -> int:
        """Load the weights that the manifest describes, and return the version that is now served.

        `in_flight`, a value of `weights.in_flight`, decides what happens to requests in flight.
        Later requests never use cached prefixes of older weights. With a streamed transport,
        requests keep running until the first chunk arrives. An engine with a trained adapter
        (`weights.lora: adapter`) does not pause requests: requests in flight keep their adapter,
        unless `in_flight` is `abort`.

        Raises:
            WeightUpdateError: when the update does not fit, so that the old weights stay in place;
                or when loading fails, after which the engine stays paused until an update succeeds.
            DeadlineError: when the update is not done within `timeout` seconds (by default
                `engine.request_timeout`); the engine is then in one of the same two states.
        """

    async def reset_prefix_cache(self) -> None: ...

    async def check_health(self) -> Occupancy | None:
        """Return the engine's load, or None if the load is not known. Raise `EngineError` when the
        engine is dead, and `DeadlineError` when it hangs."""

    async def num_in_flight(self) -> int:
        """Return the number of unfinished requests."""

    async def metrics(self) -> "list[Metric]":
        """Return the engine's own statistics under vLLM's names; [] if it does not keep any."""

    async def shutdown(self) -> None: ...


async def generate(generator: Generator, request: Request) -> Completion:
    """Sample one completion; raise EngineError when this fails. Cancelling aborts the request."""
    async with aclosing(generator.stream(request.as_whole())) as chunks:
        return await collect(chunks, request.id)


async def unbroken(generator: Generator, request: Request) -> AsyncGenerator[Chunk, None]:
    """Stream a completion for a client that must not mistake part of an answer for a whole answer.

    Raise EngineError when an update or a sleep of the engine ends the completion early. This cannot
    happen with a scheduler, which continues the completion.
    """
    async with aclosing(generator.stream(request)) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason == "abort":
                raise EngineError(f"an update or a sleep of the engine ended {request.id} early")
            yield chunk


async def collect(chunks: AsyncIterator[Chunk], request_id: str) -> Completion:
    return completion_of([chunk async for chunk in chunks], request_id)


def completion_of(chunks: Sequence[Chunk], request_id: str) -> Completion:
    """Join the chunks of a whole stream; raise EngineError if they have no finish reason."""
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
    """Join consecutive chunks; the finish reason, counts and times come from the last chunk."""
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
