"""Beam search: completions that are the likeliest answers to their prompts.

vLLM's own algorithm runs here on top of any `Generator`: each step requests the likeliest next
tokens of every beam. vLLM's asynchronous engine itself does not have a beam search.
"""

import asyncio
import copy
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from turnwise.config import SamplingConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Chunk, FinishReason, Generator, Request, join

if TYPE_CHECKING:
    from turnwise.internals import vllm


class BeamSearch:
    """The beam searches of one group. The group's trajectories share the search of their first
    prompt.

    Args:
        generator: Computes the steps.
        tokenizer: The model's tokenizer; the search ends an answer at the tokenizer's EOS token.
        ends: All tokens that end an answer. An answer is cut after the first of these tokens, or
            after the first string of `sampling.stop`.
        width: Number of beams, and of answers.
    """

    def __init__(
        self, generator: Generator, tokenizer: Foreign, ends: Collection[int], width: int
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._ends = ends
        self._width = width
        self._turns = defaultdict[Hashable, asyncio.Lock](asyncio.Lock)
        self._found: dict[Hashable, list[Chunk]] = {}  # answers by prompt

    def of(self, index: int) -> Generator:
        """Return the generator of trajectory `index`. Its first completion is answer number `index`
        of the search; each later completion is the likeliest answer."""
        ranks = itertools.chain([index], itertools.repeat(0))

        async def stream(request: Request) -> AsyncGenerator[Chunk, None]:
            answers = await self.answers(request)
            yield answers[min(next(ranks), len(answers) - 1)]

        return cast(Generator, SimpleNamespace(stream=stream))

    async def answers(self, request: Request) -> list[Chunk]:
        """Return the answers to a request's prompt as whole completions, with the likeliest
        first."""
        prompt = request.prompt
        async with self._turns[prompt]:
            if prompt not in self._found:
                self._found[prompt] = await self._search(request)
        return self._found[prompt]

    async def _search(self, request: Request) -> list[Chunk]:
        ours: Foreign = await run_in_thread(import_module, "turnwise.internals.vllm")  # seconds
        sampling = cast(SamplingConfig, request.sampling)
        version = -1

        async def generate(
            prompt: Foreign, params: "vllm.SamplingParams", name: str, **_: object
        ) -> AsyncGenerator[SimpleNamespace, None]:
            """Yield the likeliest next tokens of a beam, in the shape of vLLM's `RequestOutput`."""
            nonlocal version
            ids = request.prompt + prompt["prompt_token_ids"][len(request.prompt) :]
            own = {"prompt": ids, "sampling": copy.copy(params), "id": name, "whole": True}
            step = replace(request, **own)
            async with aclosing(self._generator.stream(step)) as stream:
                chunk = join([chunk async for chunk in stream])
            version = max([version, *chunk.weight_versions])
            row = chunk.alternatives[0] if chunk.alternatives else []
            likely = {token: SimpleNamespace(logprob=value) for token, value, _ in row}
            done = SimpleNamespace(finish_reason=chunk.finish_reason, logprobs=[likely])
            yield SimpleNamespace(outputs=[done])

        limits = self._width, sampling.max_tokens, sampling.ignore_eos
        asked = request.prompt.tolist(), request.id
        search = ours.beam_search(generate, self._tokenizer, *asked, *limits)
        (output,) = [output async for output in search]
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)}

        def ended(ids: Sequence[int], count: int) -> bool:
            if not sampling.stop or not ends.isdisjoint(ids[:count]):
                return not ends.isdisjoint(ids[:count])
            text = self._tokenizer.decode(ids[:count], skip_special_tokens=False)
            return any(end in text for end in sampling.stop)

        chunks = []
        for answer in output.outputs:
            ids, reason = list(answer.token_ids), cast(FinishReason, answer.finish_reason)
            count = bisect_left(range(len(ids) + 1), True, key=partial(ended, ids))
            if count <= len(ids):
                ids, reason = ids[:count], "stop"
            rows = zip(ids, answer.logprobs or (), strict=False)
            logprobs = [float(row[token].logprob) for token, row in rows]
            chunks.append(Chunk(ids, logprobs, [version] * len(ids), reason))
        return chunks
