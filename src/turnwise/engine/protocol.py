"""What an inference engine is to the rest of turnwise: token ids in, token ids out.

Text, messages and tools do not exist here. Every call has a deadline; a call that misses it
raises `DeadlineError` with the engine's name, and a dead engine raises `EngineError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from turnwise.config import SamplingConfig
from turnwise.errors import EngineError

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `start` to `end` (exclusive) of a completion were sampled by weight `version`."""

    version: int
    start: int
    end: int


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


class Engine(Protocol):
    """One inference engine."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingConfig,
        request_id: str,
        seed: int | None = None,
    ) -> Completion:
        """Sample one completion; `sampling.n` is the caller's business. Cancelling aborts."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled, as `abort`."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing: `abort` and `wait` end the requests in flight, `keep` freezes them."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give memory back until `wake_up`, where the platform can."""
        ...

    async def wake_up(self) -> None: ...

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        """Load the weights that the manifest names; requests in flight go on under them.

        Raises:
            WeightUpdateError: with the old weights in place when the manifest does not fit.
        """
        ...

    async def reset_prefix_cache(self) -> None: ...

    async def check_health(self) -> None:
        """Raises `EngineError` when the engine is dead."""
        ...

    async def load(self) -> int:
        """Requests in flight."""
        ...

    async def shutdown(self) -> None: ...
