"""The runner: makes groups of n trajectories for one problem, each an independent coroutine.

Every trajectory that starts ends exactly once: in its group or, after `rollout.retries` further
attempts, counted there under the reason of its last failure. Only an `InputError`, a mistake in the
user's input, ends the run from here.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import load_template
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import is_cancelled, task_group
from turnwise.core.deadlines import StallClock
from turnwise.core.user_code import (
    call_and_wait,
    call_user_code,
    describe_user_error,
    run_abandonable,
)
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Generator, Route
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    describe_error,
)
from turnwise.rollout.agent_loop import AgentLoop, RolloutContext, SessionServer, stable_seed
from turnwise.rollout.environment import (
    Environment,
    EnvironmentType,
    OpenEnvironment,
    load_object,
    open_environment,
)
from turnwise.rollout.error_log import ErrorLog
from turnwise.rollout.group import Group
from turnwise.rollout.loops import load_loop
from turnwise.rollout.problems import Problem
from turnwise.rollout.rewards import Rewards
from turnwise.rollout.tools import Toolbox
from turnwise.serving.chat_backend import ChatBackend
from turnwise.trajectory import Trajectory
from turnwise.trajectory.chat_template import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRun:
    """A group in progress: its problem, its engine and sampling parameters, and its counts."""

    engine: Generator
    problem: Problem
    sampling: SamplingConfig
    name: str
    """Unique name of the group; the names and seeds of its requests begin with it."""
    group: Group

    @classmethod
    def begin(
        cls, engine: Generator, problem: Problem, sampling: SamplingConfig, tag: str
    ) -> "GroupRun":
        """Begin an empty group; `tag` makes its name unique."""
        return cls(engine, problem, sampling, f"{tag}-{problem.id}", Group(problem.id))


class Runner:
    """Makes groups, with one environment type and one agent loop.

    Args:
        environment: None means the configured one.

    Raises:
        InputError: when the environment, the loop or a reward function cannot be loaded.

    Example:
        runner = Runner(config, tokenizer)
        problem = Problem("weather:1", {"city": "Oslo"})
        group = await runner.run_group(engine, problem, config.sampling, tag="demo")
        print([trajectory.reward for trajectory in group.trajectories], group.dropped)
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer, environment: EnvironmentType | None = None
    ) -> None:
        self._config = config
        self._environment = environment or _load_environment(config)
        self._environment_name = f"the environment {config.environment}"
        self.template = load_template(config, tokenizer)
        """Chat template of the model, with its tokenizer."""
        self._prompts = PromptCache(self.template)
        self._loop = load_loop(config.rollout.loop)
        self._loop_name = f"the loop {config.rollout.loop}"
        self._tokenizer = tokenizer
        self.rewards = Rewards(config.rollout.rewards)
        """The configured rewards; `models` is set when reward models are started."""
        self.server: SessionServer | None = None
        """Server for agents that speak HTTP; None if the loop needs none."""
        self.chats: ChatBackend | None = None
        """Backend of the user's chat scheduler; None if the loop needs none."""
        self._errors = ErrorLog(Path(config.output_dir, config.name, "errors.log"))
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    def with_environment(self, environment: EnvironmentType, loop: AgentLoop) -> "Runner":
        """Return a runner for another environment and loop that shares everything else.

        Both together run at most `rollout.concurrency` trajectories at a time.

        Example:
            chats = runner.with_environment(Conversation, SingleTurnLoop())
        """
        _ = self.tool_parser  # loaded here, not once in each
        other = copy(self)
        other._environment, other._loop = environment, loop
        other._environment_name = f"the environment {getattr(environment, '__name__', environment)}"
        other._loop_name = f"the loop {type(loop).__name__}"
        return other

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Parser of the model's tool calls; loaded on first use, because that takes seconds."""
        return ToolParser(self._config.rollout.tool_parser, self._tokenizer)

    def check(self, problems: Sequence[Problem]) -> None:
        """Build every problem's prompt once, before anything is sampled.

        Prompts longer than `data.max_prompt_tokens` are accepted (see `within_prompt_limit`).

        Raises:
            InputError: naming the row with unusable fields or tools, or with too long a prompt.
        """
        for problem in problems:
            self._is_within_limit(problem)

    def within_prompt_limit(self, problems: Sequence[Problem]) -> list[Problem]:
        """Check all problems; return those with a prompt of at most `data.max_prompt_tokens`.

        It renders every prompt, so call it from a thread.

        Raises:
            InputError: as `check` does, and when no problem is left.
        """
        kept = [problem for problem in problems if self._is_within_limit(problem)]
        if len(kept) < len(problems):
            too_long = (
                f"{len(problems) - len(kept)} of {len(problems)} rows have prompts of more than "
                f"{self._config.data.max_prompt_tokens} tokens (data.max_prompt_tokens)"
            )
            if not kept:
                raise InputError(f"{too_long}, and none is left")
            logger.warning("%s and are left out", too_long)
        return kept

    def _is_within_limit(self, problem: Problem) -> bool:
        opened, toolbox = call_and_wait(
            lambda: self._open(problem),
            name=self._environment_name,
            seconds=self._config.rollout.stall_timeout,
        )
        try:
            length = len(self._prompts.render(opened.problem, toolbox.schemas))
        except Exception as error:  # a template may raise anything
            raise InputError(
                f"{problem.id}: the chat template refuses the environment's problem: "
                f"{describe_error(error)}"
            ) from error
        limit, room = self._config.data.max_prompt_tokens, self._config.model.max_length
        if limit is not None and length > limit:
            return False
        if length >= room:
            raise InputError(
                f"{problem.id}: its prompt of {length} tokens does not fit the context of {room}; "
                "raise model.max_length, or leave such rows out with data.max_prompt_tokens"
            )
        return True

    async def run_group(
        self, engine: Generator, problem: Problem, sampling: SamplingConfig, tag: str
    ) -> Group:
        """Run `sampling.n` trajectories; `tag` makes request names and seeds unique."""
        run, started = GroupRun.begin(engine, problem, sampling, tag), time.perf_counter()
        async with task_group() as tasks:
            running = [tasks.create_task(self.run_one(run, index)) for index in range(sampling.n)]
        run.group.trajectories = [t for task in running if (t := task.result()) is not None]
        run.group.elapsed = time.perf_counter() - started
        return run.group

    async def run_one(self, run: GroupRun, index: int) -> Trajectory | None:
        """Run trajectory `index` of a group; return None, and count the reason, if it fails."""
        group, tries = run.group, 1 + self._config.rollout.retries
        async with self._slots:
            for number in range(1, tries + 1):
                trajectory = Trajectory(run.problem.id, index)
                name = f"{run.name}-{index}" + (f".{number}" if number > 1 else "")
                failure = await self._try(run, trajectory, name)
                if failure is None:
                    return trajectory
                reason, message = failure
                counts = group.dropped if number == tries else group.retried
                counts[reason] += 1
                group.dropped_tokens[reason] += trajectory.sampled_tokens
                group.causes.setdefault(reason, message)
        return None

    async def _try(
        self, run: GroupRun, trajectory: Trajectory, name: str
    ) -> tuple[str, str] | None:
        """Fill the trajectory; if that fails, return the reason and its message."""
        rollout = self._config.rollout
        clock, seconds = StallClock(rollout.stall_timeout), rollout.trajectory_timeout
        try:
            async with asyncio.timeout(seconds), clock.watching() as stall:
                await self._attempt(run, trajectory, name, clock)
                return None
        except TrajectoryError as error:
            failure = error.reason, str(error)
            if isinstance(error.__cause__, Exception):
                await self._errors.write(error.reason, name, error.__cause__)
        except DeadlineError as error:
            failure = "engine_timeout", str(error)
        except EngineError as error:
            failure = "engine_error", str(error)
        except TimeoutError:
            failure = "trajectory_timeout", f"not done after {seconds:g} s"
            if stall.expired():
                message = f"it made no progress for {clock.seconds:g} s (rollout.stall_timeout)"
                failure = "stalled", message
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failure = "cancelled", "something it waited for was cancelled"
        logger.info("%s failed (%s): %s", name, *failure)
        return failure

    async def _attempt(
        self, run: GroupRun, trajectory: Trajectory, name: str, clock: StallClock
    ) -> None:
        problem = run.problem
        try:
            with waiting(problem.id, "environment"):
                opened, toolbox = await call_user_code(
                    self._open, problem, name=self._environment_name
                )
        except TurnwiseError as error:
            raise TrajectoryError("environment_error", str(error)) from error.__cause__ or error
        context = RolloutContext(
            trajectory=trajectory,
            engine=run.engine,
            template=self.template,
            tool_parser=self.tool_parser,
            toolbox=toolbox,
            rollout=self._config.rollout,
            sampling=run.sampling,
            max_length=self._config.model.max_length,
            request_id=name,
            row=problem.row,
            problem=opened.problem,
            server=self.server,
            chats=self.chats,
            route=Route(session=name, group=run.name),
            seed=stable_seed(self._config.seed, name) if self._config.deterministic else None,
            errors=self._errors,
            seconds=run.group.seconds,
            prompts=self._prompts,
            clock=clock,
        )
        await self._play(opened.environment, context)
        with context.timed("reward"):
            await self.rewards.judge(opened.environment, trajectory, problem.row, clock)

    async def _play(self, environment: Environment, context: RolloutContext) -> None:
        """Run the loop, which may be user code."""
        try:
            await run_abandonable(lambda: self._loop.run(environment, context), self._loop_name)
        except (InputError, TrajectoryError, DeadlineError, EngineError):
            raise
        except Exception as error:
            raise TrajectoryError("loop_error", await describe_user_error(error)) from error

    def _open(self, problem: Problem) -> tuple[OpenEnvironment, Toolbox]:
        """Build the environment of a problem's row, and its tools; runs user code."""
        opened = open_environment(self._environment, problem.row, problem.id)
        rollout = self._config.rollout
        try:
            toolbox = Toolbox(
                opened.tools, timeout=rollout.tool_timeout, max_chars=rollout.tool_max_chars
            )
        except InputError as error:
            raise InputError(f"{problem.id}: {error}") from error
        return opened, toolbox


def _load_environment(config: Config) -> EnvironmentType:
    if config.environment is None:
        raise InputError("environment must be set: package.module:Class")
    environment: EnvironmentType = load_object(config.environment, "environment")
    return environment
