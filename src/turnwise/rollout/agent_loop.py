"""What an agent loop is, and what it works with: one coroutine that makes one trajectory."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.config import NO_DEADLINE, RolloutConfig, SamplingConfig
from turnwise.deadlines import StallClock
from turnwise.engine.protocol import Completion, Generator, Route
from turnwise.errors import TrajectoryError
from turnwise.rollout.environment import Environment
from turnwise.rollout.error_log import ErrorLog
from turnwise.rollout.problems import Row
from turnwise.rollout.prompts import Prompts
from turnwise.rollout.tools import Toolbox
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.serving.sessions import SessionStore
from turnwise.serving.template import off_loop
from turnwise.serving.tool_parser import ToolParser
from turnwise.trajectory import ChatTemplate, Message, Trajectory, bridge
from turnwise.watchdog import waiting

_BOUNDED = ("generate", "tools")
"""Phases that `engine.request_timeout` and `rollout.tool_timeout` bound."""


class SessionServer(Protocol):
    """What serves agents by HTTP."""

    sessions: SessionStore
    model_name: str
    """Name of the model for clients."""

    def session_url(self, session_id: str) -> str:
        """The base URL of one session."""
        ...


@dataclass(slots=True)
class RolloutContext:
    """One trajectory in the making, and everything that its loop may use."""

    trajectory: Trajectory
    engine: Generator
    template: ChatTemplate
    tool_parser: ToolParser
    toolbox: Toolbox
    rollout: RolloutConfig
    sampling: SamplingConfig
    max_length: int
    request_id: str
    row: Row
    """The problem's data."""
    problem: Sequence[Message] = ()
    """The messages that the environment opens with."""
    server: SessionServer | None = None
    """The OpenAI server, where agents of their own need one."""
    chats: ChatBackend | None = None
    """What answers a chat scheduler of the user's, where there is one."""
    route: Route | None = None
    """Which trajectory and which group this is, for whoever picks an engine."""
    seed: int | None = None
    """Where the run is deterministic: the seed that each turn's own is derived from."""
    errors: ErrorLog | None = None
    """Where the first error of each kind is written."""
    prompts: Prompts | None = None
    """First prompts that were rendered before."""
    clock: StallClock = field(default_factory=lambda: StallClock(NO_DEADLINE))
    """Fails the trajectory when nothing of it moves; it stands still during turns and tools, which
    have deadlines of their own."""
    fork_reason: str | None = None
    """Why the prompt made last does not continue the turn before it."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where `timed` adds up; the runner gives all trajectories of a group one."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the seconds of a `with` block under `phase`: generate, tools, reward ..."""
        started = time.perf_counter()
        bounded = self.clock.held() if phase in _BOUNDED else nullcontext()
        try:
            with bounded:
                yield
        finally:
            self.clock.moved()
            self.seconds[phase] += time.perf_counter() - started

    async def first_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids of a conversation that begins here."""
        prompts = self.prompts
        render = self.template.render if prompts is None else prompts.render
        return await off_loop(messages, lambda: render(messages, tools=tools))

    async def next_prompt(
        self,
        prompt_token_ids: Sequence[int],
        completion_token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids that continue a turn with `new_messages`, which end the trajectory's messages.

        Where no bridge is exact (or `rollout.history` is `template` and the template changed the
        history), the whole conversation is rendered and the next turn begins a branch.

        Raises:
            TrajectoryError: when the template refuses the conversation, or leaves a message out.
        """

        bridged = await off_loop(
            new_messages,
            lambda: bridge(
                self.template,
                prompt_token_ids=prompt_token_ids,
                completion_token_ids=completion_token_ids,
                new_messages=new_messages,
                tools=tools,
            ),
        )
        self.fork_reason = bridged.fork_reason
        own = bridged.token_ids
        if own is not None and self.rollout.history == "exact":
            return own
        if bridged.fork_reason == "message_dropped":
            raise TrajectoryError("message_dropped", bridged.detail)
        messages = self.trajectory.messages
        return await off_loop(messages, lambda: self._as_rendered(own, messages, tools))

    def _as_rendered(
        self,
        own: list[int] | None,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
    ) -> list[int]:
        """The whole conversation as the template has it; `own` ids if their text is the same."""
        try:
            rendered = self.template.render(messages, tools=tools)
        except Exception as error:  # a template may raise anything
            raise TrajectoryError("template_refuses", f"{type(error).__name__}: {error}") from error
        if own is not None and self.template.decode_all(own) == self.template.decode_all(rendered):
            return own
        self.fork_reason = self.fork_reason or "history_rewritten"
        return rendered

    async def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return await off_loop([{"content": text}], lambda: self.template.encode(text))

    async def sample(
        self, prompt_token_ids: Sequence[int], *, stop: Sequence[str] = ()
    ) -> Completion | None:
        """One turn: sample a completion and record it; None when the context, or what
        `rollout.max_response_tokens` allows, has no room.

        Raises:
            TrajectoryError: when the engine aborted the request.
        """
        turns = self.trajectory.turns
        turn = len(turns)
        room = self.max_length - len(prompt_token_ids)
        if (budget := self.rollout.max_response_tokens) is not None:
            first = len(turns[0].added_token_ids) if turns else len(prompt_token_ids)
            room = min(room, first + budget - len(prompt_token_ids))
        if room <= 0:
            self.trajectory.status = "context_full"
            return None
        sampling = self.sampling
        max_tokens = min(sampling.max_tokens, room)
        if stop or max_tokens < sampling.max_tokens:
            changes: dict[str, Any] = {
                "stop": [*sampling.stop, *stop],
                "max_tokens": max_tokens,
                "min_tokens": min(sampling.min_tokens, max_tokens),
            }
            sampling = sampling.model_copy(update=changes)
        with self.timed("generate"), waiting(f"turn {turn} of {self.request_id}", "answer"):
            completion = await self.engine.generate(
                prompt_token_ids,
                sampling,
                f"{self.request_id}-{turn}",
                None if self.seed is None else stable_seed(self.seed, turn),
                self.route,
            )
        if completion.finish_reason == "abort":
            raise TrajectoryError("engine_abort", f"{self.request_id} was aborted by the engine")
        self.trajectory.add_turn(
            prompt_token_ids,
            completion.token_ids,
            completion.logprobs,
            completion.weight_versions,
            completion.finish_reason,
            completion.prompt_logprobs,
            fork_reason=self.fork_reason,
        )
        self.fork_reason = None
        return completion

    def count(self, event: str) -> None:
        self.trajectory.events[event] += 1


class AgentLoop(Protocol):
    """Makes one trajectory: records turns in `context.trajectory`, and sets its status.

    Chosen in the configuration by a short name or as `package.module:Class`; the class is built
    without arguments, once for all trajectories. It runs on the event loop that serves all
    trajectories: what blocks belongs into `asyncio.to_thread`.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None: ...


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but its parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
