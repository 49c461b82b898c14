"""The canary: after each update the engine must score a fixed prompt as the trainer does.

It finds errors that checksums cannot: tensors that arrived intact but were packed, tied or cached
wrongly inside the engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Engine, Request, generate
from turnwise.errors import WeightUpdateError

_LENGTH = 32
_SAMPLING = SamplingConfig(n=1, max_tokens=1, prompt_logprobs=True)


@dataclass(frozen=True, slots=True)
class Canary:
    """The log-probs that a version of the weights gives to a fixed prompt.

    Example:
        Canary(canary_prompt(vocab_size), logprobs)
    """

    prompt_token_ids: list[int]
    """T token ids."""
    logprobs: list[float]
    """The trainer's log-probs of tokens 1..T-1, in nats."""


def canary_prompt(vocab_size: int) -> list[int]:
    """Return 32 token ids, the same in every run with this size of vocabulary."""
    generator = random.Random(vocab_size)
    return [generator.randrange(vocab_size) for _ in range(_LENGTH)]


async def check_canary(
    engine: Engine,
    prompt_token_ids: Sequence[int],
    expected_logprobs: Sequence[float],
    tolerance: float,
    version: int,
) -> tuple[float, float]:
    """Compare the engine's log-probs of the prompt's tokens 1..T-1 with the trainer's.

    Returns:
        The mean and the largest absolute difference, in nats.

    Raises:
        WeightUpdateError: when the largest exceeds the tolerance, which the message names, or the
            engine samples from another version.

    Example:
        mean, largest = await check_canary(engine, prompt, logprobs, 1e-3, version=4)
    """
    completion = await generate(engine, Request(prompt_token_ids, _SAMPLING, f"canary-{version}"))
    if others := set(completion.weight_versions) - {version}:
        raise WeightUpdateError(
            f"after the update to version {version} the engine samples from version {others.pop()}"
        )
    scored = (completion.prompt_logprobs or [])[1:]
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
            f"trainer's by up to {largest:.3g} (allowed: {tolerance:g}); its weights are not the "
            "trainer's"
        )
    return sum(differences) / len(differences), largest
