"""Answers of streamed chats, read from the events that the client gets.

vLLM parses a stream piece by piece. Where a call is malformed, the client can get another answer
than the whole text parsed at once would give; the client sends back what it got.
"""

import json
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.messages import Answer, answer


@dataclass(slots=True)
class _Parts:
    """The pieces of one choice so far."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name, then pieces of the arguments, by the index of the call."""


async def watched(
    events: AsyncGenerator[str, None], answers: dict[int, Answer], objects: bool = False
) -> AsyncGenerator[str, None]:
    """Pass on the events of a streamed chat, and add each finished answer by its choice's index.

    Args:
        events: Server-sent events of a chat completion.
        answers: Gets each answer once its choice is finished.
        objects: Whether the client holds arguments as objects, so that arguments which are not
            JSON are none.

    Example:
        >>> async for event in watched(events, context.answers):
        ...     yield event
    """
    choices: dict[int, _Parts] = defaultdict(_Parts)
    async for event in events:
        if event.startswith("data: {"):
            for choice in json.loads(event[6:]).get("choices") or []:
                parts = choices[choice["index"]]
                _add(parts, choice.get("delta") or {})
                if choice.get("finish_reason"):
                    answers[choice["index"]] = _whole(parts, objects)
        yield event


def _whole(parts: _Parts, objects: bool) -> Answer:
    calls = [(call[0], "".join(call[1:])) for call in parts.calls.values()]
    if objects:
        calls = [(name, said if _is_json(said) else "{}") for name, said in calls]
    return answer("".join(parts.text), calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _add(parts: _Parts, delta: dict[str, Any]) -> None:
    parts.text.append(delta.get("content") or "")
    for piece in delta.get("tool_calls") or []:
        function = piece.get("function") or {}
        call = parts.calls.setdefault(piece["index"], [""])
        call[0] += function.get("name") or ""
        call.append(function.get("arguments") or "")
