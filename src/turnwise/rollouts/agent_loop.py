"""Agent loops: a loop is a coroutine that makes one trajectory with the help of a context.

To add an agent loop: write a class with `async def run(environment, context)`, and set
`rollout.loop: package.module:Class`.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from turnwise.chat.messages import in_thread_if_long
from turnwise.chat.prompts import next_prompt, response_room
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import NO_DEADLINE, RolloutConfig, SamplingConfig
from turnwise.config.rollout import BASE
from turnwise.core.admission import Place
from turnwise.core.deadlines import StallClock
from turnwise.core.run_files import RunFiles
from turnwise.core.spans import chat_span, record_answer
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Completion, Generator, Request, Route, TurnTimes, generate
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.episode import Episode
from turnwise.rollouts.problems import Row
from turnwise.tools.toolbox import Toolbox
from turnwise.trajectory import ChatTemplate, Message, Prompt, PromptLike, Trajectory
from turnwise.trajectory.chat_template import Tools
from turnwise.trajectory.left_out import check_tools

_BOUNDED = ("generate", "tools", "environment")
"""Phases that have their own deadlines: `engine.request_timeout`, `rollout.tool_timeout` and
`rollout.environment_timeout`."""

_WITHOUT_ENGINES = ("tools", "environment", "agent")
_BETWEEN = ("tools", "environment")  # phases whose seconds count for the turn before them


@dataclass(slots=True)
class RolloutContext:
    """One trajectory in progress, with everything that its agent loop may use.

    Example:
        class AskTwice:
            async def run(self, environment: Environment, context: RolloutContext) -> None:
                trajectory, decode = context.trajectory, context.template.decode
                trajectory.messages = messages = list(context.problem)
                prompt = await context.first_prompt(messages)
                completion = await context.sample(prompt)
                if completion is None:  # the context is full; the status says so
                    return
                doubt = {"role": "user", "content": "Are you sure?"}
                messages.append({"role": "assistant", "content": decode(completion.token_ids)})
                messages.append(doubt)
                prompt = await context.next_prompt(prompt, completion.token_ids, [doubt])
                completion = await context.sample(prompt)
                if completion is None:
                    return
                messages.append({"role": "assistant", "content": decode(completion.token_ids)})
                trajectory.status = "completed"
    """

    trajectory: Trajectory
    """The trajectory to fill: turns, messages and status."""
    engine: Generator
    """The engine, or the scheduler in front of several."""
    template: ChatTemplate
    tool_parser: ToolParser
    rollout: RolloutConfig
    sampling: SamplingConfig
    """Sampling parameters of each turn."""
    max_length: int
    """Maximum number of tokens of prompt and completion together."""
    request_id: str
    """Unique name of the trajectory; the names of its requests begin with it."""
    row: Row
    """The problem's row of data."""
    episode: Episode
    """The environment in use."""
    route: Route = field(default_factory=Route)
    """Names of the trajectory and its group; the scheduler uses them to keep the requests of a
    trajectory, or of a group, on one engine."""
    seed: int | None = None
    """Seed from which each turn's seed is derived; None if the run is not deterministic."""
    files: RunFiles | None = None
    """Files of the run, with the log of errors; None means that no log is kept."""
    clock: StallClock = field(default_factory=lambda: StallClock(NO_DEADLINE))
    """Clock that fails the trajectory if it makes no progress. The clock is held during turns and
    tools, because they have their own deadlines."""
    place: Place = field(default_factory=Place)
    """The trajectory's place among the admitted trajectories; the place is idle while tools,
    environment or agents work."""
    fork_reason: str | None = None
    """Reason why the latest prompt does not continue the previous turn; None if it does."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by phase; the trajectories of a group share one dictionary."""
    calls: list[TurnTimes] = field(default_factory=list)
    """Times of the turns so far."""

    @property
    def problem(self) -> Sequence[Message]:
        """The messages that the environment gives at the start."""
        return self.episode.problem

    @property
    def toolbox(self) -> Toolbox:
        """The tools of the environment and of `rollout.tools`."""
        return self.episode.toolbox

    async def step(self, message: Message) -> list[Message] | None:
        """Return the environment's answer to a turn of the model; None ends the trajectory."""
        if not self.episode.steps:
            return None
        with self.timed("environment"):
            moved = await self.episode.step(message)
            return None if moved is None else moved[1]

    async def move(self, message: Message) -> tuple[str, list[Message]] | None:
        """Return the player who moves next in a game, and the messages that this player reads
        first; None ends the trajectory."""
        with self.timed("environment"):
            return await self.episode.step(message, game=True)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a `with` block to `seconds[phase]`, such as generate or reward."""
        started = time.perf_counter()
        bounded = self.clock.held() if phase in _BOUNDED else nullcontext()
        at_work: AbstractContextManager[None] = nullcontext()
        if phase == "generate":
            at_work = self.place.working()
        elif phase in _WITHOUT_ENGINES:
            at_work = self.place.idle()
        try:
            with bounded, at_work:
                yield
        finally:
            self.clock.moved()
            seconds = time.perf_counter() - started
            self.seconds[phase] += seconds
            last = self.calls[-1] if self.calls and phase in _BETWEEN else None
            if last is not None and last.tools is not None:
                self.calls[-1] = last._replace(tools=last.tools + seconds)

    async def first_prompt(
        self, messages: Sequence[Message], *, tools: Tools | None = None
    ) -> Prompt:
        """Return the prompt of a new conversation, with generation prompt.

        Args:
            tools: Descriptions of tools; ignored if `rollout.tools_in_prompt` is false.

        Raises:
            InputError: when the model has no chat template, or its template leaves out the tools.
        """
        shown = tools if self.rollout.tools_in_prompt else None

        def render() -> Prompt:
            if shown:
                check_tools(self.template, messages, shown)
            return self.template.render_first(messages, shown)

        return await in_thread_if_long(messages, render)

    async def next_prompt(
        self,
        prompt_token_ids: PromptLike,
        completion_token_ids: PromptLike,
        new_messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        conversation: Sequence[Message] | None = None,
    ) -> Prompt:
        """Return the prompt that continues a turn with `new_messages`.

        If the new messages cannot be appended exactly as the template renders them (or if
        `rollout.history` is `template` and the template changed the history), the whole
        conversation is rendered and the next turn begins a branch.

        Args:
            new_messages: The messages after the turn's answer, up to the conversation's end.
            conversation: All messages; None means `trajectory.messages`.

        Raises:
            InputError: when the model has no chat template.
            TrajectoryError: when the template raises an error or leaves out a message.
        """
        if self.template.missing:
            raise InputError(self.template.missing)
        ids, self.fork_reason = await next_prompt(
            self.template,
            prompt_token_ids=prompt_token_ids,
            completion_token_ids=completion_token_ids,
            new_messages=new_messages,
            conversation=self.trajectory.messages if conversation is None else conversation,
            tools=tools if self.rollout.tools_in_prompt else None,
            history=self.rollout.history,
        )
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; see `ChatTemplate.encode`."""
        return await in_thread_if_long(
            [{"content": text}],
            lambda: self.template.encode(text, add_special_tokens=add_special_tokens),
        )

    async def sample(
        self,
        prompt_token_ids: PromptLike,
        *,
        stop: Sequence[str] = (),
        messages: Sequence[Message] = (),
        policy: str = "",
    ) -> Completion | None:
        """Sample a completion and record it as a turn.

        Args:
            stop: Strings at which to stop, in addition to `sampling.stop`.
            messages: The messages that led to the turn, for display; needed only if the trajectory
                has more than one conversation.
            policy: One of `rollout.policies`, or `base`, which is not trained; "" if the run has
                one policy.

        Returns:
            The completion. If the model's context or `rollout.max_response_tokens` has no room for
            a token, None, and the trajectory's status is set to `context_full`.

        Raises:
            TrajectoryError: when the prompt has too many images, or the engine aborted the request.
        """
        turn, prompt = len(self.trajectory.turns), Prompt.of(prompt_token_ids)
        room = self.max_length - len(prompt)
        if (limit := self.rollout.max_response_tokens) is not None:
            left = response_room(self.trajectory, prompt, self.fork_reason, limit)
            room = min(room, left)
        if room <= 0:
            self.trajectory.status = "context_full"
            return None
        sampling, asked = self.sampling.within(room), time.time()
        if stop:
            sampling = sampling.model_copy(update={"stop": [*sampling.stop, *stop]})
        with (
            self.timed("generate"),
            waiting(f"turn {turn} of {self.request_id}", "answer"),
            chat_span(turn, sampling.temperature, sampling.max_tokens) as span,
        ):
            seed = None if self.seed is None else stable_seed(self.seed, turn)
            name = f"{self.request_id}-{turn}"
            adapter = "" if policy == BASE else policy
            route = replace(self.route, adapter=adapter) if adapter else self.route
            request = Request(prompt, sampling, name, seed, route)
            completion = await generate(self.engine, request)
            sampled, reason = len(completion.token_ids), completion.finish_reason
            version = max(completion.weight_versions, default=-1)
            record_answer(span, len(prompt), sampled, reason, version)
        if completion.finish_reason == "abort":
            raise TrajectoryError("engine_abort", f"{self.request_id} was aborted by the engine")
        times = asked, time.time()
        self.record(prompt, completion, times, 0.0, messages=messages, policy=policy)
        return completion

    def record(
        self,
        prompt: Prompt,
        completion: Completion,
        times: tuple[float, float],
        tools: float | None = None,
        *,
        messages: Sequence[Message] = (),
        policy: str = "",
    ) -> None:
        """Record the completion of a request as a turn.

        Args:
            times: Beginning and end of the request, in seconds since the epoch.
            tools: Seconds as in `TurnTimes.tools`.
            messages: Messages as in `sample`.
            policy: Name as in `sample`.
        """
        self.trajectory.add_turn(
            prompt,
            **completion.as_turn,
            fork_reason=self.fork_reason,
            messages=messages,
            adapter="" if policy == BASE else policy,
            untrained="frozen_policy" if policy == BASE else "",
        )
        turn = len(self.trajectory.turns) - 1
        first, worker, queued = completion.first_token_at, completion.worker, completion.queued
        self.calls.append(TurnTimes(turn, times[0], first, times[1], worker, queued, tools))
        self.fork_reason = None
        self.episode.turn_ended(turn)

    def count(self, event: str) -> None:
        """Add one to `trajectory.events[event]`."""
        self.trajectory.events[event] += 1


class AgentLoop(Protocol):
    """Interface of agent loops: record turns in `context.trajectory`, and set its status.

    `rollout.loop` gives a loop's short name, or its class as `package.module:Class`. The class is
    built without arguments, once for all trajectories. All trajectories share one event loop, so
    call blocking functions with `asyncio.to_thread`, which has a thread for each call here.

    A class may also have these members. `load(config)` is called in a thread before the run starts
    anything; it raises `InputError` if the configuration cannot be used. `opened(config, generator,
    admission)` is an async context manager around all trajectories of a process, for example a
    server for agents; the terminal shows its start under the text in the attribute `front`.
    `by_requests` is True if agents, or similar programs, make the requests in place of the loop.

    Example:
        class SingleTurn:
            async def run(self, environment: Environment, context: RolloutContext) -> None:
                trajectory = context.trajectory
                trajectory.messages = list(context.problem)
                prompt = await context.first_prompt(trajectory.messages)
                completion = await context.sample(prompt)
                if completion is not None:
                    answer = context.template.decode(completion.token_ids)
                    trajectory.messages.append({"role": "assistant", "content": answer})
                    trajectory.status = "completed"
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run one trajectory to its end; its reward is computed afterwards."""
        ...


def stable_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
