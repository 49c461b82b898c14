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
already holds `<|im_end|>`, the beginning of that, so the rest is added; a completion that was cut
off after `4` gets all of it. The work grows with the new messages and not with the history, and
this works with any template (see `seam`). If the placeholder does not show how to continue, the
bridge returns a reason, and the caller starts a new branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.seam import NotShown, find_seam, has_content_parts
from turnwise.trajectory.trajectory import Message

_MAX_SEAMS = 256
"""Maximum number of cached seams: their keys contain tool names, which a model can invent."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """The next turn's prompt, or the reason why there is none.

    Example:
        following = bridge(
            template,
            prompt_token_ids=prompt,
            completion_token_ids=completion.token_ids,
            new_messages=[{"role": "user", "content": "And tomorrow?"}],
        )
        if following.token_ids is None:
            print(following.fork_reason, following.detail)
    """

    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    added_token_ids: list[int]
    """Ids that follow the completion; none of them was sampled."""
    fork_reason: str | None = None
    """Reason why no prompt continues this turn; None if there is one.

    `template_refuses`: the template raised. `message_dropped`: it leaves out a new message.
    `unlike_placeholder`: it hides the assistant's answer, or renders the new messages differently
    than behind the placeholder conversation.
    `turn_end_unknown`: the completion ends in a way that the template never ends a turn, or was
    cut off where the template does not show how the turn would end.
    """
    detail: str = ""
    """One sentence about the reason."""

    @property
    def token_ids(self) -> list[int] | None:
        """Prompt, completion and added ids, or None if there is a fork reason.

        Copies the history; only `added_token_ids` is new.
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
    """Build the next turn's prompt, which begins with every id of this turn.

    Args:
        template: The model's chat template.
        prompt_token_ids: The last turn's prompt.
        completion_token_ids: The ids sampled after it, with or without an end-of-turn token.
        new_messages: The messages before the next assistant turn: tool results, a user's message.
        tools: The same as in the conversation's first prompt.

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

    def fork(reason: str, detail: str) -> Bridge:
        return Bridge(prompt_token_ids, completion_token_ids, [], reason, detail)

    messages = _named(new_messages)
    roles = tuple((message["role"], message.get("name")) for message in messages)
    key = (roles, bool(tools), has_content_parts(messages))
    last = template.special_tokens.get(completion_token_ids[-1]) if completion_token_ids else None
    for cached in (template.seams.get(key), None):
        try:
            seam = cached or find_seam(template, messages, tools)
            following = seam.following(template, messages, tools)
        except NotShown as error:
            return fork(error.reason, str(error))
        except Exception as error:  # a template may raise anything
            if cached is not None:
                continue  # it may require the placeholder's calls to have these messages' ids
            return fork("template_refuses", f"{type(error).__name__}: {error}")
        if len(template.seams) >= _MAX_SEAMS:
            template.seams.clear()
        template.seams[key] = seam
        start = seam.start(template, last, completion_token_ids)
        if start is None:
            return fork(
                "turn_end_unknown",
                f"the completion ends with {last or 'text'!r}, and the template shows no way to "
                "end that turn before these messages",
            )
        if following is not None and following.startswith(seam.joint[:start]):
            return Bridge(
                prompt_token_ids,
                completion_token_ids,
                _encode_after(template, last, following[start:]),
            )
    return fork(
        "unlike_placeholder",
        "the template renders these messages differently depending on their contents",
    )


def _named(messages: Sequence[Message]) -> list[Message]:
    """The messages, with a tool name and call id in tool messages: many templates require them."""
    return [
        {"name": "tool", "tool_call_id": f"call{index:05d}", **message}
        if message["role"] == "tool"
        else dict(message)
        for index, message in enumerate(messages)
    ]


def _encode_after(template: ChatTemplate, last: str | None, text: str) -> list[int]:
    """The ids of `text` behind the special token `last`, or behind ordinary text.

    Some tokenizers treat the beginning of a text specially, so words are never encoded alone.
    """
    if last is None and template.special_token_pattern.match(text):
        return template.encode(text)
    anchor = last or "x"
    head, whole = template.encode(anchor), template.encode(anchor + text)
    return whole[len(head) :] if whole[: len(head)] == head else template.encode(text)
