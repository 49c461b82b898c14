"""Parts that a chat template silently leaves out of a prompt: tools, messages, reasoning.

Conversations are rendered with and without a part, or with marks in place of their contents.
"""

from collections.abc import Sequence
from contextlib import suppress

from turnwise.errors import InputError
from turnwise.trajectory.bridge import bridge
from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.turn import Message

TOOLS_LEFT_OUT = (
    "the chat template leaves out the tools, so that the model never sees them: set "
    "model.chat_template to one that shows them, such as hermes, or rollout.tools_in_prompt to "
    "false if the prompt describes them in its own words"
)
_MARK = "content 4d3c2b1a"
"""Content of messages while a template is probed; each message's index follows."""
_USER: Message = {"role": "user", "content": f"{_MARK} 0."}
_RESULT: Message = {"role": "tool", "content": f"{_MARK} 1."}


def check_tools(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> None:
    """Check that a prompt shows its tools, or raise InputError. Only the first prompt of a template
    is rendered for this check."""
    if template.shows_tools is None:
        template.shows_tools = _shows_tools(template, messages, tools)
    if not template.shows_tools:
        raise InputError(TOOLS_LEFT_OUT)


def check_messages(template: ChatTemplate, messages: Sequence[Message]) -> None:
    """Check that a prompt shows each of its messages, or raise InputError."""
    if hidden := _hidden_roles(template, messages):
        raise InputError(
            f"the chat template leaves out messages of the role {hidden[0]}, so that the model "
            "never sees them: set model.chat_template to one that shows them, or move their text "
            "to another message"
        )


def check_results(template: ChatTemplate, tools: Tools | None) -> None:
    """Check that a prompt after a tool call shows the call's result, or raise InputError."""
    if template.missing:
        raise InputError(template.missing)
    if not _shows_results(template, tools):
        raise InputError(
            "the chat template leaves out the results of tools, so that the model never sees them: "
            "set model.chat_template to one that shows them, such as hermes"
        )


def left_out(template: ChatTemplate, tools: Tools) -> list[str]:
    """Return the names of all parts that a template leaves out of ordinary conversations."""
    said: Message = {"role": "assistant", "content": f"<think>\n{_MARK} 1.\n</think>\n\n4"}
    found = []
    if not _shows_tools(template, [_USER], tools):
        found.append("tools")
    if _hidden_roles(template, [{**_USER, "role": "system"}, _USER]):
        found.append("system messages")
    if not _shows_results(template, tools):
        found.append("results of tools")
    with suppress(Exception):  # a template may raise anything; `check_template` reports it
        if f"{_MARK} 1." not in template.render_text([_USER, said, _USER]):
            found.append("earlier reasoning")
    return found


def _shows_tools(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> bool:
    """Return whether tools change a prompt. If the template raises an error, return True, because
    the caller will get the same error when it renders the prompt."""
    try:
        return template.render_text(messages, tools=tools) != template.render_text(messages)
    except Exception:  # a template may raise anything
        return True


def _hidden_roles(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """Return the roles of messages whose content the template leaves out."""
    marked: list[Message] = [dict(message) for message in messages]
    marks: list[tuple[str, str]] = []
    for index, message in enumerate(marked):
        if content := message.get("content"):
            mark = f"{_MARK} {index}."
            part = [{"type": "text", "text": mark}]
            message["content"] = part if isinstance(content, list) else mark
            marks.append((str(message["role"]), mark))
    try:
        text = template.render_text(marked)
    except Exception:  # a template may raise anything, perhaps only because of the marks
        return []
    return [role for role, mark in marks if mark not in text]


def _shows_results(template: ChatTemplate, tools: Tools | None) -> bool:
    after = [_RESULT]
    result = bridge(
        template, prompt_token_ids=[], completion_token_ids=[], new_messages=after, tools=tools
    )
    return result.fork_reason != "message_dropped"
