"""The current request, for the code on both sides of vLLM's application."""

import time
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.chat.messages import Answer, Conversation
from turnwise.chat.prompts import NextPrompt
from turnwise.chat.session import Session
from turnwise.chat.session_store import SessionStore

if TYPE_CHECKING:
    from turnwise.serving.openai.vllm_api import SamplingRequest


@dataclass(slots=True)
class RequestContext:
    """One HTTP request on its way through vLLM."""

    session: Session
    held: ExitStack = field(default_factory=ExitStack)
    """Closed at the end of the request."""
    request: "SamplingRequest | None" = None
    """The request as parsed by vLLM; None before rendering."""
    asked: Conversation = field(default_factory=Conversation)
    """Messages and tools of a chat; empty for other requests."""
    prompt: NextPrompt = field(default_factory=lambda: NextPrompt(None))
    finished: dict[tuple[int, ...], tuple[list[float], list[int]]] = field(default_factory=dict)
    """Log-probs and weight versions of each completion, by its ids."""
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    """vLLM's text of each completion, by its ids."""
    choices: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Index of each completion, by its ids."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers as the client got them, by the index; of streamed chats only those with tools."""
    adapter: str = ""
    """Name of the adapter that samples; "" for the policy."""
    began: float = field(default_factory=time.time)
    """Time when the request came, in seconds since the epoch."""

    def move_to(self, session: Session, store: SessionStore) -> None:
        """Make another session the request's, and hold it until the end of the request."""
        if session is not self.session:
            self.session = self.held.enter_context(store.holding(session))


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current task serves; None outside requests that sample."""
