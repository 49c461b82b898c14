"""The section `sampling`, and `eval` with its own sampling section."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from turnwise.config.base import Fraction, NonNegativeInt, PositiveInt, Section, Tree


class ProcessorCall(Section):
    """A logits processor, created for each request by calling `qualname`."""

    qualname: str
    """package.module:name of the class or function that creates it."""
    args: list[object] | None = None
    """Positional arguments of the call; null passes none."""
    kwargs: Tree | None = None
    """Keyword arguments of the call; null passes none."""


class SamplingConfig(Section):
    """Sampling parameters of the engine, and the group size."""

    n: PositiveInt = 8
    """Number of trajectories per problem: the group size."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature, at most 2; 0 is greedy."""
    # Megatron's 0 disables it.
    top_p: Annotated[Fraction, BeforeValidator(lambda p: 1.0 if p == 0 else p)] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability; 1 or 0 means
    all."""
    # -1 means all tokens in older versions of vLLM.
    top_k: Annotated[NonNegativeInt, BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    """Sample from this many most likely tokens; 0 or -1 means all."""
    max_tokens: PositiveInt = 512
    """Largest number of tokens sampled in one turn; the room left in the context limits it too."""
    min_tokens: NonNegativeInt = 0
    """Smallest number of tokens sampled in one turn."""
    stop: list[str] = []
    """Texts that end a turn; they are kept in its tokens."""
    stop_token_ids: list[int] = []
    """Token ids that end a turn, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue sampling after the model's end-of-turn token."""
    # null means no log-probs in vLLM.
    prompt_logprobs: Annotated[bool, BeforeValidator(lambda on: False if on is None else on)] = (
        False
    )
    """Record the log-probs of each turn's prompt too; slower, because it bypasses the prefix
    cache."""
    logits_processor_args: Tree = {}
    """Arguments of engine.logits_processors for each request."""
    logits_processors: list[str | ProcessorCall] = []
    """Logits processors for these requests only, each as package.module:function or as {qualname,
    args, kwargs}; engine.logits_processors_allowed must match their names."""

    def mistakes(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}"

    def within(self, room: int) -> "SamplingConfig":
        """Return the same parameters with at most `room` tokens per turn (at least 1)."""
        if self.max_tokens <= room:
            return self
        limits = {"max_tokens": room, "min_tokens": min(self.min_tokens, room)}
        return self.model_copy(update=limits)


class EvalConfig(Section):
    """Evaluation on held-out rows."""

    every: NonNegativeInt = 10
    """Number of steps between evaluations on data.eval_path, which also run before the first step
    and after the last; 0 never evaluates."""
    target: Fraction | None = None
    """Accuracy on data.eval_path at which the run saves a checkpoint and ends; null trains to
    training.steps."""
    success_reward: float = 1.0
    """Smallest reward at which a trajectory counts as correct in accuracy, pass@k and mean@k."""
    sampling: SamplingConfig = SamplingConfig(n=1, temperature=0.0)
    """Sampling in evaluation; by default one greedy trajectory per row. If any of its keys is set,
    the others have the defaults of `sampling`."""

    def reached(self, accuracy: float | None) -> bool:
        """Return whether an evaluation's accuracy ends the run; None means no evaluation."""
        return self.target is not None and accuracy is not None and accuracy >= self.target
