"""The bridge: token ids that lead from the end of one turn to the start of the next.

The ids of the turns before stay as they were sampled. What follows them is read off a stand-in
conversation: a question, an assistant's turn that holds a mark, and the new messages. What the
template puts behind the mark is what it puts behind any assistant's turn; its first part closes
the turn, and as much of that as was sampled already is left out. So the work grows with the new
messages and not with the history, and any template can be asked. Where the stand-in cannot show
what comes next, the bridge gives a reason, and the caller starts a new branch.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.trajectory import Message

_QUESTION = "stand-in question"
_MARK = "stand-in 0f1e2d3c"
_NEWS = "news 5b6a7988"
_CACHED = 256
"""Kinds of messages to keep seams for; names of tools, which make kinds, can be invented."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The next turn's prompt, or why there is none."""

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    added_token_ids: list[int]
    """What follows the completion; none of it was sampled."""
    fork_reason: str | None = None
    """Why there is no next prompt that continues this turn.

    `template_refuses`: the template raised. `message_dropped`: it leaves out a new message.
    `unlike_stand_in`: it hides what the assistant said, or renders the messages otherwise than
    behind the stand-in.
    `turn_end_unknown`: the completion did not end its turn in a way that the template does, or
    was cut off where the turn's end cannot be told.
    """
    detail: str = ""
    """One sentence about the reason."""

    @property
    def token_ids(self) -> list[int] | None:
        """Prompt, completion and what was added, or None where there is a fork reason.

        Copies the history; `added_token_ids` is all that is new.
        """
        if self.fork_reason is not None:
            return None
        return [*self.prompt_token_ids, *self.completion_token_ids, *self.added_token_ids]


def bridge(
    template: ChatTemplate,
    *,
    prompt_token_ids: Sequence[int],
    completion_token_ids: Sequence[int],
    new_messages: Sequence[Message],
    tools: Tools | None = None,
) -> Bridge:
    """The next turn's prompt, which begins with every id of this turn's.

    Args:
        template: Of the model.
        prompt_token_ids: The last turn's prompt.
        completion_token_ids: What was sampled after it, with or without an end-of-turn token.
        new_messages: What comes before the next assistant turn: tool results, a user's words.
        tools: The same as in the conversation's first prompt.
    """

    def fork(reason: str, detail: str) -> Bridge:
        return Bridge(prompt_token_ids, completion_token_ids, [], reason, detail)

    messages = _with_names(new_messages)
    parts = _has_parts(messages)
    key = (tuple((m["role"], m.get("name")) for m in messages), bool(tools), parts)
    last = template.markers.get(completion_token_ids[-1]) if completion_token_ids else None
    for known in (template.cache.get(key), None):
        try:
            seam = known or _find_seam(template, messages, tools)
            following = seam.following(template, messages, tools)
        except _NotShown as error:
            return fork(error.reason, str(error))
        except Exception as error:  # a template may raise anything
            if known is not None:
                continue  # it may want the stand-in's calls to have these messages' ids
            return fork("template_refuses", f"{type(error).__name__}: {error}")
        if len(template.cache) >= _CACHED:
            template.cache.clear()
        template.cache[key] = seam
        start = seam.start(template, last, completion_token_ids)
        if start is None:
            return fork(
                "turn_end_unknown",
                f"the completion ends with {last or 'text'!r}, and the template shows no way to "
                "end that turn before these messages",
            )
        if following is not None and following.startswith(seam.region[:start]):
            return Bridge(
                prompt_token_ids,
                completion_token_ids,
                _encode_after(template, last, following[start:]),
            )
    return fork(
        "unlike_stand_in", "the template renders these messages otherwise behind other contents"
    )


@dataclass(frozen=True, slots=True)
class _Seam:
    """How the template leads from an assistant's turn to messages of certain roles."""

    stand_in: list[Message]
    marks: int
    """How often the stand-in's rendering holds the mark."""
    region: str
    """From the last mark to the first new message's content."""
    closing: str | None
    """The part of the region that still belongs to what the assistant says: the rest of a tool
    call. None where that cannot be told from the turn's end."""
    turn_end: str
    """What follows `closing` and ends the turn; may be empty."""
    ends: str
    """The part of the region in which a sampled marker means that all before it was said."""
    stops: frozenset[str]
    """Markers that end a turn and may stand in for the template's own."""

    def following(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools | None
    ) -> str | None:
        """All that the template puts behind the stand-in's last mark."""
        text = template.render_text([*self.stand_in, *messages], tools=tools)
        parts = text.split(_MARK, self.marks)
        return parts[self.marks] if len(parts) > self.marks else None

    def start(
        self, template: ChatTemplate, last: str | None, completion: Sequence[int]
    ) -> int | None:
        """How much of the region the completion already holds; None where that is unknown."""
        if last is not None:
            found = self.ends.find(last)
            if found >= 0 and self._was_said(template, found, last, completion):
                return found + len(last)
            if not self.turn_end and self.region.startswith(self.ends + last):
                return len(self.ends) + len(last)
        if self.closing is None:
            return None
        marker = template.marker_pattern.search(self.turn_end)
        if last in self.stops and marker is not None:
            return len(self.closing) + marker.end()
        words = self.turn_end[: marker.start()] if marker else self.turn_end
        return len(self.closing) + _overlap(template, completion, words)

    def _was_said(
        self, template: ChatTemplate, found: int, last: str, completion: Sequence[int]
    ) -> bool:
        """Whether a marker that the completion ends with means that all before it was said.

        Not where an end of the turn stands before it, unless that was sampled too.
        """
        before = "" if self.closing is None else self.ends[len(self.closing) : found]
        if last in self.stops or template.marker_pattern.search(before) is None:
            return True
        said = template.decode_all(completion[-len(before) - 1 :])
        return said.endswith(before + last)


def _find_seam(template: ChatTemplate, messages: Sequence[Message], tools: Tools | None) -> _Seam:
    """Ask the template with the first stand-in that it takes.

    Raises:
        Exception: what the template raised for the last of them.
    """
    parts = _has_parts(messages)
    news = [
        {**message, "content": _said(f"{_NEWS} {index}.", parts)}
        for index, message in enumerate(messages)
    ]
    stand_in = _stand_in(_said(_MARK, parts), parts)
    plain = _ask(template, stand_in, news, tools)
    if messages and messages[0]["role"] == "tool":
        user = _ask(
            template, stand_in, [{"role": "user", "content": _said(f"{_NEWS} 0.", parts)}], tools
        )
        ends = plain if isinstance(user, Exception) else user
        refusals: list[Exception] = []
        for calls in _calling_stand_ins(messages, parts):
            calling = _ask(template, calls, news, tools)
            if not isinstance(calling, Exception):
                return _calling_seam(template, calls, calling, ends)
            refusals.append(calling)
        if not any(isinstance(refusal, _NotShown) for refusal in refusals):
            raise refusals[0]
    if isinstance(plain, Exception):
        raise plain
    turn_end = _turn_end(template, plain)
    return _Seam(
        stand_in=stand_in,
        marks=plain.marks,
        region=plain.region,
        closing=None if turn_end is None else "",
        turn_end=turn_end or "",
        ends=turn_end or "",
        stops=_stops(template, plain),
    )


def _calling_seam(
    template: ChatTemplate,
    stand_in: list[Message],
    calling: "_Answer",
    plain: "_Answer | Exception",
) -> _Seam:
    """The seam behind a tool call; `plain` shows how a turn without one ends."""
    turn_end, stops = None, frozenset[str]()
    if not isinstance(plain, Exception):
        turn_end, stops = _turn_end(template, plain), _stops(template, plain)
    closing = _closing(calling, turn_end)
    return _Seam(
        stand_in=stand_in,
        marks=calling.marks,
        region=calling.region,
        closing=closing,
        turn_end=turn_end or "",
        ends=_shared(calling.ending, calling.region)
        if closing is None
        else closing + (turn_end or ""),
        stops=stops,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a template puts around a stand-in, and above all behind its last mark."""

    header: str
    """What opens a user's message, and the conversation."""
    ending: str
    """At the end of the conversation."""
    region: str
    """Before the first new message's content, or before the next turn if there is none."""
    marks: int


def _ask(
    template: ChatTemplate,
    stand_in: list[Message],
    news: Sequence[Message],
    tools: Tools | None,
) -> _Answer | Exception:
    try:
        alone = template.render_text(stand_in, tools=tools, add_generation_prompt=False)
        before = template.render_text([*stand_in, *news], tools=tools)
    except Exception as error:  # a template may raise anything
        return error
    marks = alone.count(_MARK)
    if not marks or before.count(_MARK) != marks:
        return _NotShown("unlike_stand_in", "the template leaves out what the assistant said")
    following = before.split(_MARK)[marks]
    places = [following.find(f"{_NEWS} {index}.") for index in range(len(news))]
    if -1 in places or places != sorted(places):
        roles = ", ".join(str(message["role"]) for message in news)
        return _NotShown(
            "message_dropped", f"the template leaves out, or moves, one of these messages: {roles}"
        )
    return _Answer(
        header=alone.partition(_QUESTION)[0].rstrip(),
        ending=alone.split(_MARK)[marks],
        region=following.partition(_NEWS)[0],
        marks=marks,
    )


def _turn_end(template: ChatTemplate, answer: _Answer) -> str | None:
    """What ends an assistant's turn that others follow.

    Mostly it is what ends the conversation's last turn. Where it is not (an end-of-conversation
    token, or one for final turns), the first marker of both ends the turn.
    """
    if answer.region.startswith(answer.ending):
        return answer.ending
    last = template.marker_pattern.search(answer.ending)
    inner = template.marker_pattern.search(answer.region)
    if last and inner and answer.ending[: last.start()] == answer.region[: inner.start()]:
        return answer.region[: inner.end()]
    return None


def _stops(template: ChatTemplate, answer: _Answer) -> frozenset[str]:
    """Markers that the model may end a turn with in place of the template's turn end."""
    turn_end = template.marker_pattern.search(_turn_end(template, answer) or "")
    if turn_end is not None and answer.header.endswith(turn_end.group()):
        return frozenset()  # it is the next message's header, which nothing may replace
    stops = {template.markers.get(index) for index in template.stop_token_ids}
    if marker := template.marker_pattern.search(answer.ending):
        stops.add(marker.group())
    return frozenset(text for text in stops if text is not None)


def _closing(calling: _Answer, turn_end: str | None) -> str | None:
    """The rest of the stand-in's call, up to the turn's end."""
    if turn_end is None:
        return None
    if not turn_end:
        return calling.ending if calling.region.startswith(calling.ending) else None
    found = calling.region.find(turn_end)
    before = calling.region[:found]
    return before if found >= 0 and calling.ending.startswith(before) else None


class _NotShown(Exception):
    """A rendering lacks what it was to show."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _has_parts(messages: Sequence[Message]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def _said(text: str, parts: bool) -> str | list[dict[str, str]]:
    """Content as text, or as the list of parts that templates of vision models ask for."""
    return [{"type": "text", "text": text}] if parts else text


def _stand_in(content: Any, parts: bool, **more: Any) -> list[Message]:
    question = {"role": "user", "content": _said(_QUESTION, parts)}
    return [question, {"role": "assistant", "content": content, **more}]


def _calling_stand_ins(messages: Sequence[Message], parts: bool) -> Iterator[list[Message]]:
    """A call for each leading tool message, in the ways in which templates take calls."""
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
    for content in (_said("", parts), None):
        for arguments in ({"a": _MARK}, json.dumps({"a": _MARK})):
            calls = [
                {
                    "type": "function",
                    "id": result["tool_call_id"],
                    "function": {"name": result["name"], "arguments": arguments},
                }
                for result in results
            ]
            yield _stand_in(content, parts, tool_calls=calls)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Tool messages say which call they answer, because many templates ask for it."""
    return [
        {"name": "tool", "tool_call_id": f"call{index:05d}", **message}
        if message["role"] == "tool"
        else dict(message)
        for index, message in enumerate(messages)
    ]


def _shared(a: str, b: str) -> str:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]


def _overlap(template: ChatTemplate, completion: Sequence[int], words: str) -> int:
    """How many characters of `words` the completion's text ends with."""
    if not words or not completion:
        return 0
    said = template.decode_all(completion[-len(words) :])
    return next(n for n in range(len(words), -1, -1) if said.endswith(words[:n]))


def _encode_after(template: ChatTemplate, last: str | None, text: str) -> list[int]:
    """The ids of `text` as they are behind a marker, or behind ordinary text.

    Some tokenizers treat the beginning of a text specially, so words are never encoded alone.
    """
    if last is None and template.marker_pattern.match(text):
        return template.encode(text)
    anchor = last or "x"
    head, whole = template.encode(anchor), template.encode(anchor + text)
    return whole[len(head) :] if whole[: len(head)] == head else template.encode(text)
