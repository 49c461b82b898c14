"""The current request of a session, for the code on both sides of vLLM's application."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.chat.messages import Answer, Conversation
from turnwise.chat.prompts import NextPrompt
from turnwise.chat.session import Session
from turnwise.chat.session_store import SessionStore
from turnwise.engine.protocol import Completion

if TYPE_CHECKING:
    from turnwise.serving.openai.vllm_api import SamplingRequest


ChoiceKey = tuple[str, int]
"""Identity of one completion of a request: vLLM's id of its prompt, and the index of the choice."""


@dataclass(slots=True)
class RequestContext:
    """One request on its way to the engine and back."""

    session: Session
    held: ExitStack
    """Closed at the end of the request."""
    request: "SamplingRequest | None" = None
    """The request as parsed by vLLM; None before rendering."""
    asked: Conversation = field(default_factory=Conversation)
    """Messages and tools of a chat; empty for other requests."""
    prompt: NextPrompt = field(default_factory=lambda: NextPrompt(None))
    finished: dict[ChoiceKey, Completion] = field(default_factory=dict)
    texts: dict[ChoiceKey, str] = field(default_factory=dict)
    """vLLM's text of each completion."""
    undelivered: list[Callable[[], None]] = field(default_factory=list)
    """For each completion that the client has not got, a function that records it as a turn."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers as the client got them, by the index; of streamed chats only those with tools."""
    adapter: str = ""
    """Name of the adapter that samples; "" for the policy."""
    began: float = field(default_factory=time.time)
    """Time when the request came, in seconds since the epoch."""

    @property
    def scores(self) -> bool:
        """Whether the request only scores its prompt: it is no turn, and its one token is thrown
        away."""
        return bool(getattr(self.request, "echo", False)) and (
            getattr(self.request, "max_tokens", None) == 0
        )

    def within(self, prompt: Sequence[int], most: int) -> int:
        """Return how many of `most` tokens may follow a prompt; 0 or less if none may."""
        room = self.session.room(prompt, self.prompt.fork_reason)
        return most if room is None else min(most, room)

    def deliver(self) -> None:
        """Record the finished completions: the next bytes that the client gets have their end.

        A client can leave as soon as it has read these, or send the next request.
        """
        for record in self.undelivered:
            record()
        self.undelivered.clear()

    def drop(self) -> None:
        """Count the finished completions that the client did not get as lost."""
        for _ in self.undelivered:
            self.session.lose_turn()
        self.session.lost_turns += len(self.undelivered)
        self.undelivered.clear()

    def move_to(self, session: Session, store: SessionStore) -> None:
        """Make another session the request's, and hold it until the end of the request."""
        if session is not self.session:
            self.session = self.held.enter_context(store.holding(session))


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current task serves; None outside requests that sample."""


@contextmanager
def serving(
    store: SessionStore, name: str | None, previous: str | None, child: str | None = None
) -> Iterator[RequestContext]:
    """Hold the session of a request, and make the request `CURRENT`, until it is answered.

    Completions that were not delivered then are lost.

    Raises:
        InputError: as `SessionStore.request` does.
    """
    with ExitStack() as held:
        context = RequestContext(held.enter_context(store.request(name, previous, child)), held)
        token = CURRENT.set(context)
        try:
            yield context
        finally:
            context.drop()
            CURRENT.reset(token)
