"""Messages as clients send them: a canonical form for comparison, and a view for people.

A client may send the same conversation in different notations: content as a list of parts, other
white space in arguments, or keys that are null. All notations have the same canonical form, and so
the same digests.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.trajectory import Image, Message
from turnwise.trajectory.images import images_in, replaced

Answer = tuple[str, tuple[tuple[str, str], ...]]
"""An assistant's turn: its text, and the name and canonical arguments of each call."""

_VIEWED = ("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content")
_VIEW_BYTES = 300  # memory of a view's dictionary, in bytes
_Result = TypeVar("_Result")
_LONG = 16_384
"""Characters tokenised within a few milliseconds; longer texts would delay other requests."""


async def in_thread_if_long(messages: Sequence[Message], work: Callable[[], _Result]) -> _Result:
    """Call `work`, in a thread if the messages are long or have images, so as not to delay other
    trajectories."""
    lengths = accumulate(len(str(message)) for message in messages)
    if any(length >= _LONG for length in lengths) or images_in(messages):
        return await run_in_thread(work)
    return work()


@dataclass
class Conversation:
    """The messages and tools of one request, each digested once."""

    messages: Sequence[Message] = ()
    tools: list[JsonObject] | None = None

    @cached_property
    def digests(self) -> list[bytes]:
        """Digests of the messages, one for each."""
        digests = []
        for message in self.messages:  # messages of equal meaning have equal digests
            if message["role"] == "assistant":
                called = [call["function"] for call in message.get("tool_calls") or []]
                calls = [(call["name"], call.get("arguments") or "") for call in called]
                said = answer(_text(message.get("content")), calls)
                digests.append(_digest(("assistant", said)))
            else:
                rest = {
                    key: value
                    for key, value in message.items()
                    if key not in ("role", "content") and value is not None
                }
                text, seen = _text(message.get("content")), map(str, images_in([message]))
                digests.append(_digest((message["role"], text, _canonical_json(rest), *seen)))
        return digests

    @cached_property
    def prefixes(self) -> list[bytes]:
        """Digests of the first 0, 1, 2 ... messages; one more than there are messages."""
        prefixes = [b""]
        for digest in self.digests:
            prefixes.append(_hash(prefixes[-1] + digest))
        return prefixes

    @cached_property
    def bare(self) -> "Conversation":
        """The same conversation with None in place of each image; `self` if it has no images."""
        if not images_in(self.messages):
            return self
        return Conversation(replaced(self.messages, lambda image: None), self.tools)

    @property
    def opening(self) -> bytes:
        """Digest of the first message; empty if there are no messages."""
        return self.prefixes[:2][-1]

    @cached_property
    def tools_digest(self) -> bytes:
        """Digest of the tools; None and an empty list have the same digest."""
        return _digest(self.tools or None)


def extended_by(prefix: bytes, said: Answer) -> bytes:
    """Return the digest of a conversation after an answer; `prefix` is the digest before it."""
    return _hash(prefix + _digest(("assistant", said)))


def plain(message: Message, between: str = "") -> Message:
    """Return a message as templates take it, without keys that are None. Its content is text, or
    parts if the message has images. `between` separates the texts of joined parts."""
    result = {key: value for key, value in message.items() if value is not None}
    if not images_in([message]):
        result["content"] = _text(message.get("content"), between)
    return result


def view_of(message: Message) -> Message:
    """Return a message for people to read: the known keys, with content as text, or as parts if
    it has images."""
    view = {key: message[key] for key in _VIEWED if message.get(key) is not None}
    view["content"] = plain(message)["content"]
    if message["role"] == "assistant" and (calls := message.get("tool_calls")):
        view["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {key: call["function"].get(key) for key in ("name", "arguments")},
            }
            for call in calls
        ]
    return view


def answer_view(said: Answer) -> Message:
    """Return an answer as a message."""
    text, called = said
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in called
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def bytes_of(view: Message) -> int:
    """Estimate a view's memory, in bytes."""
    return _VIEW_BYTES + sum(
        sys.getsizeof(value if isinstance(value, str) else _canonical_json(value))
        for value in view.values()
    )


def answer(text: str | None, calls: Iterable[tuple[str, object]]) -> Answer:
    """Return an answer in its canonical form; `calls` has the name and the arguments of each call,
    as JSON text or as plain values."""
    called = []
    for name, value in calls:
        if isinstance(value, str):
            try:
                value = json.loads(value or "{}")  # clients send "" or "{}" for no arguments
            except ValueError:
                called.append((name, str(value)))
                continue
        called.append((name, _canonical_json(value)))
    return (text or "").strip(), tuple(called)


def said(message: Message) -> str:
    """Return a message's text and its calls, as people and judges read them."""
    content = message.get("content")
    if isinstance(content, list):  # parts of a message
        content = "".join(map(_part_said, content))
    lines = [str(content)] if content else []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        lines.append(f"→ {function.get('name')}({arguments})")
    return "\n".join(lines)


def _part_said(part: JsonObject) -> str:
    if isinstance(image := part.get("image"), Image):
        return f"[image, {image.width} x {image.height}]"
    return str(part.get("text") or f"[{part.get('type')}]")


def _text(content: str | Sequence[str | JsonObject] | None, between: str = "") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    if all(isinstance(part, str) for part in parts):
        return between.join(map(str, parts))
    return _canonical_json(list(content))


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest(value: object) -> bytes:
    return _hash(_canonical_json(value).encode("utf-8", "surrogatepass"))


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
