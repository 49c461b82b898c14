"""The answers to chats, whole or as events, as vLLM's server writes them."""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from turnwise.chat.messages import plain
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Completion
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.bounded_parser import BoundedParsing
from turnwise.serving.openai.chat_prompts import ECHO, ChatPrompts
from turnwise.serving.openai.chat_sampler import Chat, ChatSampler
from turnwise.serving.openai.choices import Piece
from turnwise.serving.openai.event_stream import DONE, EventStream, StreamedChoice
from turnwise.serving.openai.vllm_errors import client_error

Events = AsyncGenerator[str, None]
"""Server-sent events of a request that is streamed."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which JSON can only write as an escape; a model may write one in a call."""


class ChatWriter:
    """Writes answers.

    Args:
        chat: vLLM's service of chats.
        reasons: Whether a parser separates reasoning from the answers.
    """

    def __init__(
        self,
        chat: vllm.OpenAIServingChat,
        sampler: ChatSampler,
        prompts: ChatPrompts,
        parsing: BoundedParsing,
        *,
        reasons: bool,
    ) -> None:
        self._chat, self._sampler, self._prompts = chat, sampler, prompts
        self._parsing, self._reasons = parsing, reasons
        choice = vllm.ChatCompletionResponseChoice(
            index=0, message=vllm.ChatMessage(role="assistant", content="")
        )
        empty = vllm.ChatCompletionResponse(
            model=chat.models.model_name(None),
            choices=[choice],
            usage=vllm.UsageInfo(),
            system_fingerprint=chat.system_fingerprint,
        )
        self._empty: JsonObject = empty.model_dump()  # an answer with all of vLLM's keys

    async def whole(self, chat: Chat) -> JsonObject:
        """Sample a chat, and return its answer."""
        request, prompt = chat.request, chat.prompt_ids
        sampled = await self._sampler.whole(chat)
        choices, count, reasoning = list[JsonObject](), 0, 0
        for index, (piece, _) in enumerate(sampled):
            await self._parsing.prepare(piece.text, chat.context.conversation.tools)
            choice, thought = self._choice(chat, index, piece, prompt)
            choices.append(choice)
            count, reasoning = count + len(piece.token_ids), reasoning + thought
        usage = {
            **self._empty["usage"],
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
        }
        if self._reasons:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        tree = {**self._empty, "id": chat.name, "created": int(time.time())}
        tree |= {"choices": choices, "usage": usage}
        if chat.adapter is not None:
            tree["model"] = self._chat.models.model_name(chat.adapter)
        if request.return_token_ids:
            tree["prompt_token_ids"] = prompt
        if request.return_prompt_text:
            tree["prompt_text"] = self._prompts.template_of(request).decode_all(prompt)
        if (scored := vllm.clamp_prompt_logprobs(sampled[-1].prompt_logprobs)) is not None:
            tree["prompt_logprobs"] = [
                None if row is None else {token: asdict(each) for token, each in row.items()}
                for row in scored
            ]
        return tree

    def _choice(
        self, chat: Chat, index: int, piece: Piece, prompt: list[int]
    ) -> tuple[JsonObject, int]:
        """Return one choice of an answer, and the number of its reasoning tokens."""
        context, request, wanted = chat.context, chat.request, chat.request.tool_choice
        parser, reasoning, content, found = self.parsed(chat, piece)
        named = isinstance(wanted, vllm.ChatCompletionNamedToolChoiceParam)
        if named or wanted == "required":
            content = content or ""
        elif wanted == "none" or not request.tools:
            found = []
        context.note(index, content, [(call.name, call.arguments) for call in found])
        # As in OpenAI's API, calls end with `tool_calls`, except that a call that `tool_choice`
        # names ends with `stop`, like text.
        called = piece.finish_reason == "stop" if wanted == "required" else found and not named
        message = vllm.ChatMessage(
            role=_role(chat),
            reasoning=reasoning if request.include_reasoning else None,
            content=_echo(chat) + (content or "") if request.echo else content,
            tool_calls=[
                vllm.ToolCall(id=call.id or vllm.make_tool_call_id(), function=call)
                for call in found
            ],
        ).model_dump()
        choice = {
            **self._empty["choices"][0],
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if called else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if request.include_reasoning:  # otherwise ids and log-probs would reveal the reasoning
            if piece.logprobs is not None:
                logprobs = vllm.chat_logprobs(self._chat, request, piece.token_ids, piece.logprobs)
                choice["logprobs"] = logprobs.model_dump()
            if request.return_token_ids:
                choice["token_ids"] = piece.token_ids
        completion = context.finished.get((chat.name, index))
        if request.return_token_ids and completion is not None:
            message |= _echo_of(prompt, completion)
        return choice, parser.count_reasoning_tokens(piece.token_ids) if self._reasons else 0

    async def events(self, chat: Chat) -> Events:
        """Sample a chat, and yield the events of its answer."""
        context, request = chat.context, chat.request
        parses = bool(request.tools) or self._reasons or not request.include_reasoning
        try:
            text = None
            if request.return_prompt_text:
                text = self._prompts.template_of(request).decode_all(chat.prompt)
            prompt = chat.prompt_ids
            choices = [
                StreamedChoice(request, prompt, self.parser(chat) if parses else None)
                for _ in range(chat.choices)
            ]
            events = EventStream(
                chat.name,
                self._chat,
                self._chat.models.model_name(chat.adapter),
                request,
                role=_role(chat),
                prompt=prompt,
                prompt_text=text,
                echo=_echo(chat) if request.echo else "",
                choices=choices,
                reasons=self._reasons,
            )
            begun = False
            async with aclosing(self._sampler.pieces(chat)) as pieces:
                async for index, piece in pieces:
                    for event in () if begun else events.first():
                        yield event
                    begun = True
                    event = events.following(index, piece)
                    if piece.finish_reason is not None:
                        whole = choices[index]
                        context.note(index, whole.content, whole.calls.values())
                    if event:
                        yield event
            if usage := events.last():
                yield usage
            yield DONE
        except Exception as error:  # raised to this request's client; other requests continue
            why = self._chat.create_streaming_error_response(client_error(error))
            yield f"data: {why}\n\n"
            yield DONE

    def parser(self, chat: Chat) -> vllm.Parser:
        """Return a new parser of a chat's answers."""
        tokenizer = self._chat.renderer.tokenizer
        return vllm.make_parser(self._chat, chat.request, tokenizer, chat.parsed.variables)

    def parsed(
        self, chat: Chat, piece: Piece
    ) -> tuple[vllm.Parser, str | None, str | None, list[vllm.FunctionCall]]:
        """Return a parser, and what it finds in a whole choice: the reasoning, the content and the
        calls that the client gets."""
        request, parser = chat.request, self.parser(chat)
        parser.set_prompt_token_ids(chat.prompt_ids)
        reasoning, content, calls = parser.parse(
            piece.text, request, enable_auto_tools=True, model_output_token_ids=piece.token_ids
        )
        found = list(calls or ())[: 1 if request.parallel_tool_calls is False else None]
        for call in found:  # an object cannot hold a lone surrogate, but its JSON can
            whole = "\ufffd" if chat.context.object_arguments else _escaped
            call.arguments = _SURROGATE.sub(whole, call.arguments)
        return parser, reasoning, content, found


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _role(chat: Chat) -> str:
    generated = chat.request.add_generation_prompt
    return "assistant" if generated else str(chat.context.conversation.messages[-1]["role"])


def _echo(chat: Chat) -> str:
    """Return the text of the last message if the answer continues it, otherwise ""."""
    last = chat.context.conversation.messages[-1]
    return str(plain(last)["content"]) if last["role"] == _role(chat) else ""


def _echo_of(prompt: list[int], completion: Completion) -> JsonObject:
    """Return the keys of `ECHO` with their values for a completion."""
    values = prompt, completion.token_ids, completion.logprobs, completion.weight_versions
    return dict(zip(ECHO, values, strict=True))
