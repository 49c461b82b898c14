"""The runner: makes groups of n trajectories for one problem, each an independent coroutine.

Every trajectory that starts ends exactly once: in its group or, after `rollout.retries` further
attempts, counted there under the reason of its last failure. Only an `InputError`, a mistake in the
user's input, ends the run from here; a lack of descriptors, threads or memory fails trajectories.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path

from turnwise.chat.prompts import PromptCache
from turnwise.chat.template import in_thread_if_long, load_template
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import is_cancelled, run_in_thread, task_group
from turnwise.core.deadlines import StallClock, trajectory_limits
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import agent_span
from turnwise.core.user_code import (
    call_and_wait,
    call_user_code,
    describe_user_error,
    run_abandonable,
)
from turnwise.engine.protocol import Generator, Route, TurnTimes
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
)
from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext, SessionServer, stable_seed
from turnwise.rollouts.configured_tools import load_tools
from turnwise.rollouts.environment import (
    Environment,
    EnvironmentType,
    configured_environment,
    name_of,
    type_of,
)
from turnwise.rollouts.episode import Episode, LocalEpisode, playing
from turnwise.rollouts.group import TOO_LONG, Group, GroupRun
from turnwise.rollouts.loops import load_loop, loop_name
from turnwise.rollouts.loops.agent import HttpAgentLoop
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.prompt_limit import PromptLimit, ShownPrompt
from turnwise.rollouts.reading import own_method
from turnwise.rollouts.remote_episode import EnvironmentProcesses, RemoteEpisode
from turnwise.rollouts.rewards import RewardManager
from turnwise.rollouts.run_files import ErrorLog, RunFiles
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.trajectory import ChatTemplate, Message, Trajectory
from turnwise.trajectory.chat_template import Tokenizer

logger = logging.getLogger(__name__)


class Stage:
    """An environment with all that its episodes share: its tools, processes and loop.

    Args:
        config: The configuration as it holds for this environment.
        environment: None means the configured one.
        tools: Whether episodes have the tools of `rollout.tools`.

    Raises:
        InputError: when the environment or a tool cannot be loaded.
    """

    def __init__(
        self,
        config: Config,
        environment: EnvironmentType | None,
        loop: AgentLoop,
        template: ChatTemplate,
        *,
        tools: bool = True,
    ) -> None:
        self.rollout = config.rollout
        self.loop = loop
        self.shown = ShownPrompt(config, template)
        given = config.environment if environment is None else name_of(environment)
        self.name = f"the environment {given}"
        """The environment in messages."""
        self._environment = environment or configured_environment(config)
        self._tools = load_tools(config.rollout.tools) if tools else []
        self._processes: EnvironmentProcesses | None = None
        if config.rollout.environment_process:
            self._processes = EnvironmentProcesses(self._environment, config.rollout)
        self.knows_prompts = own_method(type_of(self._environment), "prompt") is not None
        """Whether the environment's class has a `prompt`."""

    def episode(self, problem: Problem) -> Episode:
        """Return an episode of a problem, not yet open."""
        if self._processes is not None:
            return RemoteEpisode(self._processes, problem, self.rollout, self._tools)
        return LocalEpisode(self._environment, problem, self.rollout, self._tools)


def _stages(
    config: Config, environment: EnvironmentType | None, template: ChatTemplate
) -> dict[str, Stage]:
    """Return the stages by name: those configured, or that of one environment, named ""."""
    parts = config.parts() if environment is None else {"": config}
    loops: dict[str, AgentLoop] = {}  # shared, and with them the workers of agents
    stages = {}
    for name, part in parts.items():
        loop = part.rollout.loop
        try:
            loops[loop] = loops.get(loop) or load_loop(loop)
            stages[name] = Stage(part, environment, loops[loop], template)
        except InputError as error:
            if not name:
                raise
            raise InputError(f"environments.{name}: {error}") from error
    return stages


class Runner:
    """Makes groups; each environment has its own tools and agent loop.

    Args:
        environment: None means the configured ones. Its `reward_functions`, if it has any, are
            those of a program, by their paths in `rollout.rewards`.
        files: None means those of the run's folder.

    Raises:
        InputError: when the environment, the loop, a tool or a reward function cannot be loaded.

    Example:
        runner = Runner(config, tokenizer)
        problem = Problem("weather:1", {"city": "Oslo"})
        group = await runner.run_group(engine, problem, config.sampling, tag="demo")
        print([trajectory.reward for trajectory in group.trajectories], group.dropped)
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        environment: EnvironmentType | None = None,
        files: RunFiles | None = None,
    ) -> None:
        self._config = config
        self.template = load_template(config, tokenizer)
        """Chat template of the model, with its tokenizer."""
        self._stages = _stages(config, environment, self.template)
        """Stages by the environment's name; a single one has the name ""."""
        self._prompts = PromptCache(self.template)
        self._limit: PromptLimit | None = PromptLimit(config, self._prompts)
        self._tokenizer = tokenizer
        self.files = files or RunFiles(Path(config.output_dir, config.name))
        """Files of the run folder that rollouts append to."""
        max_steps = config.training.steps * config.training.updates_per_step
        self.rewards = RewardManager(
            config.rollout.rewards,
            getattr(environment, "reward_functions", {}),
            rollout=config.rollout,
            max_steps=max_steps,
            files=self.files,
        )
        """The configured rewards; `models` is set when reward models are started."""
        self.server: SessionServer | None = None
        """Server for agents that speak HTTP; None if the loop needs none."""
        self.chats: ChatBackend | None = None
        """Backend of the user's chat scheduler; None if the loop needs none."""
        self._errors = ErrorLog(self.files)
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self._loading = asyncio.Lock()

    def with_environment(self, environment: EnvironmentType, loop: AgentLoop) -> "Runner":
        """Return a runner for another environment and loop that shares all but `rollout.tools`.

        Both together run at most `rollout.concurrency` trajectories at a time. Prompts of the other
        one are not measured.

        Example:
            chats = runner.with_environment(Conversation, SingleTurnLoop())
        """
        _ = self.tool_parser  # loaded here, not once in each
        other = copy(self)
        other._stages = {"": Stage(self._config, environment, loop, self.template, tools=False)}
        other._limit = None
        return other

    def _stage(self, problem: Problem) -> Stage:
        """Return the stage of a problem's environment.

        Raises:
            InputError: when the problem belongs to none, as those of programs do in a run with
                several environments.
        """
        stage = self._stages.get(problem.environment)
        if stage is None:
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
        """Build a problem's environment and prompt, to find mistakes before anything is sampled.

        Call this from a thread.

        Returns:
            Tokens of the prompt; None if they are not known: the environment has a `setup`, which
            is not called, or an agent writes the prompts of a model without a chat template.

        Raises:
            InputError: naming the row with unusable fields or tools, or too long a prompt; or, for
                the first row, what the chat template leaves out of its prompt.
        """
        limit, stage = self._limit, self._stage(problem)
        assert limit is not None

        def measure() -> int | None:
            episode = stage.episode(problem)
            if not episode.preview():
                return None
            messages, schemas = episode.problem, episode.toolbox.schemas
            stage.shown.check(problem.id, messages, schemas)
            if not stage.shown.measures:
                return None
            return limit.length(problem.id, messages, stage.shown.offered(schemas))

        length = call_and_wait(
            measure, name=stage.name, seconds=self._config.rollout.environment_timeout
        )
        if length is not None:
            limit.check(problem.id, length)
        return length

    def within_prompt_limit(self, problems: Sequence[Problem]) -> list[Problem]:
        """Check all problems; return those with a prompt of at most `data.max_prompt_tokens`.

        Raises:
            InputError: as `check` does, and when no problem is left.
        """
        assert self._limit is not None
        return self._limit.admitted(problems, [self.check(problem) for problem in problems])

    async def run_group(
        self, engine: Generator, problem: Problem, sampling: SamplingConfig, tag: str
    ) -> Group:
        """Run `sampling.n` trajectories; `tag` makes request names and seeds unique."""
        return await self.complete(GroupRun.begin(engine, problem, sampling, tag))

    async def complete(
        self, run: GroupRun, on_trajectory: Callable[[Trajectory], None] = lambda _: None
    ) -> Group:
        """Run all trajectories of a group.

        Args:
            on_trajectory: Called with each finished trajectory, as soon as its reward is known.
        """
        async with self._loading:
            if "tool_parser" not in vars(self):  # which would block the event loop
                with suppress(OSError):  # no thread at this moment: a trajectory loads it
                    await run_in_thread(lambda: self.tool_parser)
        group, started = run.group, time.perf_counter()
        compares = self.rewards.compares

        async def one(index: int) -> None:
            trajectory = await self._run_one(run, index)
            if trajectory is not None:
                group.trajectories.append(trajectory)
                if not compares:
                    on_trajectory(trajectory)

        if too_long := await self._known_too_long(run.problem):
            group.leave_out(too_long)
        else:
            async with task_group() as tasks:
                for index in range(run.sampling.n):
                    tasks.create_task(one(index))
        group.trajectories.sort(key=lambda trajectory: trajectory.sample_index)
        if compares:
            await self._compare(run)
            for trajectory in group.trajectories:
                on_trajectory(trajectory)
        for episode in run.episodes.values():
            episode.release()
        group.elapsed = time.perf_counter() - started
        return group

    async def _compare(self, run: GroupRun) -> None:
        """Add the rewards that compare a group's trajectories; if one fails, all are dropped."""
        group = run.group
        try:
            await self.rewards.judge_group(group.trajectories, run.problem.row, run.episodes)
        except TrajectoryError as error:
            group.drop(group.trajectories, error.reason, str(error))
            if isinstance(error.__cause__, Exception):
                await self._errors.write(error.reason, run.name, error.__cause__)
        lacking = [t for t in group.trajectories if self.rewards.lacks(t)]
        group.drop(lacking, "no_reward", f"every reward of {run.problem.id} is None")

    async def _run_one(self, run: GroupRun, index: int) -> Trajectory | None:
        """Run trajectory `index` of a group; return None, and count the reason, if it fails."""
        group, tries = run.group, 1 + self._config.rollout.retries
        async with self._slots:
            for number in range(1, tries + 1):
                if group.left_out:  # found by another of its trajectories
                    return None
                trajectory = Trajectory(run.problem.id, index, environment=run.problem.environment)
                name = f"{run.name}-{index}" + (f".{number}" if number > 1 else "")
                failure = await self._try(run, trajectory, name)
                if failure is None:
                    return trajectory
                reason, message = failure
                if reason == TOO_LONG:
                    group.leave_out(message)
                    return None
                counts = group.dropped if number == tries else group.retried
                counts[reason] += 1
                group.dropped_tokens[reason] += trajectory.sampled_tokens
                group.causes.setdefault(reason, message)
        return None

    async def _known_too_long(self, problem: Problem) -> str:
        """Return why a problem is left out before its environment is built; "" if it is not."""
        limit, stage = self._limit, self._stage(problem)
        if limit is None or not (stage.knows_prompts and stage.shown.measures):
            return "" if limit is None else limit.left_out.get(problem.id, "")

        def measure() -> int | None:
            messages = stage.episode(problem).prompt()
            return None if messages is None else limit.length(problem.id, messages, [])

        try:
            length = await call_user_code(
                measure,
                name=stage.name,
                seconds=self._config.rollout.environment_timeout,
            )
            if length is not None:
                limit.admit(problem.id, length)
        except TrajectoryError as error:
            return str(error)
        except Exception:
            return ""  # its trajectories fail too, and are counted
        return ""

    async def _try(
        self, run: GroupRun, trajectory: Trajectory, name: str
    ) -> tuple[str, str] | None:
        """Fill the trajectory; if that fails, return the reason and its message."""
        rollout = self._stage(run.problem).rollout
        limits = trajectory_limits(rollout.trajectory_timeout, rollout.stall_timeout)
        try:
            async with limits as clock:
                with agent_span(rollout.loop, name, trajectory.problem_id) as span:
                    await self._attempt(run, trajectory, name, clock)
                    if self._config.engine.routing_replay:
                        lost = sum(not turn.experts for turn in trajectory.turns)
                        if lost:
                            trajectory.events["experts_missing"] += lost
                    span.set_attribute("turnwise.status", trajectory.status)
                    span.set_attribute("turnwise.reward", trajectory.reward or 0.0)
                return None
        except TrajectoryError as error:
            failure = error.reason, str(error)
            if isinstance(error.__cause__, Exception):
                await self._errors.write(error.reason, name, error.__cause__)
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
            await self._errors.write(failure[0], name, error)
        logger.info("%s failed (%s): %s", name, *failure)
        return failure

    async def _attempt(
        self, run: GroupRun, trajectory: Trajectory, name: str, clock: StallClock
    ) -> None:
        problem, stage = run.problem, self._stage(run.problem)

        async def report(reason: str, error: Exception) -> None:
            trajectory.events[reason] += 1
            cause = error.__cause__
            await self._errors.write(reason, name, cause if isinstance(cause, Exception) else error)

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
                errors=self._errors,
                seconds=run.group.seconds,
                prompts=self._prompts,
                clock=clock,
            )
            if self._limit is not None and stage.shown.measures:
                schemas = stage.shown.offered(episode.toolbox.schemas)
                await self._admit(self._limit, problem, episode.problem, schemas)
            await self._play(stage.loop, episode.environment, context)
            with context.timed("reward"):
                await self.rewards.judge(episode, trajectory, problem.row, clock)
            run.episodes[trajectory.sample_index] = episode
            if episode.measures:
                try:
                    with context.timed("environment"):
                        trajectory.metrics |= await episode.metrics(trajectory)
                except TrajectoryError as error:  # worth no trajectory
                    await report("metrics_error", error)

    async def _admit(
        self,
        limit: PromptLimit,
        problem: Problem,
        messages: Sequence[Message],
        schemas: Sequence[JsonObject],
    ) -> None:
        """Leave out a problem whose prompt is too long."""
        try:
            length = await in_thread_if_long(
                messages, lambda: limit.length(problem.id, messages, schemas)
            )
        except InputError as error:
            if self.template.missing:
                raise
            raise TrajectoryError("template_refuses", str(error)) from error
        limit.admit(problem.id, length)

    async def _play(
        self, loop: AgentLoop, environment: Environment, context: RolloutContext
    ) -> None:
        """Run the loop, which may be user code."""
        try:
            await run_abandonable(
                lambda: loop.run(environment, context),
                name=f"the loop {loop_name(loop)}",
                seconds=self._config.rollout.trajectory_timeout,
                key="rollout.trajectory_timeout",
            )
        except (InputError, TrajectoryError, DeadlineError, EngineError):
            raise
        except Exception as error:
            raise TrajectoryError("loop_error", await describe_user_error(error)) from error
