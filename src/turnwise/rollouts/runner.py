"""The runner: makes groups of n trajectories for one problem, each an independent coroutine.

Every trajectory that starts ends exactly once: in its group or, after `rollout.retries` further
attempts, counted there under the reason of its last failure. Only an `InputError`, a mistake in the
user's input, ends the run from here; a lack of descriptors, threads or memory fails trajectories.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import load_template
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import is_cancelled, run_in_thread, task_group
from turnwise.core.deadlines import StallClock, trajectory_limits
from turnwise.core.optional import Foreign
from turnwise.core.spans import agent_span
from turnwise.core.user_code import describe_user_error, run_abandonable
from turnwise.engine.protocol import Generator, Route, TurnTimes
from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError, TurnwiseError
from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext, stable_seed
from turnwise.rollouts.agents import HttpAgentLoop
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.episode import Episode, playing
from turnwise.rollouts.group import TOO_LONG, Group
from turnwise.rollouts.loops import load_loop
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.rewards import RewardManager
from turnwise.rollouts.run_files import RunFiles
from turnwise.rollouts.stage import Stage
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.trajectory import Trajectory
from turnwise.trajectory.chat_template import Tokenizer

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    engine: Generator
    problem: Problem
    sampling: SamplingConfig
    name: str  # unique name of the group; the names and seeds of its requests begin with it
    stage: Stage
    group: Group
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Episodes of finished trajectories by their position, until the whole group is rewarded."""


def reward_functions_of(environment: EnvironmentType | None) -> Mapping[str, Foreign]:
    """Return the reward functions of a program by path, which come with its environment type."""
    # A class of the user may have an attribute of this name.
    return {} if isinstance(environment, type) else getattr(environment, "reward_functions", {})


class Runner:
    """Makes groups; each environment (None: the configured ones) has its own tools and agent loop.

    The `reward_functions` of an environment type are those of a program, by their paths in
    `rollout.rewards`. Without `files` it writes those of the run's folder.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        environment: EnvironmentType | None = None,
        files: RunFiles | None = None,
    ) -> None:
        self._config = config
        if functions := reward_functions_of(environment):
            # An environment's own process gets none: they need not be picklable.
            played: Foreign = copy(environment)
            played.reward_functions = {}
            environment = played
        self.template = load_template(config, tokenizer)
        self._prompts = PromptCache(self.template)
        self._stages: dict[str, Stage] = {}  # by the environment's name; a single one has ""
        left_out: dict[str, str] = {}
        loops: dict[str, AgentLoop] = {}  # shared, and with them the workers of agents
        for name, part in (config.parts() if environment is None else {"": config}).items():
            loop = part.rollout.loop
            try:
                loops[loop] = loops.get(loop) or load_loop(loop)
                self._stages[name] = Stage(
                    part, environment, loops[loop], self.template, self._prompts, left_out
                )
            except InputError as error:
                if not name:
                    raise
                raise InputError(f"environments.{name}: {error}") from error
        self._tokenizer = tokenizer
        self.files = files or RunFiles(Path(config.output_dir, config.name))
        max_steps = config.training.steps * config.training.updates_per_step
        self.rewards = RewardManager(
            config.rollout.rewards,
            functions,
            rollout=config.rollout,
            max_steps=max_steps,
            files=self.files,
        )
        self.server: OpenAIServer | None = None  # for agents that speak HTTP
        self.chats: ChatBackend | None = None  # of the user's chat scheduler
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._loading = asyncio.Lock()

    def with_environment(self, environment: EnvironmentType, loop: AgentLoop) -> "Runner":
        """Return a runner for another environment and loop that shares all, slots included, but
        `rollout.tools`; its prompts are not measured."""
        _ = self.tool_parser  # loaded here, not once in each
        other = copy(self)
        other._stages = {"": Stage(self._config, environment, loop, self.template, None, {})}
        return other

    def _stage(self, problem: Problem) -> Stage:
        stage = self._stages.get(problem.environment)
        if stage is None:  # as problems of programs have none in a run with several environments
            raise InputError(
                f"{problem.id} has no environment: environments has {', '.join(self._stages)}, and "
                "only train, eval and rollout choose among several; set environment for one"
            )
        return stage

    async def close(self) -> None:
        """End what the loop keeps running between trajectories, such as an agent's worker."""
        for stage in self._stages.values():
            if isinstance(stage.loop, HttpAgentLoop):
                await stage.loop.close()

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Parser of the model's tool calls; loaded on first use, because that takes seconds."""
        return ToolParser(self._config.rollout.tool_parser, self._tokenizer)

    def check(self, problem: Problem) -> int | None:
        """Find mistakes in a problem before anything is sampled; see `Stage.check`."""
        return self._stage(problem).check(problem)

    def within_prompt_limit(self, problems: Sequence[Problem]) -> list[Problem]:
        """Check all problems; return those with a prompt of at most `data.max_prompt_tokens`."""
        longest = self._config.data.max_prompt_tokens
        lengths = [self.check(problem) or 0 for problem in problems]  # 0: not known yet
        if longest is None:
            return [*problems]
        kept = [one for one, length in zip(problems, lengths, strict=True) if length <= longest]
        if len(kept) < len(problems):
            number = f"{len(problems) - len(kept)} of {len(problems)} rows"
            most = f"{longest} tokens (data.max_prompt_tokens)"
            too_long = f"{number} have prompts of more than {most}"
            if not kept:
                raise InputError(f"{too_long}, and none is left")
            logger.warning("%s and are left out", too_long)
        return kept

    async def run_group(
        self,
        engine: Generator,
        problem: Problem,
        sampling: SamplingConfig,
        tag: str,
        *,
        into: Group | None = None,
        on_trajectory: Callable[[Trajectory], None] = lambda _: None,
    ) -> Group:
        """Run `sampling.n` trajectories, whose requests have names and seeds that begin with `tag`.

        `on_trajectory` gets each that is finished, as soon as its reward is known.
        """
        group = Group.of(problem) if into is None else into
        stage, name = self._stage(problem), f"{tag}-{problem.id}"
        run = _Run(engine, problem, sampling, name, stage, group)
        async with self._loading:
            if "tool_parser" not in vars(self):  # which would block the event loop
                with suppress(OSError):  # no thread at this moment: a trajectory loads it
                    await run_in_thread(lambda: self.tool_parser)
        started = time.perf_counter()
        compares = self.rewards.compares
        if too_long := await stage.known_too_long(problem):
            group.causes[TOO_LONG] = too_long
        else:
            async with task_group() as tasks:
                for index in range(sampling.n):
                    finished = self._fill(run, index, None if compares else on_trajectory)
                    tasks.create_task(finished)
        group.trajectories.sort(key=lambda trajectory: trajectory.sample_index)
        if compares:
            try:
                await self.rewards.judge_group(group.trajectories, problem.row, run.episodes)
            except TrajectoryError as error:
                group.drop(group.trajectories, error.reason, str(error))
                if isinstance(error.__cause__, Exception):
                    await self.files.log_error(error.reason, name, error.__cause__)
            lacking = [t for t in group.trajectories if self.rewards.lacks(t)]
            group.drop(lacking, "no_reward", f"every reward of {problem.id} is None")
            for trajectory in group.trajectories:
                on_trajectory(trajectory)
        for episode in run.episodes.values():
            episode.release()
        group.elapsed = time.perf_counter() - started
        return group

    async def _fill(
        self, run: _Run, index: int, on_trajectory: Callable[[Trajectory], None] | None
    ) -> None:
        """Add trajectory `index` to its group; if it fails, count the reason."""
        group, tries = run.group, 1 + self._config.rollout.retries
        async with self._slots:
            for number in range(1, tries + 1):
                if group.left_out:  # found by another of its trajectories
                    return
                trajectory = Trajectory(run.problem.id, index, environment=run.problem.environment)
                name = f"{run.name}-{index}" + (f".{number}" if number > 1 else "")
                if (failure := await self._try(run, trajectory, name)) is None:
                    group.trajectories.append(trajectory)
                    if on_trajectory is not None:
                        on_trajectory(trajectory)
                    return
                reason, message = failure
                if reason == TOO_LONG:
                    group.causes[TOO_LONG] = message
                    return
                counts = group.dropped if number == tries else group.retried
                counts[reason] += 1
                group.dropped_tokens[reason] += trajectory.sampled_tokens
                group.causes.setdefault(reason, message)

    async def _try(self, run: _Run, trajectory: Trajectory, name: str) -> tuple[str, str] | None:
        """Fill the trajectory; if that fails, return the reason and its message."""
        rollout = run.stage.rollout
        limits = trajectory_limits(rollout.trajectory_timeout, rollout.stall_timeout)
        try:
            async with limits as clock:
                with agent_span(rollout.loop, name, trajectory.problem_id) as set_attribute:
                    await self._attempt(run, trajectory, name, clock)
                    lost = sum(not turn.experts for turn in trajectory.turns)
                    if lost and self._config.engine.routing_replay:
                        trajectory.events["experts_missing"] += lost
                    set_attribute("turnwise.status", trajectory.status)
                    set_attribute("turnwise.reward", trajectory.reward or 0.0)
                return None
        except TrajectoryError as error:
            failure = error.reason, str(error)
            if isinstance(error.__cause__, Exception):
                await self.files.log_error(error.reason, name, error.__cause__)
        except DeadlineError as error:
            failure = "engine_timeout", str(error)
        except EngineError as error:
            failure = "engine_error", str(error)
        except (OSError, MemoryError) as error:  # too few threads, descriptors, pages for a moment
            failure = "system_error", str(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failure = "cancelled", "something it waited for was cancelled"
        except TurnwiseError:
            raise
        except Exception as error:
            failure = "unexpected_error", await describe_user_error(error)
            await self.files.log_error(failure[0], name, error)
        logger.info("%s failed (%s): %s", name, *failure)
        return failure

    async def _attempt(
        self, run: _Run, trajectory: Trajectory, name: str, clock: StallClock
    ) -> None:
        problem, stage = run.problem, run.stage

        async def report(reason: str, error: Exception) -> None:
            trajectory.events[reason] += 1
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            await self.files.log_error(reason, name, cause)

        async with playing(stage.episode(problem), clock, report) as episode:
            calls: list[TurnTimes] = []
            run.group.calls[trajectory.sample_index] = calls
            context = RolloutContext(
                trajectory=trajectory,
                calls=calls,
                engine=run.engine,
                template=self.template,
                tool_parser=self.tool_parser,
                rollout=stage.rollout,
                sampling=run.sampling,
                max_length=self._config.model.max_length,
                request_id=name,
                row=problem.row,
                episode=episode,
                server=self.server,
                chats=self.chats,
                route=Route(session=name, group=run.name),
                seed=stable_seed(self._config.seed, name) if self._config.deterministic else None,
                files=self.files,
                seconds=run.group.seconds,
                prompts=self._prompts,
                clock=clock,
            )
            await stage.admit(problem, episode)
            loop = stage.loop
            try:
                await run_abandonable(  # it may be user code
                    lambda: loop.run(episode.environment, context),
                    name=f"the loop {stage.rollout.loop}",
                    seconds=self._config.rollout.trajectory_timeout,
                    key="rollout.trajectory_timeout",
                )
            except (InputError, TrajectoryError, DeadlineError, EngineError):
                raise
            except Exception as error:
                raise TrajectoryError("loop_error", await describe_user_error(error)) from error
            with context.timed("reward"):
                await self.rewards.judge(episode, trajectory, problem.row, clock)
            run.episodes[trajectory.sample_index] = episode
            if episode.measures:
                try:
                    with context.timed("environment"):
                        trajectory.metrics |= await episode.metrics(trajectory)
                except TrajectoryError as error:  # worth no trajectory
                    await report("metrics_error", error)
