"""A model's chat template: messages to token ids, and the ids that lead to the next turn.

The tokenizer is any Hugging Face one; its template decides every id. Sampled text is never
tokenised: `next_prompt` keeps the ids of the turns before and appends only what the template
adds for the new messages.
"""

from collections.abc import Sequence
from typing import Any

from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory.trajectory import Message

_ANSWER = "stand-in answer 0f1e2d3c"
_STAND_IN: list[Message] = [
    {"role": "user", "content": "stand-in question"},
    {"role": "assistant", "content": _ANSWER},
]


class ChatTemplate:
    """Renders conversations with one tokenizer's template.

    Args:
        tokenizer: A Hugging Face tokenizer that carries a chat template.
        template_args: Extra variables for the template.

    Raises:
        InputError: when the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, **template_args: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "the model")
            raise InputError(
                f"the tokenizer of {name} has no chat template; save one with it "
                "(tokenizer.chat_template = ...)"
            )
        self.tokenizer = tokenizer
        self._template_args = template_args

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation."""
        return self.encode(self._render_text(messages, tools, add_generation_prompt))

    def next_prompt(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The next turn's prompt: `token_ids` untouched, then what the new messages add.

        What they add is read off a stand-in conversation, so it takes time that grows with the
        new messages and not with the history. A turn end that `token_ids` already holds is not
        repeated; one that a length limit cut off is added.

        Raises:
            TrajectoryError: reason `bridge`, when the template renders a finished assistant
                turn differently once messages follow it.
        """
        _, found, turn_end = self._render_text(_STAND_IN, tools, False).rpartition(_ANSWER)
        conversation = self._render_text([*_STAND_IN, *new_messages], tools, True)
        _, found_again, following = conversation.rpartition(_ANSWER)
        if not (found and found_again and following.startswith(turn_end)):
            raise TrajectoryError(
                "bridge", "the chat template rewrites an assistant turn once messages follow it"
            )
        added = self.encode(following)
        longest = len(self.encode(turn_end))
        overlap = next(
            size
            for size in range(min(longest, len(token_ids)), -1, -1)
            if list(token_ids[len(token_ids) - size :]) == added[:size]
        )
        return [*token_ids, *added[overlap:]]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, markers such as <tool_call> kept, the end token left out."""
        ids = list(token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._template_args,
            )
        )
