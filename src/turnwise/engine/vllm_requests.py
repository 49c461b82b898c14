"""Requests in vLLM's terms: sampling parameters in, chunks out.

Importing this module does not import vLLM, which takes seconds.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from turnwise.config import SamplingConfig
from turnwise.engine.logits_processors import extra_args
from turnwise.engine.protocol import STREAM_INTERVAL, Alternatives, Chunk, FinishReason, Sampling
from turnwise.errors import EngineError

if TYPE_CHECKING:
    from turnwise.internals import vllm


def sampling_params(sampling: Sampling, seed: int | None) -> "vllm.SamplingParams":
    """Return vLLM's parameters of a request that is streamed; vLLM's own are completed in place."""
    from turnwise.internals import vllm  # seconds to import

    if isinstance(sampling, SamplingConfig):
        params = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop=sampling.stop or None,
            stop_token_ids=sampling.stop_token_ids or None,
            ignore_eos=sampling.ignore_eos,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            extra_args=extra_args(sampling) or None,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            skip_clone=True,  # it belongs to this request alone
        )
        params.stream_interval = STREAM_INTERVAL
    else:
        params = sampling
        if not params.logprob_token_ids:  # which bring the sampled token's log-prob along
            params.logprobs = params.logprobs or 0
        params.flat_logprobs = True
        params.detokenize = bool(params.stop)
    params.output_kind = vllm.RequestOutputKind.DELTA
    return params


def make_chunk(
    output: "vllm.RequestOutput",
    labels: Iterable["vllm.WeightVersionSpan"],
    start: int,
    first_token_age: float | None = None,
) -> Chunk:
    """Convert one output of vLLM; EngineError when the request failed, or the output is not
    complete.

    Args:
        labels: Spans of weight versions from the completion's start.
        start: Tokens of the completion before this output.
    """
    piece = output.outputs[0]
    if piece.finish_reason == "error":
        raise EngineError(f"vLLM failed in request {output.request_id}")
    token_ids = list(piece.token_ids)
    flat = piece.logprobs
    logprobs: list[float] = []
    alternatives: Alternatives = []
    if token_ids and flat is not None:
        logprobs = [flat.logprobs[index] for index in flat.start_indices]
        if len(flat.logprobs) > len(logprobs):
            alternatives = _alternatives(flat)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    end = start + len(token_ids)
    versions = [
        version_of(span.version)
        for span in labels
        for _ in range(max(span.start, start), min(span.end, end))
    ]
    if len(versions) != len(token_ids):
        raise EngineError(
            f"vLLM reported the weights of {len(versions)} of {len(token_ids)} tokens"
        )
    experts, rows_NLK = b"", piece.routed_experts  # of a finished request, if vLLM has all of them
    if rows_NLK is not None and len(rows_NLK) == len(output.prompt_token_ids) + end - 1:
        experts = bytes(rows_NLK.tobytes())
    stats = output.metrics
    scored = _alternatives(output.prompt_logprobs) if output.prompt_logprobs else []
    return Chunk(
        token_ids,
        logprobs,
        versions,
        cast(FinishReason | None, piece.finish_reason),
        piece.stop_reason,
        output.num_cached_tokens or 0,
        [ranked[0][1] if ranked else None for ranked in scored] or None,
        alternatives,
        scored[1:],
        first_token_age,
        None if stats is None else max(0.0, stats.scheduled_ts - stats.queued_ts),
        experts=experts,
        stored_tokens=output.num_cache_creation_tokens or 0,
    )


def _alternatives(flat: "vllm.FlatLogprobs") -> Alternatives:
    """Return what vLLM gives for each position; nothing for the first of a prompt."""
    ranked = list(zip(flat.token_ids, flat.logprobs, flat.ranks, strict=True))
    bounds = zip(flat.start_indices, flat.end_indices, strict=True)
    return [ranked[first:last] for first, last in bounds]


def version_of(label: str) -> int:
    """Return a label as a number; "default" is vLLM's label for weights that it loaded itself."""
    return 0 if label == "default" else int(label)
