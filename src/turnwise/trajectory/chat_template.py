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
_GUARD = "\ufdd0"
"""Stands inside an escaped special token until it becomes ids: a character of no text."""


class ChatTemplate:
    """Renders conversations with one tokenizer and one Jinja template.

    Safe to use from several threads at once.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Jinja text that takes the place of the tokenizer's own template.
        escape_special_tokens: A special token (`<|im_end|>`) in the content of a message becomes
            the ids of its text; only the template itself, and assistants' messages, make control
            tokens.
        **template_kwargs: Extra variables for the template.

    Raises:
        InputError: when there is no chat template, or the tokenizer cannot escape.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        escape_special_tokens: bool = False,
        **template_kwargs: Any,
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
        self._special = _special_tokens(tokenizer) if escape_special_tokens else None
        if escape_special_tokens and not self._can_escape():
            raise InputError(
                "model.escape_special_tokens: this model's tokenizer cannot write its special "
                "tokens as plain text"
            )

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
                [self._escaped(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added around it."""
        if self._special is None or _GUARD not in text:
            return self._encode(text)
        return [token for part in text.split(_GUARD) for token in self._encode(part)]

    def escape(self, text: str) -> str:
        """A text of which `encode` makes no special token, where that is asked for."""
        if self._special is None:
            return text
        text = text.replace(_GUARD, "")
        return self._special.sub(lambda found: found[0][0] + _GUARD + found[0][1:], text)

    def _can_escape(self) -> bool:
        text = "a".join(["", *self.tokenizer.all_special_tokens, ""])
        ids = self.encode(self.escape(text))
        return self.decode_all(ids) == text and not {*ids} & {*self.tokenizer.all_special_ids}

    def _escaped(self, message: Message) -> Message:
        if self._special is None or message["role"] == "assistant":
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self.escape(content)}
        if isinstance(content, list):
            parts = [
                {**part, "text": self.escape(part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
            return {**message, "content": parts}
        return message

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


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Finds the tokens that control the model; not others that were added, such as <think>."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


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
