"""Sampling the choices of chats: the engine's parameters, and each choice's pieces."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from turnwise.config import SamplingConfig
from turnwise.core.aio import together
from turnwise.core.optional import Foreign
from turnwise.engine.logits_processors import EXTRA_ARG
from turnwise.engine.protocol import STREAM_INTERVAL, Chunk, Request, Route
from turnwise.errors import EngineError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.chat_request import ParsedRequest, PlainRequest
from turnwise.serving.openai.choices import ChoiceReader, Piece
from turnwise.serving.openai.request_context import ChoiceKey, RequestContext
from turnwise.serving.openai.request_sampling import CONFIGURED, LIMITS
from turnwise.trajectory import Prompt

Sample = Callable[[RequestContext, ChoiceKey, Request], AsyncGenerator[Chunk, None]]
"""Samples a request's tokens for its session."""
_TASKS = ("generate",)
_OWN = {"seed", "min_tokens", "vllm_xargs"}
"""Keys of a plain request whose values are rarely equal, or change after it is read."""
_WITHOUT_EFFECT = {
    *("messages", "tools", "tool_choice", "model", "user", "stream_options"),
    *("max_tokens", "max_completion_tokens"),  # set for each request
}
"""Keys of a plain request on which its sampling parameters do not depend; requests with other
tools, which change how an answer is read, share none."""
_SHARED = sorted({*PlainRequest.__struct_fields__, *CONFIGURED} - _OWN - _WITHOUT_EFFECT)
_KEPT = 64  # maximum number of sampling parameters that are kept for one set of tools


class Chat(NamedTuple):
    """A chat whose prompt is known."""

    name: str
    context: RequestContext
    parsed: ParsedRequest
    prompt: Prompt
    adapter: vllm.LoRARequest | None
    core: vllm.EngineCoreRequest | None = None
    """vLLM's engine request, for all choices; None for a beam search."""

    @property
    def request(self) -> vllm.SamplingRequest:
        return self.parsed.request

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt: the list in the engine's request, if there is one."""
        return self.prompt.tolist() if self.core is None else self.core.prompt_token_ids

    @property
    def choices(self) -> int:
        return getattr(self.parsed.request, "n", None) or 1


class SampledChoice(NamedTuple):
    """A whole choice."""

    piece: Piece
    prompt_logprobs: "list[dict[int, Foreign] | None] | None" = None


class ChatSampler:
    """Samples chats with the function `sample`; `chat` is vLLM's service of chats."""

    def __init__(self, sampling: SamplingConfig, chat: vllm.OpenAIServingChat, sample: Sample):
        self._sampling, self._chat, self._sample = sampling, chat, sample
        self._tokenizer = chat.renderer.tokenizer

    def ready(self, chat: Chat) -> Chat:
        """Check a chat's sampling parameters, and return the chat with its engine request. A beam
        search is returned unchanged: vLLM checks it itself, because its answers are not turns.

        Raises:
            VLLMValidationError: when sampling is impossible with a parameter, or when the prompt
                fills the context; in the latter case, the session is marked as full
                (`context_full`).
            InputError: as in `RequestContext.max_tokens_for`.
        """
        request, session, limit = chat.request, chat.context.session, self._max_tokens(chat)
        if _by_beams(request):
            return chat
        written, own = request.model_fields_set, session.sampling or self._sampling
        params, ids = self._params(chat, limit), chat.prompt.tolist()
        if "min_tokens" not in written:
            params.min_tokens = own.min_tokens
        if "ignore_eos" not in written:
            params.ignore_eos = own.ignore_eos
        params.max_tokens = chat.context.max_tokens_for(chat.prompt, limit)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        if (
            chat.parsed.shared is not None
            and not params.stop
            and EXTRA_ARG not in (params.extra_args or ())
        ):
            core = vllm.EngineCoreRequest(
                request_id=chat.name,
                prompt_token_ids=ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=chat.adapter,
                cache_salt=None,
                data_parallel_rank=None,
            )
        else:
            core = self._chat.input_processor.process_inputs(
                chat.name,
                vllm.tokens_input(ids),
                params,
                supported_tasks=_TASKS,
                lora_request=chat.adapter,
            )
        return chat._replace(core=core)

    def _params(self, chat: Chat, limit: int) -> vllm.SamplingParams:
        """Return the sampling parameters of a request; equal plain requests share their making."""
        request, values = chat.request, chat.request.__dict__
        own = _OWN & request.model_fields_set
        shared = chat.parsed.shared
        if shared is None or own or values["vllm_xargs"]:
            return request.to_sampling_params(limit, {})
        key = tuple(
            tuple(value) if isinstance(value, list) else value for value in map(values.get, _SHARED)
        )
        made = shared.get(key)
        if made is None:
            if len(shared) >= _KEPT:
                shared.clear()
            made = shared[key] = request.to_sampling_params(limit, {})
        return copy.copy(made)

    def _max_tokens(self, chat: Chat) -> int:
        """Return how many tokens may be sampled; refuse a prompt that fills the context."""
        length: int = self._chat.model_config.max_model_len
        if len(chat.prompt) >= length:
            chat.context.session.context_full = True
            raise vllm.VLLMValidationError(
                f"This model's maximum context length is {length} tokens, and the prompt has "
                f"{len(chat.prompt)}: shorten the messages",
                parameter="input_tokens",
                value=len(chat.prompt),
            )
        given = chat.request.__dict__
        limit: int = next(each for each in map(given.get, LIMITS) if each is not None)
        return min(length - len(chat.prompt), limit)

    async def whole(self, chat: Chat) -> list[SampledChoice]:
        """Sample all choices to their ends."""
        if _by_beams(chat.request):
            return [SampledChoice(piece) for piece in await self._beams(chat)]
        if chat.choices == 1:
            return [await self._whole(chat, 0)]
        return await together(self._whole(chat, index) for index in range(chat.choices))

    async def pieces(self, chat: Chat) -> AsyncGenerator[tuple[int, Piece], None]:
        """Sample all choices, and yield each piece with the index of its choice as it arrives."""
        if _by_beams(chat.request):
            for index, piece in enumerate(await self._beams(chat)):
                yield index, piece
            return
        if chat.choices == 1:
            async with aclosing(self._pieces(chat, 0, self._reader_of(chat))) as pieces:
                async for piece in pieces:
                    yield 0, piece
            return
        waiting = asyncio.Queue[tuple[int, Piece] | None]()

        async def run(index: int) -> None:
            async with aclosing(self._pieces(chat, index, self._reader_of(chat))) as pieces:
                async for piece in pieces:
                    waiting.put_nowait((index, piece))

        async def run_all() -> None:
            try:
                await together(run(index) for index in range(chat.choices))
            finally:
                waiting.put_nowait(None)

        running = asyncio.create_task(run_all())
        try:
            while (found := await waiting.get()) is not None:
                yield found
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    async def _whole(self, chat: Chat, index: int) -> SampledChoice:
        reader, token_ids, logprobs = self._reader_of(chat), list[int](), list[Foreign]()
        last = Piece("", [], None, None, None)
        async with aclosing(self._chunks(chat, index)) as chunks:
            async for chunk in chunks:
                last = reader.read(chunk)
                token_ids += last.token_ids
                logprobs += last.logprobs or ()
        chat.context.texts[chat.name, index] = reader.text
        shown = None if last.logprobs is None else logprobs
        piece = last._replace(text=reader.text, token_ids=token_ids, logprobs=shown)
        return SampledChoice(piece, reader.prompt_logprobs)

    def _reader_of(self, chat: Chat) -> ChoiceReader:
        assert chat.core is not None
        return ChoiceReader(self._tokenizer, chat.core)

    async def _pieces(
        self, chat: Chat, index: int, reader: ChoiceReader
    ) -> AsyncGenerator[Piece, None]:
        """Sample one choice, and yield what each chunk adds."""
        async with aclosing(self._chunks(chat, index)) as chunks:
            async for chunk in chunks:
                piece = reader.read(chunk)
                if piece.finish_reason is not None:
                    chat.context.texts[chat.name, index] = reader.text
                yield piece

    def _chunks(self, chat: Chat, index: int) -> AsyncGenerator[Chunk, None]:
        """Sample one choice for its session."""
        context = chat.context
        assert chat.core is not None
        sampling = copy.copy(chat.core.sampling_params)
        sampling.n = 1
        sampling.stream_interval = 1 if chat.request.stream else STREAM_INTERVAL
        if sampling.seed is not None:
            sampling.seed += index
        context.score_prompt(sampling)
        asked = Request(
            chat.prompt,
            sampling,
            f"{index}_{chat.name}" if chat.choices > 1 else chat.name,
            sampling.seed,
            Route(adapter=context.adapter),
            whole=not chat.request.stream,
            record_allowed=context.trained,
        )
        return self._sample(context, (chat.name, index), asked)

    async def _beams(self, chat: Chat) -> list[Piece]:
        """Return the answers that a beam search finds; these answers belong to no session."""
        request, result = chat.request, None
        search = self._chat.beam_search(
            prompt=vllm.tokens_input(chat.prompt.tolist()),
            request_id=chat.name,
            params=request.to_beam_search_params(self._max_tokens(chat), {}),
            lora_request=chat.adapter,
        )
        async with aclosing(search) as results:
            async for found in results:
                result = found
        if result is None or any(each.finish_reason == "error" for each in result.outputs):
            raise EngineError(f"{chat.name} ended without an answer")
        return [
            Piece(
                each.text,
                list(each.token_ids),
                list(each.logprobs) if request.logprobs else None,
                each.finish_reason or "stop",
                each.stop_reason,
            )
            for each in result.outputs
        ]


def _by_beams(request: vllm.SamplingRequest) -> bool:
    return bool(getattr(request, "use_beam_search", False))
