"""The text that a model samples to say a given message, as its chat template would write it."""

from turnwise.errors import TrajectoryError
from turnwise.trajectory.bridge import overlap
from turnwise.trajectory.chat_template import ChatTemplate, Tools
from turnwise.trajectory.trajectory import Message

THOUGHT_END = "</think>"
_SENTINEL = "sentinel 9d8c7b6a"
"""Content of an answer that shows how the template ends a turn."""


def sampled_text(
    template: ChatTemplate, opening: str, ended: str, turn: Message, tools: Tools | None
) -> str | None:
    """Return what the model samples after a prompt to say a turn, the token that ends it included.

    Args:
        opening: Text of the prompt, which ends with the generation prompt.
        ended: Text of the conversation that ends with the turn, without generation prompt.

    Returns:
        The text; None if the template writes a finished turn otherwise than behind its generation
        prompt.
    """
    content = str(turn.get("content") or "")
    if THOUGHT_END in content and (opened := overlap(opening, content)):
        # The generation prompt opens the block of reasoning; the model goes on in it.
        said = content[opened:]
        return None if turn.get("tool_calls") else said + up_to_end(template, "", tools)
    if not ended.startswith(opening):
        return None
    return up_to_end(template, ended[len(opening) :], tools)


def up_to_end(template: ChatTemplate, text: str, tools: Tools | None) -> str:
    """Return a turn's text up to the special token that ends it, if one does; of "", what the
    template writes behind an answer."""
    key = ("turn end", bool(tools))
    if (ending := template.seams.get(key)) is None:
        shown = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": _SENTINEL}]
        rendered = template.render_text(shown, tools=tools, add_generation_prompt=False)
        if _SENTINEL not in rendered:
            hidden = "the template leaves out the assistant's answer"
            raise TrajectoryError("unlike_placeholder", hidden)
        ending = template.seams[key] = rendered.rpartition(_SENTINEL)[2]
    assert isinstance(ending, str)
    text, pattern = text or ending, template.special_token_pattern
    if text.endswith(ending):  # what was said may quote special tokens
        end = pattern.search(text, len(text) - len(ending))
    else:  # a call may end otherwise
        end = next(reversed([*pattern.finditer(text)]), None)
    return text[: end.end()] if end else text
