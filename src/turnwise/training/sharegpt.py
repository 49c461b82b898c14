"""Conversion of ShareGPT's conversations to messages.

Such a row has `conversations`, which is a list of `{"from": "human", "value": "..."}`. It may have
a text `system`, and `tools`, which is a list of functions or the JSON text of such a list. In a
turn whose `from` is `function_call`, the value is the JSON text of an object with `name` and
`arguments`, or of a list of such objects.
"""

import json
from collections.abc import Iterator

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import TrajectoryError
from turnwise.trajectory import Message

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    "system": "system",
}


def with_messages(row: JsonObject) -> JsonObject:
    """Return a row with `messages` in place of `conversations`; return the row itself if it has
    `messages` or does not have a list of conversations.

    Raises:
        TrajectoryError: `malformed`, if a turn has an unknown speaker or an invalid call.
    """
    if "messages" in row or not isinstance(turns := row.get("conversations"), list):
        return row
    rest = {key: value for key, value in row.items() if key not in ("conversations", "system")}
    messages = list(_messages(turns))
    if (system := row.get("system")) and isinstance(system, str):
        messages.insert(0, {"role": "system", "content": system})
    tools = row.get("tools")
    with_text = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
    if isinstance(with_text, list):
        rest["tools"] = [_tool(tool) for tool in with_text]
    return {**rest, "messages": messages}


def _messages(turns: list[Foreign]) -> Iterator[Message]:
    calls: list[JsonObject] = []  # calls without a result so far
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "from" not in turn:
            yield turn  # maybe already a message; the reader checks it
            continue
        speaker, said = turn["from"], turn.get("value")
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            why = f"turn {number} is from {repr(speaker)[:40]}, and none of"
            raise TrajectoryError("malformed", f"conversations: {why} {', '.join(_ROLES)}")
        message: Message = {"role": role, "content": said, **rest}
        if speaker == "function_call":
            calls = _calls(said, number)
            message |= {"content": "", "tool_calls": [*calls]}
        elif role == "tool" and calls:
            call = calls.pop(0)
            message |= {"name": call["function"]["name"], "tool_call_id": call["id"]}
        yield message


def _calls(text: Foreign, turn: int) -> list[JsonObject]:
    try:
        said = json.loads(text) if isinstance(text, str) else text
        functions = [
            {"name": one["name"], "arguments": one.get("arguments", {})}
            for one in (said if isinstance(said, list) else [said])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = "a function_call is the JSON text of an object with name and arguments"
        raise TrajectoryError("malformed", f"conversations, turn {turn}: {what}") from error
    return [
        {"id": f"call{index:05d}", "type": "function", "function": function}
        for index, function in enumerate(functions)
    ]


def _tool(tool: Foreign) -> Foreign:
    bare = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if bare else tool
