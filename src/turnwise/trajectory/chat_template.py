"""A model's chat template: messages to text and token ids, and sampled ids to text.

The tokenizer's template decides every id of a prompt. `bridge` builds the ids that lead from one
turn to the next.
"""

import copy
import re
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.trajectory.segments import SegmentEncoder, segment_starts
from turnwise.trajectory.trajectory import Message

if TYPE_CHECKING:
    from turnwise.trajectory.seam import Seam

Tools = Sequence[JsonObject]
"""Descriptions of tools: `{"type": "function", "function": {...}}` each."""
_GUARD = "\ufdd0"
"""Marks an escaped special token until it is encoded: a character that no text contains."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering and decoding need."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def all_special_tokens(self) -> list[str]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(
        self,
        conversation: list[Message],
        *,
        tools: list[JsonObject] | None,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: object,
    ) -> object: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> object: ...


class ChatTemplate:
    """Renders conversations with one tokenizer and one Jinja template.

    Safe to use from several threads at once. Without a template, it renders a single text of a user
    as the plain text, after the tokens with which the tokenizer begins texts, such as BOS.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template.
        escape_special_tokens: Encode a special token (`<|im_end|>`) in the content of a message
            as ordinary text; only the template itself, and assistants' messages, make control
            tokens.
        **template_kwargs: Extra variables for the template.

    Raises:
        InputError: when the tokenizer cannot escape.

    Example:
        >>> template = ChatTemplate(AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct"))
        >>> prompt = template.render([{"role": "user", "content": "2 + 2?"}])
        >>> template.decode_all(prompt)[-22:]
        '<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        escape_special_tokens: bool = False,
        **template_kwargs: object,
    ) -> None:
        self.missing = ""
        """Sentence that says that there is no template; "" if there is one."""
        if not (chat_template or getattr(tokenizer, "chat_template", None)):
            name = getattr(tokenizer, "name_or_path", "the model")
            self.missing = (
                f"the tokenizer of {name} has no chat template, and without one a prompt is one "
                "plain text, with no tools: set model.chat_template, for instance to hermes"
            )
        self.tokenizer = tokenizer
        self._kwargs: dict[str, object] = template_kwargs | (
            {"chat_template": chat_template} if chat_template else {}
        )
        self._encode = _encoder(tokenizer)
        eos = tokenizer.eos_token_id
        self.stop_token_ids: set[int] = set() if eos is None else {eos}
        """The ids at which generation stops; those of the model's generation settings are added
        after loading."""
        self.seams: dict[tuple[object, ...], Seam] = {}
        """Cache of `bridge`: one seam for messages of the same roles and tool names."""
        self.shows_tools: bool | None = None
        """Result of `check_tools`; None before a prompt with tools."""
        self._control = _control_token_pattern(tokenizer) if escape_special_tokens else None
        if escape_special_tokens and not self._can_escape():
            raise InputError(
                "model.escape_special_tokens: this model's tokenizer cannot write its special "
                "tokens as plain text"
            )

    def with_variables(self, **template_kwargs: object) -> "ChatTemplate":
        """Return the same template with more variables; it shares the tokenizer and is cheap."""
        other = copy.copy(self)
        other._kwargs = {**self._kwargs, **template_kwargs}
        other.seams = {}
        other.shows_tools = None
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a whole conversation.

        Raises:
            Exception: as `render_text` does.
        """
        if self.missing and not tools and (text := _plain_text(messages)) is not None:
            return self.encode(self.escape(text), add_special_tokens=True)
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
        """Return the text of a whole conversation.

        Raises:
            InputError: when there is no template.
            Exception: anything that the template raises, such as jinja2's TemplateError for a role
                that it refuses.
        """
        if self.missing:
            raise InputError(self.missing)
        return str(
            self.tokenizer.apply_chat_template(
                [self._escaped(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            add_special_tokens: Add those that the tokenizer puts around a text, such as BOS, as
                vLLM does for plain prompts.
        """
        encode = self._encode_plain if add_special_tokens else self._encode
        if self._control is None or _GUARD not in text:
            return encode(text)
        first, *rest = text.split(_GUARD)
        return [*encode(first), *(token for part in rest for token in self._encode(part))]

    def escape(self, text: str) -> str:
        """Escape the control tokens in a text, if `escape_special_tokens` is set."""
        if self._control is None:
            return text
        text = text.replace(_GUARD, "")
        return self._control.sub(lambda found: found[0][0] + _GUARD + found[0][1:], text)

    def _can_escape(self) -> bool:
        text = "a".join(["", *self.tokenizer.all_special_tokens, ""])
        ids = self.encode(self.escape(text))
        return self.decode_all(ids) == text and not {*ids} & {*self.tokenizer.all_special_ids}

    def _escaped(self, message: Message) -> Message:
        if self._control is None or message["role"] == "assistant":
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
        """Return the text of sampled ids, special tokens included except for a final EOS."""
        ids = list(token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        return self.decode_all(ids)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of any ids, special tokens included."""
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    @cached_property
    def _encode_plain(self) -> Callable[[str], list[int]]:
        return _encoder(self.tokenizer, add_special_tokens=True)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The tokens that ordinary text never encodes to, by id: special and added ones."""
        added = {index: text for text, index in self.tokenizer.get_added_vocab().items()}
        special = zip(
            self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True
        )
        return dict(special) | added

    @cached_property
    def special_token_pattern(self) -> re.Pattern[str]:
        """Pattern of any special token in a text; the longer of two wins."""
        texts = sorted(self.special_tokens.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _control_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Pattern of the tokens that control the model, without other added ones such as <think>."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _plain_text(messages: Sequence[Message]) -> str | None:
    """Return the text of a conversation that is a single text of the user; else None."""
    content = messages[0].get("content") if len(messages) == 1 else None
    return content if isinstance(content, str) and messages[0].get("role") == "user" else None


def _encoder(
    tokenizer: Tokenizer, *, add_special_tokens: bool = False
) -> Callable[[str], list[int]]:
    """Return a function from text to ids that threads may share.

    A fast tokenizer's wrapper changes truncation settings in each call, which two threads must
    not do at once; a copy of its Rust part is safe. Other tokenizers are locked.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()

        def encode_fast(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

        starts = segment_starts(backend.get_added_tokens_decoder())
        if starts is None or add_special_tokens:
            return encode_fast
        return SegmentEncoder(encode_fast, starts)
    lock = threading.Lock()

    def encode(text: str) -> list[int]:
        with lock:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return encode
