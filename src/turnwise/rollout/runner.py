"""Runs groups: n coroutines for one problem, each a trajectory, none waiting for another.

Every trajectory that is started comes out exactly once: in its group, or counted under the
reason why not, after `rollout.retries` more tries. Only what the user gave wrong (`InputError`)
ends the run from here.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.config import Config, SamplingConfig
from turnwise.deadlines import StallClock
from turnwise.engine.protocol import Generator, Route
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    describe_error,
)
from turnwise.rollout.agent_loop import RolloutContext, SessionServer, stable_seed
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
from turnwise.rollout.prompts import Prompts
from turnwise.rollout.rewards import Rewards
from turnwise.rollout.tools import Toolbox
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.serving.template import load_template
from turnwise.serving.tool_parser import ToolParser
from turnwise.tasks import (
    call_and_wait,
    call_user_code,
    describe_user_error,
    is_cancelled,
    run_abandonable,
    task_group,
)
from turnwise.trajectory import Trajectory
from turnwise.watchdog import waiting

logger = logging.getLogger(__name__)


class Runner:
    """Makes groups with one environment type, by default the configuration's, and one agent loop.

    Raises:
        InputError: when the environment, the loop or a reward function cannot be loaded.
    """

    def __init__(
        self, config: Config, tokenizer: Any, environment: EnvironmentType | None = None
    ) -> None:
        self._config = config
        self._environment = environment or load_object(config.environment, "environment")
        self._environment_name = f"the environment {config.environment}"
        self.template = load_template(config, tokenizer)
        """The model's chat template; its `tokenizer` is the model's."""
        self._prompts = Prompts(self.template)
        self._loop = load_loop(config.rollout.loop)
        self._tokenizer = tokenizer
        self.rewards = Rewards(config.rollout.rewards)
        """Its `models` are set by whoever starts them."""
        self.server: SessionServer | None = None
        """Where agents of their own are served; set by whoever runs one."""
        self.chats: ChatBackend | None = None
        """What answers a chat scheduler; set by whoever starts it."""
        self._errors = ErrorLog(Path(config.output_dir, config.name, "errors.log"))
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Loaded at its first use, because it takes seconds."""
        return ToolParser(self._config.rollout.tool_parser, self._tokenizer)

    def check(self, problems: Sequence[Problem]) -> None:
        """Build every problem's prompt once, before anything is sampled.

        Prompts that are longer than `data.max_prompt_tokens` pass: `fitting` leaves them out.

        Raises:
            InputError: naming the row whose fields, tools or prompt length do not fit.
        """
        for problem in problems:
            self._fits(problem)

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """Check all problems; returns those whose prompt is within `data.max_prompt_tokens`.

        It takes about as long as rendering every prompt: call it from a thread.

        Raises:
            InputError: as `check` does, and when no problem is left.
        """
        kept = [problem for problem in problems if self._fits(problem)]
        if len(kept) < len(problems):
            left_out = (
                f"{len(problems) - len(kept)} of {len(problems)} rows have prompts of more than "
                f"{self._config.data.max_prompt_tokens} tokens (data.max_prompt_tokens)"
            )
            if not kept:
                raise InputError(f"{left_out}, and none is left")
            logger.warning("%s and are left out", left_out)
        return kept

    def _fits(self, problem: Problem) -> bool:
        """Whether its prompt is within `data.max_prompt_tokens`."""
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
        group, started = Group(problem.id), time.perf_counter()
        async with task_group() as tasks:
            running = [
                tasks.create_task(self.run_one(engine, problem, index, sampling, tag, group))
                for index in range(sampling.n)
            ]
        group.trajectories = [t for task in running if (t := task.result()) is not None]
        group.elapsed = time.perf_counter() - started
        return group

    async def run_one(
        self,
        engine: Generator,
        problem: Problem,
        index: int,
        sampling: SamplingConfig,
        tag: str,
        group: Group,
    ) -> Trajectory | None:
        """Run trajectory `index` of a problem; None, and counted in `group`, where it fails."""
        name, tries = f"{tag}-{problem.id}-{index}", 1 + self._config.rollout.retries
        async with self._slots:
            for number in range(1, tries + 1):
                trajectory = Trajectory(problem.id, index)
                own = name if number == 1 else f"{name}.{number}"
                failure = await self._try(engine, problem, trajectory, sampling, own, group)
                if failure is None:
                    return trajectory
                reason, message = failure
                outcome = group.dropped if number == tries else group.retried
                outcome[reason] += 1
                group.dropped_tokens[reason] += trajectory.sampled_tokens
                group.causes.setdefault(reason, message)
        return None

    async def _try(
        self,
        engine: Generator,
        problem: Problem,
        trajectory: Trajectory,
        sampling: SamplingConfig,
        name: str,
        group: Group,
    ) -> tuple[str, str] | None:
        """Fill the trajectory; where that fails, returns the reason and what was said."""
        rollout = self._config.rollout
        clock, seconds = StallClock(rollout.stall_timeout), rollout.trajectory_timeout
        try:
            async with asyncio.timeout(seconds), clock.watching() as stall:
                await self._attempt(engine, problem, trajectory, sampling, name, group, clock)
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
                why = f"nothing of it moved for {clock.seconds:g} s (rollout.stall_timeout)"
                failure = "stalled", why
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failure = "cancelled", "something that it waited for was cancelled"
        logger.info("%s failed (%s): %s", name, *failure)
        return failure

    async def _attempt(
        self,
        engine: Generator,
        problem: Problem,
        trajectory: Trajectory,
        sampling: SamplingConfig,
        name: str,
        group: Group,
        clock: StallClock,
    ) -> None:
        try:
            with waiting(problem.id, "environment"):
                opened, toolbox = await call_user_code(
                    self._open, problem, name=self._environment_name
                )
        except TurnwiseError as error:
            raise TrajectoryError("environment_error", str(error)) from error.__cause__ or error
        context = RolloutContext(
            trajectory=trajectory,
            engine=engine,
            template=self.template,
            tool_parser=self.tool_parser,
            toolbox=toolbox,
            rollout=self._config.rollout,
            sampling=sampling,
            max_length=self._config.model.max_length,
            request_id=name,
            row=problem.row,
            problem=opened.problem,
            server=self.server,
            chats=self.chats,
            route=Route(session=name, group=name.rpartition("-")[0]),
            seed=stable_seed(self._config.seed, name) if self._config.deterministic else None,
            errors=self._errors,
            seconds=group.seconds,
            prompts=self._prompts,
            clock=clock,
        )
        await self._play(opened.environment, context)
        with context.timed("reward"):
            await self.rewards.judge(opened.environment, trajectory, problem.row, clock)

    async def _play(self, environment: Environment, context: RolloutContext) -> None:
        """Run the loop, which may be the user's."""
        name = f"the loop {self._config.rollout.loop}"
        try:
            await run_abandonable(lambda: self._loop.run(environment, context), name)
        except (InputError, TrajectoryError, DeadlineError, EngineError):
            raise
        except Exception as error:
            raise TrajectoryError("loop_error", await describe_user_error(error)) from error

    def _open(self, problem: Problem) -> tuple[OpenEnvironment, Toolbox]:
        """The environment of a row, and its tools; user code."""
        opened = open_environment(self._environment, problem.row, problem.id)
        rollout = self._config.rollout
        try:
            toolbox = Toolbox(
                opened.tools, timeout=rollout.tool_timeout, max_chars=rollout.tool_max_chars
            )
        except InputError as error:
            raise InputError(f"{problem.id}: {error}") from error
        return opened, toolbox
