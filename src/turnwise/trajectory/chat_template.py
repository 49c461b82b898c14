"""A model's chat template: messages to text and token ids, and sampled ids to text.

A template's fixed parts, such as `<|im_start|>system ...`, are encoded once: a tokenizer divides a
text at its special tokens before anything else, and encodes the text between two special tokens
separately. So a rendered conversation is encoded in segments, each of which begins with a special
token; only a few segments are new.
"""

import copy
import hashlib
import itertools
import json
import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeAlias

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.trajectory.images import as_json, image_parts, images_in
from turnwise.trajectory.prompt import (
    ImageTokens,
    Prompt,
    PromptLike,
    common_prefix,
    id_list,
    put_in_place,
)
from turnwise.trajectory.turn import Message

Tools = Sequence[JsonObject]
"""Descriptions of tools, each of the form `{"type": "function", "function": {...}}`."""
_PROBE = "text 8c1d0f52"
_GUARD = "\ufdd0"
"""Character that marks an escaped special token until it is encoded; no text contains it."""
_SPACE = "\u2581"  # how SentencePiece writes a space
CACHED_ENTRIES = 2**14
"""Maximum number of entries of an `IdCache`; each takes about 300 bytes in addition to key and ids.
A server meets few prompts twice, so more entries would only fill its memory."""
_CACHED_TOKENS = 2**22  # tokens of all cached first prompts, at 4 bytes each
_CACHED_CHARACTERS = 2**22  # characters of all cached segments; their ids take at most 4 bytes each
_DEEPEST_GROUP = 32
"""Maximum depth of the groups of `any_of`'s patterns: compiling deeper groups takes a deep stack.
"""
Tokenizer: TypeAlias = Foreign
"""A Hugging Face tokenizer."""


class ChatTemplate:
    """Renders conversations with one tokenizer and one Jinja template.

    Safe to use from several threads at once. Without a template, it can render only a single user
    message, as plain text, with the tokens that the tokenizer adds to texts, such as BOS.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template.
        escape_special_tokens: Encode a special token (`<|im_end|>`) in the content of a message
            as ordinary text, so that only the template itself and assistants' messages make control
            tokens.
        images: The model's image processor; None refuses images.
        **template_kwargs: Extra variables for the template.

    Raises:
        InputError: when the tokenizer cannot encode special tokens as ordinary text.

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
        images: ImageTokens | None = None,
        **template_kwargs: object,
    ) -> None:
        self.images = images
        self.missing = ""  # sentence that says that there is no template; "" if there is one
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
        """The ids at which generation stops; ids from the model's generation settings are added
        after loading."""
        self.seams: dict[object, object] = {}
        """Cache of `bridge`: one seam for messages of the same roles and tool names."""
        self.anchors: dict[str, list[int]] = {}
        """Ids of the special tokens behind which `bridge` has encoded a text."""
        self.first_prompts = IdCache(_CACHED_TOKENS)
        """Cache of `render_first`."""
        self.shows_tools: bool | None = None
        """Result of `check_tools`; None before a prompt with tools."""
        self._control: re.Pattern[str] | None = None
        if escape_special_tokens:  # of the added tokens, escape only control tokens
            added = getattr(tokenizer, "added_tokens_decoder", {}).values()
            control = {str(token) for token in added if token.special}
            self._control = any_of({*tokenizer.all_special_tokens, *control})
            text = "a".join(["", *tokenizer.all_special_tokens, ""])
            ids = self.encode(self.escape(text))
            if self.decode_all(ids) != text or {*ids} & {*tokenizer.all_special_ids}:
                raise InputError(
                    "model.escape_special_tokens: this model's tokenizer cannot write its special "
                    "tokens as plain text"
                )

    def with_variables(self, **template_kwargs: object) -> "ChatTemplate":
        """Return a cheap copy of the template with more variables; copies share the tokenizer."""
        other = copy.copy(self)
        other._kwargs = {**self._kwargs, **template_kwargs}
        other.seams, other.first_prompts = {}, IdCache(_CACHED_TOKENS)
        other.shows_tools = None
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Return a whole conversation as a prompt; raises what `render_text` does."""
        made = self._render(messages, tools, add_generation_prompt)
        return self.with_images(made, messages)

    def _render(
        self, messages: Sequence[Message], tools: Tools | None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation, with one marker for each image."""
        if self.missing and not tools and len(messages) == 1:
            content = messages[0].get("content")
            if isinstance(content, str) and messages[0].get("role") == "user":
                return self.encode(self.escape(content), add_special_tokens=True)
        return self.encode(
            self.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    def with_images(self, ids: list[int], messages: Sequence[Message]) -> Prompt:
        """Return rendered ids in which the ids of each image of the messages replace its marker.

        Raises:
            InputError: when the model takes no images, or an image has not been read.
            TrajectoryError: as `put_in_place` raises it.
        """
        if not (parts := [*image_parts(messages)]):
            return Prompt(ids)
        if len(images := images_in(messages)) < len(parts):
            raise InputError(
                "a message of your own code has an image that has not been read: pass it through "
                "turnwise.chat.images.read_parts first"
            )
        if self.images is None:
            raise InputError(
                "a message has an image, and this model takes text alone, or "
                "engine.images_per_prompt is 0"
            )
        return put_in_place(ids, images, self.images)

    def render_first(self, messages: Sequence[Message], tools: Tools | None) -> Prompt:
        """Return the result of `render`, cached by messages and tools."""
        key = None
        try:
            text = json.dumps([list(messages), tools or None], default=as_json)
            digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16)
            key = digest.digest()
        except (TypeError, ValueError):  # not JSON: it is rendered each time
            pass
        made = self.first_prompts.get(key, partial(self._render, messages, tools)).tolist()
        return self.with_images(made, messages)

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
        given = list(messages)
        if not self._knows_developers and "developer" in [m["role"] for m in given]:
            given = _with_one_system(given)
        texts_change = self._control is not None or self._in_parts
        for index, message in enumerate(given):
            content = message.get("content")
            if isinstance(content, list) or (texts_change and isinstance(content, str)):
                given[index] = {**message, "content": self._shown(content, message["role"])}
        return str(
            self.tokenizer.apply_chat_template(
                given,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        )

    def _shown(self, content: str | list[Foreign], role: str) -> str | list[Foreign]:
        """Return the content of a message as the template takes it, with special tokens escaped."""
        escaped = self._control is not None and role != "assistant"
        if isinstance(content, str):
            content = self.escape(content) if escaped else content
            return [{"type": "text", "text": content}] if self._in_parts else content
        parts = [
            {**part, "text": self.escape(part["text"])}
            if escaped and isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        found = [part.get("text") if isinstance(part, dict) else part for part in parts]
        texts = [text for text in found if isinstance(text, str)]
        if self._in_parts or self._takes_parts or len(texts) < len(parts):
            return parts
        return self.between_parts.join(texts)

    @cached_property
    def _knows_developers(self) -> bool:
        source = self._kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", "")
        return any(f"{quote}developer{quote}" in str(source) for quote in "'\"")

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template shows a text only if the text is in a list of parts, as some
        templates that show images do."""
        part = {"type": "text", "text": _PROBE}
        return not self._shows(_PROBE, _PROBE) and self._shows([part], _PROBE)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template accepts lists of parts, and shows their texts instead of printing
        the whole list, as a template that prints any content would."""
        part = {"type": "text", "text": _PROBE}
        return self._shows([part], _PROBE) and not self._shows([part], "type")

    @cached_property
    def between_parts(self) -> str:
        """Separator between two text parts of one message: "" if the template joins them itself,
        else a line break, as in vLLM's server."""
        part = {"type": "text", "text": _PROBE}
        return "" if self._shows([part, part], _PROBE + _PROBE) else "\n"

    def _shows(self, content: object, text: str) -> bool:
        asked = [{"role": "user", "content": content}]
        try:
            made = self.tokenizer.apply_chat_template(
                asked, tools=None, add_generation_prompt=False, tokenize=False, **self._kwargs
            )
        except Exception:  # a template may raise anything
            return False
        return text in made

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text.

        Args:
            add_special_tokens: Add the tokens that the tokenizer puts around a text, such as BOS,
                as vLLM does for plain prompts.
        """
        if self._control is None or _GUARD not in text:
            return self._encode(text, add_special_tokens)
        first, *rest = text.split(_GUARD)
        ids = self._encode(first, add_special_tokens)
        return [*ids, *(token for part in rest for token in self._encode(part, False))]

    def escape(self, text: str) -> str:
        """Escape the control tokens in a text, if `escape_special_tokens` is set."""
        if self._control is None:
            return text
        text = text.replace(_GUARD, "")
        return self._control.sub(lambda found: found[0][0] + _GUARD + found[0][1:], text)

    def decode(self, token_ids: PromptLike) -> str:
        """Return the text of sampled ids, special tokens included except for the token at which
        generation stopped."""
        ids = id_list(token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self.decode_all(ids)

    def decode_all(self, token_ids: PromptLike) -> str:
        """Return the text of any ids, special tokens included."""
        return str(
            self.tokenizer.decode(
                id_list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Special and added tokens by id, except for added tokens of white space, such as Gemma's
        line breaks, because ordinary text is encoded to these tokens."""
        added = self.tokenizer.get_added_vocab().items()
        marks = {index: text for text, index in added if text.replace(_SPACE, " ").strip()}
        special = zip(
            self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True
        )
        return dict(special) | marks

    @cached_property
    def special_token_pattern(self) -> re.Pattern[str]:
        """Pattern of any special token in a text; the longest match wins."""
        return any_of(self.special_tokens.values())


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages with all system and developer messages joined into one system message at the
    beginning, as vLLM's server does. The template would leave out developer messages."""
    roles = ("system", "developer")
    texts = [message.get("content") or "" for message in messages if message["role"] in roles]
    others = [message for message in messages if message["role"] not in roles]
    if not all(isinstance(text, str) for text in texts):
        return list(messages)
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of several texts. Empty texts are ignored; without
    any other text, the pattern never matches."""
    return re.compile(_either(sorted({*texts} - {""}), _DEEPEST_GROUP) or r"(?!)")


def _either(texts: Sequence[str], deeper: int) -> str:
    """Return the source of a pattern that matches the longest of sorted, distinct texts.

    Each group holds the rests of texts after a common prefix, and its alternatives begin with
    different characters. So at each position, a search tries only a few of thousands of texts, such
    as `<unused0>` to `<unused6241>`.
    """
    if not texts:
        return ""
    shared = texts[0][: common_prefix(texts[0], texts[-1])]
    rests = [text[len(shared) :] for text in texts]
    if not rests[1:]:
        return re.escape(shared)
    if deeper:
        groups = itertools.groupby(rests, key=lambda rest: rest[:1])
        parts = [_either([*group], deeper - 1) for _, group in groups]
    else:
        parts = [re.escape(rest) for rest in sorted(rests, key=len)]
    return f"{re.escape(shared)}(?:{'|'.join(reversed(parts))})"


def _encoder(tokenizer: Tokenizer) -> Callable[[str, bool], list[int]]:
    """Return a thread-safe function that encodes a text, with or without special tokens.

    The wrapper of a fast tokenizer changes truncation settings in each call, so two threads must
    not call it at once, but a copy of its Rust part is thread-safe. Other tokenizers are called
    under a lock.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        lock = threading.Lock()

        def encode(text: str, special: bool) -> list[int]:
            with lock:
                return list(tokenizer.encode(text, add_special_tokens=special))

        return encode
    backend = type(backend).from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()

    def whole(text: str, special: bool = False) -> list[int]:
        return list(backend.encode(text, add_special_tokens=special).ids)

    if (starts := segment_starts(backend.get_added_tokens_decoder())) is None:
        return whole
    segmented = by_segments(whole, starts, IdCache(_CACHED_CHARACTERS))
    return lambda text, special: whole(text, True) if special else segmented(text)


class IdCache:
    """A thread-safe LRU cache of token ids by key. The total size and the number of its entries are
    limited."""

    def __init__(self, room: int) -> None:
        self.made = 0  # number of entries that were made
        self._room = room
        self._entries: OrderedDict[Hashable, tuple[array[int], int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, key: Hashable, make: Callable[[], list[int]], size: int | None = None
    ) -> "array[int]":
        """Return the ids of a key, which `make` returns on first use; ids of the key None are not
        cached. The ids take `size` of the cache's room, or their number if it is None."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return entry[0]
        ids = array("I", make())
        size = len(ids) if size is None else size
        with self._lock:
            self.made += 1
            if key is not None and key not in self._entries:
                self._entries[key] = ids, size
                self._room -= size
                while self._room < 0 or len(self._entries) > CACHED_ENTRIES:
                    self._room += self._entries.popitem(last=False)[1][1]
        return ids


def by_segments(
    encode: Callable[[str], list[int]], starts: re.Pattern[str], cache: IdCache
) -> Callable[[str], list[int]]:
    """Return a function that encodes texts as `encode` does, but in segments, which it caches. A
    segment begins at each match of the pattern `starts` (made by `segment_starts`)."""

    def encode_segments(text: str) -> list[int]:
        edges = [found.start() for found in starts.finditer(text)]
        if not edges:
            return encode(text)
        edges = [*([0] if edges[0] else []), *edges, len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(edges):
            part = text[start:end]
            ids.extend(cache.get(part, partial(encode, part), len(part)))
        return ids

    return encode_segments


def segment_starts(added: Mapping[int, Foreign]) -> re.Pattern[str] | None:
    """Return a pattern of the added tokens at which a text may be divided; None if a text must not
    be divided.

    A text may not be divided at a token that takes the spaces before it, is found in normalized
    text, may begin inside another token, or is the beginning of a longer token at which a text may
    not be divided. Tokens that depend on the characters around them (`single_word`) forbid any
    division.
    """
    if any(token.single_word for token in added.values()):
        return None
    raw = [token for token in added.values() if not token.normalized and token.content]
    texts = dict.fromkeys(token.content for token in raw)
    lengths = sorted({len(text) for text in texts})
    # A token may begin inside another token that contains it behind its first character (`inner`),
    # or that ends with the token's beginning (`ends`).
    inner: set[str] = set()
    ends: set[str] = set()
    for text in texts:
        for start in range(1, len(text)):
            ends.add(text[start:])
            fitting = lengths[: bisect_right(lengths, len(text) - start)]
            inner.update(text[start : start + length] for length in fitting)
    able = {token.content for token in raw if not token.lstrip}
    starts: list[str] = []
    unfit: set[str] = set()  # beginnings of tokens that are not in `starts`
    for text in sorted(texts, key=len, reverse=True):
        beginnings = [text[:length] for length in range(1, len(text))]
        if text in able and not (text in inner or text in unfit or ends.intersection(beginnings)):
            starts.append(text)
        else:
            unfit.update(beginnings)
    return any_of(starts) if starts else None
