"""The server-sent events of a streamed chat, as vLLM's server writes them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from turnwise.core.json_types import JsonObject
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.choices import Piece

DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class StreamedChoice:
    """One choice of a streamed answer, as far as its client has received it."""

    request: vllm.SamplingRequest
    prompt: list[int]
    parser: "vllm.Parser | None"
    """Parser of the choice's reasoning and calls; None if it can have neither of them."""
    content: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and arguments of each call."""
    sampled: list[int] = field(default_factory=list)

    def read(self, piece: Piece) -> vllm.DeltaMessage | None:
        """Return the parser's message to the client for the next tokens. None if the message is
        empty, or if there is no parser, so that the client gets the plain text."""
        self.sampled += piece.token_ids
        if self.parser is None:
            self.content += piece.text
            return None
        delta = self.parser.parse_delta(
            delta_text=piece.text,
            delta_token_ids=piece.token_ids,
            request=self.request,
            prompt_token_ids=self.prompt,
            finished=piece.finish_reason is not None,
        )
        if delta is None:
            return None
        if self.request.parallel_tool_calls is False and delta.tool_calls:
            delta.tool_calls = [part for part in delta.tool_calls if part.index == 0]
        self.content += delta.content or ""
        for part in delta.tool_calls:
            call = self.calls.setdefault(part.index, ["", ""])
            if part.function is not None:
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
        return delta


class EventStream:
    """Writes the events of one answer.

    Args:
        name: The answer's id.
        chat: vLLM's service of chats, which has the system fingerprint, and writes log-probs.
        model: Name of the model or of the adapter that answers.
        request: vLLM's request.
        role: Role of the answer.
        prompt: Ids of the prompt.
        prompt_text: Text of the prompt, if the client wants it.
        echo: Text that comes before the answer's own.
        choices: The choices, in their order.
        reasons: Whether the usage has the number of reasoning tokens.
    """

    def __init__(
        self,
        name: str,
        chat: vllm.OpenAIServingChat,
        model: str,
        request: vllm.ChatCompletionRequest,
        *,
        role: str,
        prompt: list[int],
        prompt_text: str | None,
        echo: str,
        choices: Sequence[StreamedChoice],
        reasons: bool,
    ) -> None:
        self._head = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._begin = f'data: {msgspec.json.encode(self._head).decode()[:-1]},"choices":[{{"index":'
        self._chat, self._request, self._role, self._echo = chat, request, role, echo
        self._prompt, self._prompt_text = prompt, prompt_text
        options, self._reasons = request.stream_options, reasons
        self._usage = bool(options and options.include_usage)
        self._counts = self._usage and bool(getattr(options, "continuous_usage_stats", False))
        self._choices = choices

    def first(self) -> list[str]:
        """Return the events that come before the events of the first tokens."""
        ids = self._prompt if self._request.return_token_ids else None
        more: JsonObject = {"prompt_token_ids": ids, "prompt_text": self._prompt_text}
        delta = _encoded({"role": self._role, "content": ""})
        rest = '"logprobs":null,"finish_reason":null}'
        events = [
            self._event(index, delta, rest, {**more, **self._so_far(0)})
            for index in range(len(self._choices))
        ]
        if self._echo:
            delta = _encoded({"content": self._echo})
            events += [
                self._event(index, delta, rest, self._so_far(0))
                for index in range(len(self._choices))
            ]
        return events

    def following(self, index: int, piece: Piece) -> str:
        """Return the event of a choice's next tokens; "" if these tokens need no event. The last
        event has the finish reason."""
        choice, request, finish = self._choices[index], self._request, piece.finish_reason
        if not (piece.text or piece.token_ids or choice.sampled or finish):
            return ""
        made = choice.read(piece)
        if choice.parser is None:  # most pieces are nothing but text
            delta = f'{{"content":{_encoded(piece.text)}}}'
        else:
            delta = "" if made is None else made.model_dump_json(exclude_unset=True)
        hidden = not request.include_reasoning  # ids and log-probs would reveal the reasoning
        logprobs: object = None
        if piece.logprobs is not None and not hidden:
            found = vllm.chat_logprobs(self._chat, request, piece.token_ids, piece.logprobs)
            logprobs = found.model_dump(exclude_unset=True)
        ids = piece.token_ids if request.return_token_ids and not hidden else None
        if finish is None:
            if logprobs is None and ids is None:
                if not delta:
                    return ""
                rest = '"logprobs":null,"finish_reason":null,"token_ids":null}'
                return self._event(index, delta, rest, self._so_far(index))
            fields = {"logprobs": logprobs, "finish_reason": None, "token_ids": ids}
            rest = _encoded(fields)[1:]
            return self._event(index, delta or "{}", rest, self._so_far(index))
        named = isinstance(request.tool_choice, vllm.ChatCompletionNamedToolChoiceParam)
        called = choice.calls and not named and finish == "stop"
        ended = {
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if called else finish,
            "stop_reason": piece.stop_reason,
            "token_ids": ids,
        }
        more, mark = self._so_far(index), self._chat.system_fingerprint
        if mark is not None and not self._usage:
            more = {**more, "system_fingerprint": mark}
        return self._event(index, delta or "{}", _encoded(ended)[1:], more)

    def last(self) -> str:
        """Return the event with the usage; "" if the client did not ask for it."""
        if not self._usage:
            return ""
        usage = self._numbers(self._choices)
        usage = {name: value for name, value in usage.items() if value is not None}
        tree: JsonObject = {**self._head, "choices": [], "usage": usage}
        if (mark := self._chat.system_fingerprint) is not None:
            tree["system_fingerprint"] = mark
        return f"data: {_encoded(tree)}\n\n"

    def _event(self, index: int, delta: str, rest: str, more: JsonObject) -> str:
        tail = "," + _encoded(more)[1:] if more else "}"
        return f'{self._begin}{index},"delta":{delta},{rest}]{tail}\n\n'

    def _so_far(self, index: int) -> JsonObject:
        """Return the usage of one choice so far, if each event contains the usage; otherwise {}."""
        return {"usage": self._numbers([self._choices[index]])} if self._counts else {}

    def _numbers(self, choices: Sequence[StreamedChoice]) -> JsonObject:
        prompt, sampled = len(self._prompt), sum(len(choice.sampled) for choice in choices)
        details = None
        if self._reasons:
            reasoning = sum(
                choice.parser.count_reasoning_tokens(tuple(choice.sampled))
                for choice in choices
                if choice.parser is not None and choice.sampled
            )
            details = {"reasoning_tokens": reasoning}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "completion_tokens_details": details,
        }


def _encoded(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except ValueError:  # a lone surrogate, which JSON writes as an escape
        return json.dumps(value)
