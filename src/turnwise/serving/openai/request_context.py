"""One request on its way to the engine and back, and the context variable that holds it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnwise.chat import prompts
from turnwise.chat.messages import Answer, Conversation
from turnwise.chat.messages import answer as canonical_answer
from turnwise.chat.session import AS_CONFIGURED, Session, TurnSampling
from turnwise.chat.tool_parser import is_object
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError
from turnwise.trajectory.prompt import PlacedImage, Prompt

if TYPE_CHECKING:
    from turnwise.internals import vllm_server as vllm

ChoiceKey = tuple[str, int]
"""Identity of one completion of a request: vLLM's id of its prompt, and the index of the choice."""


@dataclass(slots=True)
class RequestContext:
    """One request on its way to the engine and back."""

    session: Session
    held: ExitStack  # closed at the end of the request
    request: "vllm.SamplingRequest | None" = None
    """The request as parsed by vLLM; None before rendering."""
    conversation: Conversation = field(default_factory=Conversation)
    """Messages and tools of a chat; empty for other requests."""
    next_prompt: prompts.NextPrompt = field(default_factory=lambda: prompts.NextPrompt(None))
    finished: dict[ChoiceKey, Completion] = field(default_factory=dict)
    texts: dict[ChoiceKey, str] = field(default_factory=dict)
    undelivered: list[Callable[[], None]] = field(default_factory=list)
    """For each completion that the client has not received, a function that records it as a
    turn."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """Answers to a chat as the client got them, by the index of the choice (`note`)."""
    object_arguments: bool = False
    """Whether the client holds the arguments of calls as objects, as clients of Anthropic's
    Messages do. For these clients, arguments that are not a JSON object become an empty object."""
    adapter: str = ""
    sampling: TurnSampling = AS_CONFIGURED
    """The turn's own sampling parameters."""
    began: float = field(default_factory=time.time)
    """Time when the request arrived, in seconds since the epoch."""

    @property
    def images(self) -> Sequence[PlacedImage]:
        """Images of a chat's prompt; vLLM's application passes on only the prompt's ids."""
        prompt = self.next_prompt.token_ids
        return () if prompt is None else prompt.images

    @property
    def trained(self) -> bool:
        """Whether the sampled tokens are trained; if so, the ids that a grammar allowed are
        recorded."""
        return self.session.sampling is not None and not self.sampling.untrained

    def score_prompt(self, params: "vllm.SamplingParams") -> None:
        """Ask the engine for the log-probs of the prompt's tokens, if the session records them."""
        own = self.session.sampling
        if own is not None and own.prompt_logprobs:
            params.prompt_logprobs = params.prompt_logprobs or 0
            params.skip_reading_prefix_cache = True  # cached tokens get no log-probs

    def max_tokens_for(self, prompt: Prompt, max_tokens: int) -> int:
        """Return how many tokens, at most `max_tokens`, may follow a prompt. If no token may
        follow, mark the session as full (`context_full`) and raise InputError."""
        room = self.session.room(prompt, self.next_prompt.fork_reason)
        max_tokens = max_tokens if room is None else min(max_tokens, room)
        if max_tokens <= 0:
            self.session.context_full = True
            raise InputError(
                f"the conversation has used up its {self.session.max_response_tokens} tokens "
                "(rollout.max_response_tokens)"
            )
        return max_tokens

    def note(self, index: int, content: str | None, calls: Iterable[Sequence[str]]) -> None:
        """Note a finished choice in the form in which its client will send it back. The choice is
        noted because, if a call is malformed, parsing the whole text again may give a different
        result. `calls` are pairs of name and arguments."""
        given = [
            (name, arguments if not self.object_arguments or is_object(arguments) else "{}")
            for name, arguments in calls
        ]
        self.answers[index] = canonical_answer(content, given)

    async def deliver(self) -> None:
        """Record the finished completions, before the client gets their last bytes, because the
        client may leave or send its next request as soon as it has these bytes."""
        while self.undelivered:
            self.undelivered.pop(0)()
            if self.undelivered:  # there may be a thousand: let other requests run
                await asyncio.sleep(0)


CURRENT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The request that the current task serves; None outside requests that sample."""
