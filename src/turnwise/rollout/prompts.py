"""First prompts, rendered once however many trajectories begin with them."""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from turnwise.trajectory import ChatTemplate, Message

_KEPT_TOKENS = 2**24
"""Tokens of all prompts that are kept, at 4 bytes each."""


class Prompts:
    """A cache of rendered conversations; the least recently used is dropped first.

    Threads may share one.
    """

    def __init__(self, template: ChatTemplate, kept_tokens: int = _KEPT_TOKENS) -> None:
        self.rendered = 0
        """Number of conversations that the template rendered."""
        self._template = template
        self._room = kept_tokens
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> list[int]:
        """The ids of a conversation with its generation prompt; raises what the template does."""
        key = _digest(messages, tools)
        with self._lock:
            if key is not None and (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known.tolist()
        ids = self._template.render(messages, tools=tools)
        with self._lock:
            self.rendered += 1
            if key is not None and key not in self._known:
                self._known[key] = array("I", ids)
                self._room -= len(ids)
                while self._room < 0:
                    _, oldest = self._known.popitem(last=False)
                    self._room += len(oldest)
        return ids


def _digest(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> bytes | None:
    """A key of a conversation; None where it cannot be written as JSON."""
    try:
        text = json.dumps([list(messages), tools])
    except (TypeError, ValueError):
        return None
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
