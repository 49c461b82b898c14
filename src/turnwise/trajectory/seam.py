"""The seam between an assistant's turn and the messages after it, read off a chat template.

The template renders a placeholder conversation: a question, an assistant's turn that contains a
sentinel, and new messages that contain another. Comparing renderings shows how the template ends
a turn, which token may end it instead, and what comes before the first new message. A seam is valid
for all messages of the same roles and tool names, so `bridge` caches it.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.ids import common_prefix
from turnwise.trajectory.trajectory import Message

_QUESTION = "placeholder question"
_SENTINEL = "sentinel 0f1e2d3c"
"""Content of the placeholder's assistant turn; no real conversation contains it."""
_NEW_MESSAGE = "new message 5b6a7988"
"""Content of the new messages while the template is probed, followed by their index."""

_Content = str | list[dict[str, str]]


class NotShown(Exception):
    """The rendering of a placeholder conversation lacks a part that the seam is read from."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """A `fork_reason` of `Bridge`."""


@dataclass(frozen=True, slots=True)
class Seam:
    """The text between an assistant's turn and new messages of certain roles."""

    placeholder: list[Message]
    """The conversation that ends with the assistant's turn."""
    sentinels: int
    """Number of times that the placeholder's rendering contains the sentinel."""
    joint: str
    """Text from the last sentinel to the first new message's content."""
    call_end: str | None
    """Beginning of the joint that completes a tool call, "" for a turn without calls. None if the
    template does not show where the call ends and the turn's end begins."""
    turn_end: str
    """Text after `call_end` that ends the turn; may be empty."""
    sampled_end: str
    """Beginning of the joint that the model itself may sample. If the completion ends with a
    special token that occurs in it, everything up to that token was sampled."""
    stop_tokens: frozenset[str]
    """Special tokens that may end a turn in place of the template's own."""

    def following(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools | None
    ) -> str | None:
        """Everything that the template writes behind the placeholder's last sentinel."""
        text = template.render_text([*self.placeholder, *messages], tools=tools)
        parts = text.split(_SENTINEL, self.sentinels)
        return parts[self.sentinels] if len(parts) > self.sentinels else None

    def start(
        self, template: ChatTemplate, last: str | None, completion: Sequence[int]
    ) -> int | None:
        """Number of the joint's characters that the completion already holds; None if unknown.

        Args:
            last: The special token that the completion ends with; None if it ends with text.
        """
        if last is not None:
            found = self.sampled_end.find(last)
            if found >= 0 and self._was_sampled(template, found, last, completion):
                return found + len(last)
            if not self.turn_end and self.joint.startswith(self.sampled_end + last):
                return len(self.sampled_end) + len(last)
        if self.call_end is None:
            return None
        token = template.special_token_pattern.search(self.turn_end)
        if last in self.stop_tokens and token is not None:
            return len(self.call_end) + token.end()
        words = self.turn_end[: token.start()] if token else self.turn_end
        return len(self.call_end) + _overlap(template, completion, words)

    def _was_sampled(
        self, template: ChatTemplate, found: int, last: str, completion: Sequence[int]
    ) -> bool:
        """Whether ending with `last` means that the joint up to it was sampled.

        If another end of the turn comes before it, that must have been sampled too.
        """
        before = "" if self.call_end is None else self.sampled_end[len(self.call_end) : found]
        if last in self.stop_tokens or template.special_token_pattern.search(before) is None:
            return True
        sampled = template.decode_all(completion[-len(before) - 1 :])
        return sampled.endswith(before + last)


def find_seam(template: ChatTemplate, messages: Sequence[Message], tools: Tools | None) -> Seam:
    """Probe the template with the first placeholder conversation that it accepts.

    Args:
        messages: The new messages; tool messages have a name and a call id.

    Raises:
        NotShown: when the template hides the assistant's turn or a new message.
        Exception: the template's error for the first placeholder with calls, or for the answer.
    """
    as_parts = has_content_parts(messages)
    new = [
        {**message, "content": _content(f"{_NEW_MESSAGE} {index}.", as_parts)}
        for index, message in enumerate(messages)
    ]
    answer = _conversation(_content(_SENTINEL, as_parts), as_parts)
    rendered = _probe(template, answer, new, tools)
    if messages and messages[0]["role"] == "tool":
        user: list[Message] = [{"role": "user", "content": new[0]["content"]}]
        before_user = _probe(template, answer, user, tools)
        plain = rendered if isinstance(before_user, Exception) else before_user
        refusals: list[Exception] = []
        for placeholder in _calling_placeholders(messages, as_parts):
            calling = _probe(template, placeholder, new, tools)
            if not isinstance(calling, Exception):
                return _seam_after_call(template, placeholder, calling, plain)
            refusals.append(calling)
        if not any(isinstance(refusal, NotShown) for refusal in refusals):
            raise refusals[0]
    if isinstance(rendered, Exception):
        raise rendered
    return _seam_after_answer(template, answer, rendered)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """The parts of a rendered placeholder conversation."""

    header: str
    """Text before the question: the beginning of a conversation and of a user's message."""
    ending: str
    """Text behind the last sentinel if the conversation ends with that turn."""
    joint: str
    """Text from the last sentinel to the first new message's content, or to the end of the
    generation prompt if there is no new message."""
    sentinels: int


def _seam_after_answer(
    template: ChatTemplate, placeholder: list[Message], answer: _Rendering
) -> Seam:
    turn_end = _turn_end(template, answer)
    return Seam(
        placeholder=placeholder,
        sentinels=answer.sentinels,
        joint=answer.joint,
        call_end=None if turn_end is None else "",
        turn_end=turn_end or "",
        sampled_end=turn_end or "",
        stop_tokens=_stop_tokens(template, answer),
    )


def _seam_after_call(
    template: ChatTemplate,
    placeholder: list[Message],
    calling: _Rendering,
    plain: _Rendering | Exception,
) -> Seam:
    """The seam behind a tool call; `plain` shows how a turn without calls ends."""
    turn_end, stop_tokens = None, frozenset[str]()
    if not isinstance(plain, Exception):
        turn_end, stop_tokens = _turn_end(template, plain), _stop_tokens(template, plain)
    call_end = _call_end(calling, turn_end)
    if call_end is None:
        sampled_end = calling.joint[: common_prefix(calling.ending, calling.joint)]
    else:
        sampled_end = call_end + (turn_end or "")
    return Seam(
        placeholder=placeholder,
        sentinels=calling.sentinels,
        joint=calling.joint,
        call_end=call_end,
        turn_end=turn_end or "",
        sampled_end=sampled_end,
        stop_tokens=stop_tokens,
    )


def _probe(
    template: ChatTemplate,
    placeholder: list[Message],
    new: Sequence[Message],
    tools: Tools | None,
) -> _Rendering | Exception:
    """Render a placeholder conversation; a failure is returned, because another may succeed."""
    try:
        alone = template.render_text(placeholder, tools=tools, add_generation_prompt=False)
        continued = template.render_text([*placeholder, *new], tools=tools)
    except Exception as error:  # a template may raise anything
        return error
    sentinels = alone.count(_SENTINEL)
    if not sentinels or continued.count(_SENTINEL) != sentinels:
        return NotShown("unlike_placeholder", "the template leaves out the assistant's answer")
    following = continued.split(_SENTINEL)[sentinels]
    positions = [following.find(f"{_NEW_MESSAGE} {index}.") for index in range(len(new))]
    if -1 in positions or positions != sorted(positions):
        roles = ", ".join(str(message["role"]) for message in new)
        return NotShown(
            "message_dropped", f"the template leaves out, or moves, one of these messages: {roles}"
        )
    return _Rendering(
        header=alone.partition(_QUESTION)[0].rstrip(),
        ending=alone.split(_SENTINEL)[sentinels],
        joint=following.partition(_NEW_MESSAGE)[0],
        sentinels=sentinels,
    )


def _turn_end(template: ChatTemplate, rendering: _Rendering) -> str | None:
    """The text that ends an assistant's turn when other messages follow.

    Usually the same text ends a conversation's last turn. If not (an end-of-conversation token, or
    a token for final turns), the first special token ends the turn if both renderings agree up to
    it.
    """
    if rendering.joint.startswith(rendering.ending):
        return rendering.ending
    last = template.special_token_pattern.search(rendering.ending)
    inner = template.special_token_pattern.search(rendering.joint)
    if last and inner and rendering.ending[: last.start()] == rendering.joint[: inner.start()]:
        return rendering.joint[: inner.end()]
    return None


def _stop_tokens(template: ChatTemplate, rendering: _Rendering) -> frozenset[str]:
    """The special tokens with which the model may end a turn in place of the template's end."""
    turn_end = template.special_token_pattern.search(_turn_end(template, rendering) or "")
    if turn_end is not None and rendering.header.endswith(turn_end.group()):
        return frozenset()  # it is the next message's header, which nothing may replace
    stops = {template.special_tokens.get(index) for index in template.stop_token_ids}
    if token := template.special_token_pattern.search(rendering.ending):
        stops.add(token.group())
    return frozenset(text for text in stops if text is not None)


def _call_end(calling: _Rendering, turn_end: str | None) -> str | None:
    """The rest of the placeholder's call, up to the turn's end."""
    if turn_end is None:
        return None
    if not turn_end:
        return calling.ending if calling.joint.startswith(calling.ending) else None
    found = calling.joint.find(turn_end)
    before = calling.joint[:found]
    return before if found >= 0 and calling.ending.startswith(before) else None


def has_content_parts(messages: Sequence[Message]) -> bool:
    """Whether a content is a list of parts, as templates of vision models ask for."""
    return any(isinstance(message.get("content"), list) for message in messages)


def _content(text: str, as_parts: bool) -> _Content:
    return [{"type": "text", "text": text}] if as_parts else text


def _conversation(content: _Content | None, as_parts: bool, **more: object) -> list[Message]:
    question = {"role": "user", "content": _content(_QUESTION, as_parts)}
    return [question, {"role": "assistant", "content": content, **more}]


def _calling_placeholders(messages: Sequence[Message], as_parts: bool) -> Iterator[list[Message]]:
    """Placeholders with a call for each leading tool message, in all accepted forms."""
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
    for content in (_content("", as_parts), None):
        for arguments in ({"a": _SENTINEL}, json.dumps({"a": _SENTINEL})):
            calls = [
                {
                    "type": "function",
                    "id": result["tool_call_id"],
                    "function": {"name": result["name"], "arguments": arguments},
                }
                for result in results
            ]
            yield _conversation(content, as_parts, tool_calls=calls)


def _overlap(template: ChatTemplate, completion: Sequence[int], words: str) -> int:
    """Number of characters at the beginning of `words` that the completion's text ends with."""
    if not words or not completion:
        return 0
    sampled = template.decode_all(completion[-len(words) :])
    return next(n for n in range(len(words), -1, -1) if sampled.endswith(words[:n]))
