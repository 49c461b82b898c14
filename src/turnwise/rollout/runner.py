"""Runs groups: n coroutines for one problem, each a trajectory, none waiting for another.

Every trajectory that is started comes out exactly once: in its group, or counted under the
reason why not. Only what the user gave wrong (`InputError`) ends the run from here.
"""

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Generator, Route
from turnwise.errors import DeadlineError, EngineError, InputError, StepError, TrajectoryError
from turnwise.rollout.agent_loop import RolloutContext, stable_seed
from turnwise.rollout.environment import (
    Environment,
    EnvironmentType,
    Row,
    load_object,
    make_environment,
)
from turnwise.rollout.loops import load_loop
from turnwise.rollout.tools import Toolbox
from turnwise.serving.template import load_template
from turnwise.serving.tool_parser import ToolParser
from turnwise.tasks import run_in_thread, task_group
from turnwise.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One row under a name that tells where it came from."""

    id: str
    row: Row


@dataclass(slots=True)
class Group:
    """The trajectories of one problem that came through, and why others did not."""

    problem_id: str
    trajectories: list[Trajectory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """What the dropped ones had sampled, by the same reasons."""
    causes: dict[str, str] = field(default_factory=dict)
    """For each reason in `dropped`, what the first such failure said."""


class Runner:
    """Makes groups with one environment type and one agent loop.

    Raises:
        InputError: when the environment or the loop cannot be loaded.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config = config
        self._environment: EnvironmentType = load_object(config.environment, "environment")
        self._template = load_template(config, tokenizer)
        self._loop = load_loop(config.rollout.loop)
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Loaded at its first use, because it takes seconds."""
        return ToolParser(self._config.rollout.tool_parser, self._tokenizer)

    def check(self, problems: Sequence[Problem]) -> None:
        """Build every problem's prompt once, before anything is sampled.

        Raises:
            InputError: naming the row whose fields, tools or prompt length do not fit.
        """
        for problem in problems:
            environment = make_environment(self._environment, problem.row, problem.id)
            tools = self._toolbox(environment).schemas
            length = len(self._template.render(environment.problem, tools=tools))
            if length >= self._config.model.max_length:
                raise InputError(
                    f"{problem.id}: its prompt of {length} tokens does not fit the context of "
                    f"{self._config.model.max_length}; raise model.max_length or leave the row out"
                )

    async def run_group(
        self, engine: Generator, problem: Problem, sampling: SamplingConfig, tag: str
    ) -> Group:
        """Run `sampling.n` trajectories; `tag` makes request names and seeds unique."""
        group = Group(problem.id)
        async with task_group() as tasks:
            running = [
                tasks.create_task(self._run_one(engine, problem, index, sampling, tag, group))
                for index in range(sampling.n)
            ]
        group.trajectories = [t for task in running if (t := task.result()) is not None]
        return group

    async def _run_one(
        self,
        engine: Generator,
        problem: Problem,
        index: int,
        sampling: SamplingConfig,
        tag: str,
        group: Group,
    ) -> Trajectory | None:
        name = f"{tag}-{problem.id}-{index}"
        trajectory = Trajectory(problem.id, index)
        async with self._slots:
            try:
                async with asyncio.timeout(self._config.rollout.trajectory_timeout):
                    await self._attempt(engine, problem, trajectory, sampling, name)
                    return trajectory
            except TrajectoryError as error:
                reason, message = error.reason, str(error)
            except DeadlineError as error:
                reason, message = "engine_timeout", str(error)
            except EngineError as error:
                reason, message = "engine_error", str(error)
            except TimeoutError:
                seconds = self._config.rollout.trajectory_timeout
                reason, message = "trajectory_timeout", f"not done after {seconds:g} s"
        logger.info("dropped %s (%s): %s", name, reason, message)
        group.dropped[reason] += 1
        group.dropped_tokens[reason] += trajectory.sampled_tokens
        group.causes.setdefault(reason, message)
        return None

    async def _attempt(
        self,
        engine: Generator,
        problem: Problem,
        trajectory: Trajectory,
        sampling: SamplingConfig,
        name: str,
    ) -> None:
        with _counted_as("environment_error"):
            environment = make_environment(self._environment, problem.row, problem.id)
        context = RolloutContext(
            trajectory=trajectory,
            engine=engine,
            template=self._template,
            tool_parser=self.tool_parser,
            toolbox=self._toolbox(environment),
            rollout=self._config.rollout,
            sampling=sampling,
            max_length=self._config.model.max_length,
            request_id=name,
            route=Route(session=name, group=name.rpartition("-")[0]),
            seed=stable_seed(self._config.seed, name) if self._config.deterministic else None,
        )
        with _counted_as("loop_error"):
            await self._loop.run(environment, context)
        with _counted_as("reward_error"):
            if inspect.iscoroutinefunction(environment.reward):
                reward = await environment.reward(trajectory)
            else:
                reward = await run_in_thread(lambda: environment.reward(trajectory))
            trajectory.reward = float(reward)

    def _toolbox(self, environment: Environment) -> Toolbox:
        rollout = self._config.rollout
        return Toolbox(
            environment.tools, timeout=rollout.tool_timeout, max_chars=rollout.tool_max_chars
        )


def check_failures(groups: Sequence[Group], max_failed_fraction: float, what: str) -> Counter[str]:
    """Count the dropped trajectories by reason.

    Raises:
        StepError: when more than the allowed fraction were dropped.
    """
    dropped = sum((group.dropped for group in groups), Counter[str]())
    total = dropped.total() + sum(len(group.trajectories) for group in groups)
    if dropped.total() > max_failed_fraction * total:
        causes = {reason: text for group in groups for reason, text in group.causes.items()}
        reasons = "; ".join(f"{count} {r}: {causes[r]}" for r, count in dropped.most_common())
        raise StepError(f"{what}: {dropped.total()} of {total} trajectories failed ({reasons})")
    return dropped


@contextmanager
def _counted_as(reason: str) -> Iterator[None]:
    """Give what a plug-in raises a reason; what already has one passes through."""
    try:
        yield
    except (InputError, TrajectoryError, DeadlineError, EngineError, TimeoutError):
        raise
    except Exception as error:
        logger.debug("%s", reason, exc_info=True)
        raise TrajectoryError(reason, f"{type(error).__name__}: {error}") from error
