r"""The bridge: the token ids that lead from the end of one turn to the start of the next.

The ids of earlier turns stay as they were sampled; only what follows them is new. An example with
a ChatML template, whose turns end with `<|im_end|>\n`. The model answered `4` to `2 + 2?`, and
the user continues with `3 + 3?`. The next prompt has five parts:

    prompt             "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"    kept
    completion         "4<|im_end|>"                                                    kept
    rest of turn end   "\n"                                                             added
    new message        "<|im_start|>user\n3 + 3?<|im_end|>\n"                           added
    generation prompt  "<|im_start|>assistant\n"                                        added

The two kept parts are the ids of the engine's call, never tokenised again. The bridge adds the
other three. It reads them off a placeholder conversation that ends with the new messages:

    before             "<|im_start|>user\nplaceholder question<|im_end|>\n<|im_start|>assistant\n"
    sentinel           "sentinel 0f1e2d3c"
    turn end           "<|im_end|>\n"
    new message        "<|im_start|>user\n3 + 3?<|im_end|>\n"
    generation prompt  "<|im_start|>assistant\n"

After the sentinel the template writes the same text as after any assistant's turn. The completion
already holds `<|im_end|>`, the beginning of that text, so the bridge adds the rest; behind a
completion that was cut off after `4`, it adds the whole text. The work grows with the new messages
and not with the history, and the method works with any template. If the placeholder does not show
how to continue, the bridge returns a reason, and the caller starts a new branch.

The seam between an assistant's turn and the messages after it is read off such renderings. It says
how the template ends a turn, which token may end the turn instead, and what comes before the first
new message. A seam is valid for all messages of the same roles and tool names, so it is cached.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnwise.errors import TrajectoryError
from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.prompt import Prompt, PromptLike, common_prefix
from turnwise.trajectory.turn import Message

_MAX_SEAMS = 256
"""Maximum number of cached seams; a model can invent tool names, which are part of the keys."""
_QUESTION = "placeholder question"
_SENTINEL = "sentinel 0f1e2d3c"
"""Content of the placeholder's assistant turn; no real conversation contains it."""
THOUGHT_END = "</think>"
_HIDDEN = "the template leaves out the assistant's answer"
_NEW_MESSAGE = "new message 5b6a7988"
"""Content of the new messages while the template is probed; each message's index follows."""

_Content = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Bridge:
    """The next turn's prompt, or the reason why it cannot be built."""

    prompt_token_ids: PromptLike
    completion_token_ids: PromptLike
    added_token_ids: Prompt
    """Ids that follow the completion; none of them was sampled."""
    fork_reason: str | None = None
    """Reason why no prompt continues this turn; None if a prompt does.

    `template_refuses`: the template raised. `message_dropped`: a new message is left out.
    `unlike_placeholder`: the assistant's answer is hidden, or the new messages are rendered
    differently than behind the placeholder conversation.
    `turn_end_unknown`: the completion ends in a way in which the template never ends a turn,
    or was cut off where the template does not show how the turn would end.
    """
    detail: str = ""
    """One sentence about the reason."""

    @property
    def token_ids(self) -> Prompt | None:
        """Prompt, completion and added ids; None if there is a fork reason."""
        if self.fork_reason is not None:
            return None
        return Prompt.joined(self.prompt_token_ids, self.completion_token_ids, self.added_token_ids)


def bridge(
    template: ChatTemplate,
    *,
    prompt_token_ids: PromptLike,
    completion_token_ids: PromptLike,
    new_messages: Sequence[Message],
    tools: Tools | None = None,
) -> Bridge:
    """Build the next turn's prompt, which begins with every id of this turn.

    Args:
        template: The model's chat template.
        prompt_token_ids: The last turn's prompt.
        completion_token_ids: The ids sampled after that prompt, with or without an end-of-turn
            token.
        new_messages: The messages before the next assistant turn: tool results, a user's message.
        tools: The tools of the conversation's first prompt.

    Example:
        >>> following = bridge(
        ...     template,
        ...     prompt_token_ids=template.render([{"role": "user", "content": "2 + 2?"}]),
        ...     completion_token_ids=template.encode("4<|im_end|>"),
        ...     new_messages=[{"role": "user", "content": "3 + 3?"}],
        ... )
        >>> print(template.decode_all(following.added_token_ids))
        <BLANKLINE>
        <|im_start|>user
        3 + 3?<|im_end|>
        <|im_start|>assistant
    """

    before, sampled = prompt_token_ids, completion_token_ids

    def fork(reason: str, detail: str) -> Bridge:
        return Bridge(before, sampled, Prompt(), reason, detail)

    messages: list[Message] = [  # many templates require a tool's name and a call's id
        {"name": "tool", "tool_call_id": f"call{index:05d}", **message}
        if message["role"] == "tool"
        else dict(message)
        for index, message in enumerate(new_messages)
    ]
    roles = tuple((message["role"], message.get("name")) for message in messages)
    key = (roles, bool(tools), _has_content_parts(messages))
    ids: Sequence[int] | npt.NDArray[np.generic]
    ids = sampled.ids if isinstance(sampled, Prompt) else sampled
    last = template.special_tokens.get(int(ids[-1])) if len(ids) else None
    known = template.seams.get(key)
    for cached in (None,) if known is None else (known, None):
        try:
            seam = cached if isinstance(cached, Seam) else find_seam(template, messages, tools)
            following = seam.following(template, messages, tools)
        except TrajectoryError as error:
            return fork(error.reason, str(error))
        except Exception as error:  # a template may raise anything
            if cached is not None:
                continue  # probe again: the template may compare call ids with the placeholder's
            return fork("template_refuses", f"{type(error).__name__}: {error}")
        if len(template.seams) >= _MAX_SEAMS:
            template.seams.clear()
        template.seams[key] = seam
        start = seam.start(template, last, ids)
        if start is None:
            return fork(
                "turn_end_unknown",
                f"the completion ends with {last or 'text'!r}, and the template shows no way to "
                "end that turn before these messages",
            )
        if following is not None and following.startswith(seam.joint[:start]):
            text, anchor = following[start:], last or "x"
            if last is None and template.special_token_pattern.match(text):
                added = template.encode(text)
            else:
                # Some tokenizers treat the beginning of a text specially, so words are encoded
                # behind the special token, or behind ordinary text, and never alone.
                if (head := template.anchors.get(anchor)) is None:
                    head = template.anchors[anchor] = template.encode(anchor)
                whole = template.encode(anchor + text)
                begins = whole[: len(head)] == head
                added = whole[len(head) :] if begins else template.encode(text)
            return Bridge(before, sampled, template.with_images(added, messages))
    return fork(
        "unlike_placeholder",
        "the template renders these messages differently depending on their contents",
    )


@dataclass(frozen=True, slots=True)
class Seam:
    r"""The text between an assistant's turn and new messages of certain roles.

    An answer and then a user's message, in the template at the top of this file:

        joint        "<|im_end|>\n<|im_start|>user\n"
        call_end     ""
        turn_end     "<|im_end|>\n"
        sampled_end  "<|im_end|>\n"
        stop_tokens  <|im_end|>, and the tokens of `ChatTemplate.stop_token_ids`

    A call and then its result, in the template `hermes`, whose calls are JSON and whose results are
    a user's message; the sentinel is the call's argument:

        joint        '"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
        call_end     '"}}\n</tool_call>'
        turn_end     "<|im_end|>\n"
        sampled_end  '"}}\n</tool_call><|im_end|>\n'
        stop_tokens  <|im_end|>, and the tokens of `ChatTemplate.stop_token_ids`
    """

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
    special token that occurs in this text, everything up to that token was sampled."""
    stop_tokens: frozenset[str]
    """Special tokens that may end a turn in place of the template's own token."""

    def following(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools | None
    ) -> str | None:
        """Return everything that the template writes behind the placeholder's last sentinel."""
        text = template.render_text([*self.placeholder, *messages], tools=tools)
        parts = text.split(_SENTINEL, self.sentinels)
        return parts[self.sentinels] if len(parts) > self.sentinels else None

    def header(self, template: ChatTemplate) -> str | None:
        """Return the special token that begins the first new message, if the template does not end
        a turn with a token of its own, so that this token stops the model; else None."""
        if self.turn_end:
            return None
        found = template.special_token_pattern.match(self.joint, len(self.sampled_end))
        return found.group() if found else None

    def start(
        self,
        template: ChatTemplate,
        last: str | None,
        completion: Sequence[int] | npt.NDArray[np.generic],
    ) -> int | None:
        """Return how many of the joint's characters the completion already holds; None if unknown.
        The completion ends with the special token `last`, or with ordinary text if `last` is
        None."""
        pattern = template.special_token_pattern
        if last is not None:
            # `last` is part of the call's or turn's end, as in "4<|im_end|>", so the text before it
            # was sampled.
            found = self.sampled_end.find(last)
            if found >= 0:
                # If the turn's end has a special token before `last`, it must also have been
                # sampled.
                before = (
                    "" if self.call_end is None else self.sampled_end[len(self.call_end) : found]
                )
                if (
                    last in self.stop_tokens
                    or pattern.search(before) is None
                    or template.decode_all(completion[-len(before) - 1 :]).endswith(before + last)
                ):
                    return found + len(last)
            if last == self.header(template):
                return len(self.sampled_end) + len(last)
        # After any other ending, the turn's end must follow, if the template shows where it begins.
        if self.call_end is None:
            return None
        token = pattern.search(self.turn_end)
        # If the turn stopped at another token, such as <|endoftext|>, that token takes the place of
        # the end-of-turn token.
        if last in self.stop_tokens and token is not None:
            return len(self.call_end) + token.end()
        # No special token ended the turn, or its end has no special token: add the whole end.
        words = self.turn_end[: token.start()] if token else self.turn_end
        if not words or not len(completion):
            return len(self.call_end)
        # If the end begins with ordinary text, the completion may hold some of that text already.
        return len(self.call_end) + overlap(template.decode_all(completion[-len(words) :]), words)


def overlap(text: str, following: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `following`."""
    return next(n for n in range(len(following), -1, -1) if text.endswith(following[:n]))


def find_seam(template: ChatTemplate, messages: Sequence[Message], tools: Tools | None) -> Seam:
    """Probe the template with placeholder conversations in front of the new messages, and return
    the seam of the first placeholder that the template accepts. Tool messages must have a name and
    a call id.

    If the template accepts no placeholder, raise its error for the first placeholder with calls, or
    for the placeholder with an answer. Raise TrajectoryError, with a fork reason, when the template
    hides the assistant's turn or a new message.
    """
    as_parts = _has_content_parts(messages)
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
        results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
        for content in (_content("", as_parts), None):  # all forms that templates accept
            for arguments in ({"a": _SENTINEL}, json.dumps({"a": _SENTINEL})):
                calls = [
                    {
                        "type": "function",
                        "id": result["tool_call_id"],
                        "function": {"name": result["name"], "arguments": arguments},
                    }
                    for result in results
                ]
                placeholder = _conversation(content, as_parts, tool_calls=calls)
                calling = _probe(template, placeholder, new, tools)
                if not isinstance(calling, Exception):
                    return _seam(template, placeholder, calling, plain)
                refusals.append(calling)
        if not any(isinstance(refusal, TrajectoryError) for refusal in refusals):
            raise refusals[0]
    if isinstance(rendered, Exception):
        raise rendered
    return _seam(template, answer, rendered, rendered)


def sampled_text(
    template: ChatTemplate, opening: str, ended: str, turn: Message, tools: Tools | None
) -> str | None:
    """Return the text that the model samples after a prompt to produce a turn, up to and including
    the token that ends the turn.

    Args:
        opening: Text of the prompt, which ends with the generation prompt.
        ended: Text of the conversation that ends with the turn, without generation prompt.

    Returns:
        The text; None if the template writes a finished turn in another way than behind its
        generation prompt.
    """
    content = str(turn.get("content") or "")
    if THOUGHT_END in content and (opened := overlap(opening, content)):
        # The generation prompt opens the block of reasoning; the model goes on in it.
        if turn.get("tool_calls"):
            return None
        said = content[opened:] + up_to_end(template, "", tools)
    elif ended.startswith(opening):
        said = up_to_end(template, ended[len(opening) :], tools)
    else:
        return None
    return said + _stopping_header(template, turn, tools)


def _stopping_header(template: ChatTemplate, turn: Message, tools: Tools | None) -> str:
    """Return the header of the next message if sampling stops at this header; else "".

    Some templates do not end a turn with a token of its own, so the next message's header ends it.
    The next message is a tool's result if the turn has calls, else a user's message.
    """
    following: Message = {"role": "user", "content": ""}
    if calls := turn.get("tool_calls"):
        name, call_id = calls[0]["function"]["name"], "call00000"
        following = {"role": "tool", "content": "", "name": name, "tool_call_id": call_id}
    key = ("header", bool(calls), bool(tools))
    if (header := template.seams.get(key)) is None:
        try:
            header = find_seam(template, [following], tools).header(template) or ""
        except Exception:  # a template may raise anything, for instance on results of tools
            header = ""
        template.seams[key] = header
    assert isinstance(header, str)
    stops = {template.special_tokens.get(index) for index in template.stop_token_ids}
    return header if header in stops else ""


def answer_end(template: ChatTemplate, tools: Tools | None) -> str:
    """Return what the template writes behind an answer that ends a conversation."""
    key = ("turn end", bool(tools))
    if (ending := template.seams.get(key)) is None:
        shown = _conversation(_SENTINEL, False)
        rendered = template.render_text(shown, tools=tools, add_generation_prompt=False)
        _, found, ending = rendered.rpartition(_SENTINEL)
        if not found:
            raise TrajectoryError("unlike_placeholder", _HIDDEN)
        template.seams[key] = ending
    assert isinstance(ending, str)
    return ending


def up_to_end(template: ChatTemplate, text: str, tools: Tools | None) -> str:
    """Return a turn's text up to and including the special token that ends the turn, or the whole
    text if no special token does. If `text` is empty, use the text that the template writes behind
    an answer."""
    ending, pattern = answer_end(template, tools), template.special_token_pattern
    text = text or ending
    if text.endswith(ending):  # the model's own words may quote special tokens
        end = pattern.search(text, len(text) - len(ending))
    else:  # a turn with a call may end in another way
        end = next(reversed([*pattern.finditer(text)]), None)
    return text[: end.end()] if end else text


_Rendering = tuple[str, str, str, int]
"""A rendered placeholder conversation: its text before the question; the text behind the last
sentinel if the conversation ends with that turn; the joint, from the last sentinel to the first new
message's content, or to the end of the generation prompt; and the number of sentinels."""


def _seam(
    template: ChatTemplate,
    placeholder: list[Message],
    rendering: _Rendering,
    plain: _Rendering | Exception,
) -> Seam:
    """Return the seam behind a rendered turn; `plain` shows how a turn without calls ends."""
    turn_end, stop_tokens = None, frozenset[str]()
    if not isinstance(plain, Exception):
        header, ending, joint, _ = plain
        pattern = template.special_token_pattern
        last, inner = pattern.search(ending), pattern.search(joint)
        # Usually the same text ends a turn within a conversation and the last turn. If not, but
        # both renderings agree up to their first special token, that token ends the turn.
        if joint.startswith(ending):
            turn_end = ending
        elif last and inner and ending[: last.start()] == joint[: inner.start()]:
            turn_end = joint[: inner.end()]
        token = pattern.search(turn_end or "")
        # If that token is the next message's header, no other token may replace it.
        if token is None or not header.endswith(token.group()):
            stops = {template.special_tokens.get(index) for index in template.stop_token_ids}
            stops.add(last.group() if last else None)
            stop_tokens = frozenset(text for text in stops if text is not None)
    call_end = None
    _, ending, joint, sentinels = rendering
    if turn_end:
        before, found, _ = joint.partition(turn_end)
        call_end = before if found and ending.startswith(before) else None
    elif turn_end is not None and joint.startswith(ending):
        call_end = ending
    if call_end is not None:
        sampled_end = call_end + (turn_end or "")
    elif rendering is plain:
        sampled_end = ""
    else:
        sampled_end = joint[: common_prefix(ending, joint)]
    return Seam(
        placeholder=placeholder,
        sentinels=sentinels,
        joint=joint,
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
    """Render a placeholder conversation; return an error instead of raising it, because another
    placeholder may succeed."""
    try:
        alone = template.render_text(placeholder, tools=tools, add_generation_prompt=False)
        continued = template.render_text([*placeholder, *new], tools=tools)
    except Exception as error:  # a template may raise anything
        return error
    sentinels = alone.count(_SENTINEL)
    if not sentinels or continued.count(_SENTINEL) != sentinels:
        return TrajectoryError("unlike_placeholder", _HIDDEN)
    following = continued.split(_SENTINEL)[sentinels]
    positions = [following.find(f"{_NEW_MESSAGE} {index}.") for index in range(len(new))]
    if -1 in positions or positions != sorted(positions):
        roles = ", ".join(str(message["role"]) for message in new)
        return TrajectoryError(
            "message_dropped", f"the template leaves out, or moves, one of these messages: {roles}"
        )
    header, ending = alone.partition(_QUESTION)[0].rstrip(), alone.split(_SENTINEL)[sentinels]
    return header, ending, following.partition(_NEW_MESSAGE)[0], sentinels


def _has_content_parts(messages: Sequence[Message]) -> bool:
    """Return whether any content is a list of parts, as templates of vision models require."""
    return any(isinstance(message.get("content"), list) for message in messages)


def _content(text: str, as_parts: bool) -> _Content:
    return [{"type": "text", "text": text}] if as_parts else text


def _conversation(content: _Content | None, as_parts: bool, **more: object) -> list[Message]:
    question = {"role": "user", "content": _content(_QUESTION, as_parts)}
    return [question, {"role": "assistant", "content": content, **more}]
