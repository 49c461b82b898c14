"""The rest of an interrupted turn, for another worker to sample."""

import copy
from dataclasses import replace

from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Chunk, Request, Sampling

_PER_REQUEST = (
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "bad_words",
    "logits_processors",
    "logits_processor_args",
    "extra_args",
)
"""Sampling parameters that make a token depend on the request's earlier tokens."""


def remaining(request: Request, sampled: int) -> "Sampling | None":
    """Return the sampling parameters for the rest of a request, after `sampled` of its tokens.

    None if the remaining tokens depend on the earlier ones in a way that a new request cannot
    reproduce (seed, stop strings, penalties, grammar): the turn has to restart.

    Example:
        remaining(Request([5, 6], SamplingConfig(max_tokens=20), "r1"), 16)  # max_tokens=4
    """
    sampling = request.sampling
    if sampled == 0:
        return sampling
    if request.seed is not None or any(getattr(sampling, name, None) for name in _PER_REQUEST):
        return None
    changes: dict[str, object] = {
        "max_tokens": sampling.max_tokens - sampled,
        "min_tokens": max(0, sampling.min_tokens - sampled),
    }
    if isinstance(sampling, SamplingConfig):
        return sampling.model_copy(update={**changes, "prompt_logprobs": False})
    changes["prompt_logprobs"] = None  # they came with the first tokens
    rest = copy.copy(sampling)
    for name, value in changes.items():
        setattr(rest, name, value)
    return rest


def unfinished(chunk: Chunk) -> Chunk:
    """Return the chunk without its finish reason: the turn continues elsewhere."""
    return replace(chunk, finish_reason=None, stop_reason=None, experts=b"")
