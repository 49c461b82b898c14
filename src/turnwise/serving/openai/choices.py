"""One choice of an answer, read from an engine's chunks: its text, and log-probs with texts."""

import copy
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Alternatives, Chunk
from turnwise.internals import vllm_server as vllm

_FINISH = {str(reason): reason for reason in vllm.FinishReason}
_CONTEXT = 64
"""Last tokens of the prompt that the detokenizer reads: it would decode a whole prompt, at 0.12 µs
for each token, for a text that only the characters at the prompt's end can change."""


class Piece(NamedTuple):
    """The next tokens of a choice."""

    text: str
    """Text that the tokens add; the detokenizer holds back text that may be the beginning of a stop
    string."""
    token_ids: list[int]
    logprobs: list[dict[int, vllm.Logprob]] | None
    """For each token, log-probs with texts; None if the client did not ask for them."""
    finish_reason: str | None
    stop_reason: int | str | None
    cached_tokens: int = 0
    stored_tokens: int = 0
    """This count and `cached_tokens` are as in `Chunk`."""


class ChoiceReader:
    """Reads one choice with vLLM's detokenizer and log-probs processor.

    Args:
        tokenizer: The model's tokenizer.
        request: vLLM's engine request.
    """

    def __init__(self, tokenizer: Foreign, request: vllm.EngineCoreRequest) -> None:
        params, self._id = request.sampling_params, request.request_id
        before = request.prompt_token_ids[-_CONTEXT:]
        # With a prompt that ends within a character, the stream would repeat the prompt's text.
        while before and _is_cut(tokenizer, before[-1]):
            before = before[:-1]
        end = copy.copy(request)
        end.prompt_token_ids = before
        self._detokenizer = vllm.IncrementalDetokenizer.from_new_request(tokenizer, end)
        self._sampled = params.num_logprobs is not None
        self._scored = params.prompt_logprobs is not None
        self._logprobs: vllm.LogprobsProcessor | None = None
        if self._sampled or self._scored:
            self._logprobs = vllm.LogprobsProcessor.from_new_request(tokenizer, request)

    def read(self, chunk: Chunk) -> Piece:
        """Return what the next chunk adds."""
        finish, stop_reason, logprobs = chunk.finish_reason, chunk.stop_reason, None
        token_ids = list(chunk.token_ids)
        if self._logprobs is not None:
            for output in engine_outputs(self._id, chunk, self._sampled, self._scored):
                self._logprobs.update_from_output(output)
            if self._sampled:
                kept = self._logprobs.logprobs or []
                logprobs = list(kept[-len(token_ids) :]) if token_ids else []
        # The detokenizer finds a stop string again, and cuts the text before it.
        by_token = finish == "stop" and not isinstance(stop_reason, str)
        self._detokenizer.update(token_ids, by_token)
        text = self._detokenizer.get_next_output_text(finish is not None, True)
        counts = chunk.cached_tokens, chunk.stored_tokens
        return Piece(text, token_ids, logprobs, finish, stop_reason, *counts)

    @property
    def text(self) -> str:
        """The text so far."""
        return str(self._detokenizer.output_text)

    @property
    def prompt_logprobs(self) -> list[dict[int, vllm.Logprob] | None] | None:
        """Log-probs of the prompt's tokens, if the client asked for them."""
        return None if self._logprobs is None else self._logprobs.prompt_logprobs


@lru_cache(4096)
def _is_cut(tokenizer: Foreign, token: int) -> bool:
    """Return whether a token ends within a character."""
    return str(tokenizer.decode([token])).endswith("\ufffd")


def engine_outputs(
    request_id: str, chunk: Chunk, with_logprobs: bool, scored: bool
) -> list[vllm.EngineCoreOutput]:
    """Return a chunk in vLLM's form, for its detokenizer and log-probs processor."""
    finish = None if chunk.finish_reason is None else _FINISH[chunk.finish_reason]
    # vLLM finds a stop string again, cuts the text before it, and ends the request.
    by_string = isinstance(chunk.stop_reason, str)
    prompt = chunk.prompt_alternatives if scored else []  # they come with the first chunk
    rows: Alternatives = []
    if with_logprobs:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        rows = chunk.alternatives or [[(token, logprob, 1)] for token, logprob in pairs]
    output = vllm.EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(chunk.token_ids),
        new_logprobs=vllm.LogprobsLists(*_columns(rows)) if rows else None,
        new_prompt_logprobs_tensors=(
            vllm.LogprobsTensors(*map(torch.from_numpy, _columns(prompt))) if prompt else None
        ),
        finish_reason=None if by_string else finish,
        stop_reason=None if by_string else chunk.stop_reason,
        prefill_stats=vllm.PrefillStats(
            num_cached_tokens=chunk.cached_tokens,
            num_cache_creation_tokens=chunk.stored_tokens,
        ),
    )
    if not by_string:
        return [output]
    end = vllm.EngineCoreOutput(request_id, [], finish_reason=finish, stop_reason=chunk.stop_reason)
    return [output, end]


def _columns(rows: Alternatives) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and log-probs, both [T, N], and the rank [T] of the first entry of each row."""
    # A row is one entry shorter if the sampled token is among the likeliest; pad with that token.
    widest = max(map(len, rows))
    rows = [[*row, *row[:1] * (widest - len(row))] for row in rows]
    return (
        np.array([[token for token, _, _ in row] for row in rows]),
        np.array([[logprob for _, logprob, _ in row] for row in rows]),
        np.array([row[0][2] for row in rows]),
    )
