"""The server-sent events of a streamed chat, as vLLM's application writes them."""

import time
from typing import TYPE_CHECKING

import msgspec

from turnwise.chat.messages import Answer
from turnwise.chat.messages import answer as canonical_answer
from turnwise.core.json_types import JsonObject

if TYPE_CHECKING:
    from turnwise.internals import vllm_server as vllm

DONE = "data: [DONE]\n\n"


class EventStream:
    """Writes the events of one answer.

    Args:
        name: The answer's id.
        chat: vLLM's service of chats, which knows the names of the model and of itself.
        parser: vLLM's parser of its calls; None if it may have none.
        request: vLLM's request, for the parser.
        prompt: Ids of the prompt.
        usage: Whether the client wants an event with the numbers of tokens at the end.
    """

    def __init__(
        self,
        name: str,
        chat: "vllm.OpenAIServingChat",
        parser: "vllm.Parser | None",
        request: "vllm.ChatCompletionRequest",
        prompt: list[int],
        usage: bool,
    ) -> None:
        self._head = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": chat.models.model_name(None),
        }
        begin = msgspec.json.encode(self._head).decode()[:-1]
        self._begin = f'data: {begin},"choices":[{{"index":0,"delta":'
        self._parser, self._request, self._prompt = parser, request, prompt
        self._fingerprint, self._usage = chat.system_fingerprint, usage
        self._content, self._sampled = "", 0
        self._calls: dict[int, list[str]] = {}

    @property
    def answer(self) -> Answer:
        """The answer so far, as the client will send it back: where a call is malformed, that may
        differ from the whole text parsed at once."""
        return canonical_answer(
            self._content, [(name, text) for name, text in self._calls.values()]
        )

    def first(self) -> str:
        """Return the event that comes before the first token's."""
        return (
            f'{self._begin}{{"role":"assistant","content":""}},"logprobs":null,'
            '"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}\n\n'
        )

    def following(
        self, text: str, token_ids: list[int], finish: str | None, stop_reason: int | str | None
    ) -> str:
        """Return the event of the next tokens and their text; "" if they need none. With the last
        comes the reason why there are no more."""
        self._sampled += len(token_ids)
        delta = self._delta(text, token_ids, finish is not None)
        if finish is None:
            rest = '"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            return f"{self._begin}{delta},{rest}" if delta else ""
        reason = "tool_calls" if self._calls and finish == "stop" else finish
        ended = {"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
        tail = msgspec.json.encode({**ended, "token_ids": None}).decode()[1:]
        mark = "" if self._usage or self._fingerprint is None else self._fingerprint
        more = f',"system_fingerprint":{msgspec.json.encode(mark).decode()}' if mark else ""
        return f"{self._begin}{delta or '{}'},{tail}]{more}}}\n\n"

    def last(self) -> str:
        """Return the event with the numbers of tokens; "" if the client did not ask for it."""
        if not self._usage:
            return ""
        prompt, sampled = len(self._prompt), self._sampled
        numbers: JsonObject = {"prompt_tokens": prompt, "total_tokens": prompt + sampled}
        tree: JsonObject = {**self._head, "choices": []}
        tree["usage"] = {**numbers, "completion_tokens": sampled}
        if self._fingerprint is not None:
            tree["system_fingerprint"] = self._fingerprint
        return f"data: {msgspec.json.encode(tree).decode()}\n\n"

    def _delta(self, text: str, token_ids: list[int], finished: bool) -> str:
        if self._parser is None:
            self._content += text
            return f'{{"content":{msgspec.json.encode(text).decode()}}}'
        delta = self._parser.parse_delta(
            delta_text=text,
            delta_token_ids=token_ids,
            request=self._request,
            prompt_token_ids=self._prompt,
            finished=finished,
        )
        if delta is None:
            return ""
        self._content += delta.content or ""
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, ["", ""])
            if piece.function is not None:
                call[0] += piece.function.name or ""
                call[1] += piece.function.arguments or ""
        written: str = delta.model_dump_json(exclude_unset=True)
        return written
