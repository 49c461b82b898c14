"""Tool calls in an assistant's text, in one form for all spellings of the same call.

A chat template prints parsed calls in its own way, such as `1000.0` for `1e3`. A call is JSON
(after a tag, or with a name and arguments), or parameters between tags; everything else is text.
"""

import json
import re
from contextlib import suppress
from functools import partial

from turnwise.core.optional import Foreign

_BEGINS = re.compile(
    r"""\{\s*["'}]|\[\s*\{|<function=|<(?:\w+:)?(?:invoke|parameter)\b|<arg_key>"""
)
"""Beginnings of what may be a call."""
_MARK = re.compile(
    r"(?:<[^<>]*(?:tool|func|call|action|python)[^<>]*>|\[[A-Z_]*(?:TOOL|CALL|ARGS)[A-Z_]*\])"
    r"\s*[\w.:-]*\s*(?:```(?:json)?\s*)?$",
    re.IGNORECASE,
)
"""End of a text after which a format puts the JSON of its calls: a tag, and maybe a name."""
_MARK_CHARS = 200
_FUNCTION = re.compile(r"""<(?:function=|(?:\w+:)?invoke\s+name=)["']?([^<>"']+)["']?>\s*""")
_PARAMETER = re.compile(
    r"""<(?:\w+:)?parameter(?:=|\s+name=)["']?([^<>"']+)["']?>"""
    r"|<arg_key>([^<>]*)</arg_key>\s*<arg_value>"
)
_PARAMETER_ENDS = re.compile(r"(?:</(?:\w+:)?parameter>|</arg_value>)\s*")
_TOKEN = re.compile(
    r"""\s*+(?:([{}\[\]:,])|("[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+')|([\w.+-]++))""",
    re.DOTALL,
)
"""Part of JSON: punctuation, a string, or another value."""
WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's spelling, and JSON's
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_MAX_DEPTH = 16  # so that text with many brackets costs no more than other text
_Read = tuple[Foreign, int]  # a value, and the position after it


def divide_at_calls(text: str) -> tuple[list[str], list[Foreign]]:
    """Return the texts around the calls of an assistant's text, and the calls.

    Two calls are equal if parsers read the same values from them. There is one more text than
    calls.

    Example:
        >>> divide_at_calls('Adding. <tool_call>{"b": 1e3, "a": 2,}</tool_call>')[0]
        ['Adding. <tool_call>', '</tool_call>']
    """
    texts: list[str] = []
    calls: list[Foreign] = []
    end = 0
    closed = max((found.end() for found in _PARAMETER_ENDS.finditer(text)), default=0)
    for found in _BEGINS.finditer(text):
        start = found.start()
        if start < end:  # inside the call before
            continue
        tagged = found[0][0] == "<"
        read = _tagged_call(text, start, closed) if tagged else _json_call(text, start)
        if read is not None:
            texts.append(text[end:start])
            call, end = read
            calls.append(call)
    return [*texts, text[end:]], calls


def _json_call(text: str, at: int) -> _Read | None:
    if (read := _value(text, at)) is None:
        return None
    calls = read[0] if isinstance(read[0], list) else [read[0]]
    if not all(isinstance(call, dict) for call in calls):
        return None
    named = all("name" in call and call.keys() & {"arguments", "parameters"} for call in calls)
    if not named and not _MARK.search(text, max(0, at - _MARK_CHARS), at):
        return None
    for call in calls:
        for key in ("arguments", "parameters"):  # as a text, in some formats
            if isinstance(given := call.get(key), str):
                call[key] = _whole(given)
    return read


def _tagged_call(text: str, at: int, closed: int) -> _Read | None:
    """Read a function's tag, if there is one, and the parameters after it; the last parameter in
    the whole text ends at `closed`."""
    function = _FUNCTION.match(text, at)
    values: dict[str, Foreign] = {}
    at = at if function is None else function.end()
    while (
        at < closed
        and (opening := _PARAMETER.match(text, at))
        and (closing := _PARAMETER_ENDS.search(text, opening.end()))
    ):
        name = (opening[1] or opening[2]).strip()
        values[name] = _whole(text[opening.end() : closing.start()].strip())
        at = closing.end()
    if function is None and not values:
        return None
    return (function and function[1].strip(), values), at


def _whole(text: str) -> Foreign:
    """Return the value that a whole text spells, or the text itself if it is not a value."""
    read = _value(text, 0)
    return text if read is None or text[read[1] :].strip() else read[0]


def _value(text: str, at: int) -> _Read | None:
    """Read JSON, or Python's spelling of it, maybe with trailing commas; None if `text` has no JSON
    at `at`."""
    parts: list[str] = []
    depth = 0
    while (found := _TOKEN.match(text, at)) is not None and depth <= _MAX_DEPTH:
        (mark, quoted, word), at = found.groups(), found.end()
        if (mark or "{") in "{[" and parts and parts[-1] not in "{[,:":
            return None
        if quoted:
            body = quoted[1:-1]
            if quoted[0] == "'":
                body = body.replace("\\'", "'").replace('"', '\\"')
            with suppress(ValueError):  # an escape that JSON does not know stays as it is
                body = json.loads(f'"{body}"', strict=False)
            mark = json.dumps(body)
        elif word:
            is_number = _NUMBER.fullmatch(word) and not word.lstrip("-").isdecimal()
            mark = repr(float(word)) if is_number else WORDS.get(word, word)
        elif mark in "}]" and parts[-1:] == [","]:
            parts.pop()
        parts.append(mark)
        depth += _DEPTHS.get(mark, 0)
        if depth <= 0:
            break
    else:
        return None
    read = partial(json.loads, parse_int=_number, parse_float=_number, parse_constant=str)
    try:
        return read(" ".join(parts)), at
    except ValueError:
        return None


def _number(word: str) -> tuple[str, float]:
    """Return a number in a form that no text equals; `1e3`, `1000` and `1000.0` are equal."""
    return "number", int(word) if word.lstrip("-").isdecimal() else float(word)
