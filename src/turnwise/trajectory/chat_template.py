"""A model's chat template: messages to text and token ids, and sampled ids to text.

The tokenizer is any Hugging Face one; its template decides every id of a prompt. What leads from
one turn to the next is in `bridge`.
"""

import copy
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from turnwise.errors import InputError
from turnwise.trajectory.trajectory import Message

Tools = Sequence[dict[str, Any]]


class ChatTemplate:
    """Renders conversations with one tokenizer and one Jinja template.

    Safe to use from several threads at once.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Jinja text that takes the place of the tokenizer's own template.
        **template_kwargs: Extra variables for the template.

    Raises:
        InputError: when there is no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, **template_kwargs: Any
    ) -> None:
        if not (chat_template or getattr(tokenizer, "chat_template", None)):
            name = getattr(tokenizer, "name_or_path", "the model")
            raise InputError(
                f"the tokenizer of {name} has no chat template; save one with it "
                "(tokenizer.chat_template = ...)"
            )
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs | ({"chat_template": chat_template} if chat_template else {})
        self._encode = _encoder(tokenizer)
        self.stop_token_ids: set[int] = {tokenizer.eos_token_id} - {None}
        """The ids at which generation stops; add to them what the model's own settings name."""
        self.cache: dict[Any, Any] = {}
        """For `bridge`: what it has found out about the template."""

    def with_variables(self, **template_kwargs: Any) -> "ChatTemplate":
        """The same template with more variables; making it costs next to nothing."""
        other = copy.copy(self)
        other._kwargs = {**self._kwargs, **template_kwargs}
        other.cache = {}
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a whole conversation."""
        return self.encode(
            self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    def render_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a whole conversation.

        Raises:
            Exception: what the template raises, such as jinja2's TemplateError for a role that
                it refuses.
        """
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added around it."""
        return self._encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, markers such as <tool_call> kept, the end token left out."""
        ids = list(token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return self.decode_all(ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of any ids, special tokens and all."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    @cached_property
    def markers(self) -> dict[int, str]:
        """The tokens that never come out of ordinary text, by id: special and added ones."""
        added = {index: text for text, index in self.tokenizer.get_added_vocab().items()}
        special = zip(
            self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True
        )
        return dict(special) | added

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        """Finds any marker in a text; the longer of two wins."""
        texts = sorted(self.markers.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids without added tokens.

    A fast tokenizer's wrapper changes truncation settings in each call, which two threads must
    not do at once; a copy of its Rust part is safe. Others take turns.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    lock = threading.Lock()

    def encode(text: str) -> list[int]:
        with lock:
            return list(tokenizer.encode(text, add_special_tokens=False))

    return encode
