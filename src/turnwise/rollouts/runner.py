"""The runner: makes groups of n trajectories for one problem; each trajectory is a coroutine.

Every trajectory that starts ends exactly once: it joins its group or, after `rollout.retries`
further attempts, the group counts it under the reason of its last failure. An `InputError` (a
mistake in the user's input) ends the run if no trajectory of the environment has finished yet.
Later, the mistake must be in one row, so only the row's trajectories fail, with the reason
`input_error`. A lack of descriptors, threads or memory also fails only the trajectory, with the
reason `system_error`. The runner does not check all rows first: it builds environments on demand.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

from turnwise.chat.messages import in_thread_if_long
from turnwise.chat.template import load_template, missing_stop
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import LOOP_NAMES, Config, SamplingConfig
from turnwise.core.admission import Admission, Place, Priority
from turnwise.core.aio import is_cancelled, run_in_thread, task_group
from turnwise.core.deadlines import StallClock, trajectory_limits
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign, load_object
from turnwise.core.run_files import RunFiles
from turnwise.core.spans import agent_span
from turnwise.core.user_code import (
    call_and_wait,
    call_user_code,
    describe_user_error,
    run_abandonable,
    user_errors,
)
from turnwise.engine.beam_search import BeamSearch
from turnwise.engine.protocol import Generator, Route, TurnTimes
from turnwise.errors import (
    DeadlineError,
    EngineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    describe_error,
)
from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext, stable_seed
from turnwise.rollouts.batch_sampler import SamplerLoop
from turnwise.rollouts.configured_tools import load_tools
from turnwise.rollouts.environment import (
    EnvironmentType,
    load_environment,
    name_of,
    own_method,
    reward_functions_of,
    type_of,
    with_arguments,
)
from turnwise.rollouts.episode import PREVIEW_CALLS, Episode, playing
from turnwise.rollouts.group import NO_REWARD, TOO_LONG, Group
from turnwise.rollouts.loops import load_loop
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.remote_episode import EnvironmentProcesses, RemoteEpisode
from turnwise.rollouts.rewards import RewardManager
from turnwise.rollouts.row_texts import row_texts
from turnwise.serving.seats import limits_of
from turnwise.trajectory import ChatTemplate, Message, Trajectory
from turnwise.trajectory.chat_template import Tokenizer
from turnwise.trajectory.left_out import check_messages, check_results, check_tools

logger = logging.getLogger(__name__)

_READING = ("tool_calling", "self_play")
"""Loops in which the model reads results of tools as messages."""
_CHECK_SECONDS = 60.0  # time to check a row, in addition to the calls of its environment
_LEFT_OUT = 10_000  # maximum number of remembered problems whose prompt is too long


class Stage:
    """An environment (None: the configured environment) with everything that its episodes share.

    All stages of a run share `left_out`: for each id of a problem that is left out, the reason. If
    not `measured`, prompts may have any length; if not `with_tools`, `rollout.tools` is ignored.
    """

    def __init__(
        self,
        config: Config,
        environment: EnvironmentType | None,
        loop: AgentLoop,
        template: ChatTemplate,
        left_out: dict[str, str],
        *,
        measured: bool = True,
        with_tools: bool = True,
    ) -> None:
        self.rollout = config.rollout
        self.loop = loop
        self._config = config
        self._template = template
        given = config.environment if environment is None else name_of(environment)
        self._name = f"the environment {given}"
        self._environment = environment or with_arguments(
            load_environment(config.environment), config.environment_args
        )
        self._tools = load_tools(config.rollout.tools) if with_tools else []
        if ":" in (path := config.rollout.context.compact or ""):
            load_object(path, "rollout.context.compact")
        self._processes: EnvironmentProcesses | None = None
        if config.rollout.environment_process:
            self._processes = EnvironmentProcesses(self._environment, config.rollout)
        self.knows_prompts = own_method(type_of(self._environment), "prompt") is not None
        self._left_out = left_out
        self._longest = config.data.max_prompt_tokens or math.inf
        written = bool(template.missing) and _by_requests(loop)  # an agent writes the prompts
        self._measures = measured and not written
        self.played = False  # whether a trajectory has been finished
        self._checked = False
        """Whether the first problem was checked: its environment can be set up and has a reward,
        and the template renders its messages, and for built-in loops also tools and results."""

    def episode(self, problem: Problem) -> Episode:
        if self._processes is not None:
            return RemoteEpisode(self._processes, problem, self.rollout, self._tools)
        return Episode(self._environment, problem, self.rollout, self._tools)

    def check(self, problem: Problem, rewards: RewardManager) -> int | None:
        """Build a problem's environment and measure its prompt, then close the environment; call
        this in a thread. The first problem's environment is also set up, and must have a reward
        if `rewards` use the environment's own reward.

        Returns the prompt's length in tokens; None if this stage measures no prompts, the
        environment raises a TrajectoryError, or the prompt is known only after toolsets are opened
        or `setup` is called. Raises InputError if the row has unusable fields or tools, its prompt
        does not fit the context, or the chat template leaves out a part of the first row.
        """

        def measure() -> int | None:
            episode, first = self.episode(problem), not self._checked
            try:
                known = asyncio.run(episode.preview(set_up=first))
            except TrajectoryError as error:  # it may work in the run
                logger.warning("%s is checked when it is played: %s", problem.id, error)
                self._checked = True
                return None
            if first:
                rewards.check_environment(episode, self._environment)
            if not known:
                self._checked = True
                return None
            messages, schemas = episode.problem, episode.toolbox.schemas
            offered, loop = self._offered(schemas), self.rollout.loop
            if first and not _by_requests(self.loop):
                try:
                    check_messages(self._template, messages)
                    if offered and loop in LOOP_NAMES:
                        check_tools(self._template, messages, offered)
                    if schemas and loop in _READING:
                        check_results(self._template, offered)
                except InputError as error:
                    raise InputError(f"{problem.id}: {error}") from error
                if stop := missing_stop(self._config.model, self._config.sampling, self._template):
                    logger.warning("%s", stop)
            self._checked = True
            return self._length(problem.id, messages, offered) if self._measures else None

        # Each call of the environment has its own deadline; its process also needs time to start.
        seconds = (PREVIEW_CALLS + 2) * self.rollout.environment_timeout + _CHECK_SECONDS
        length = call_and_wait(measure, name=f"the check of {self._name}", seconds=seconds)
        if length is not None and length <= self._longest and (reason := self._too_long(length)):
            raise InputError(f"{problem.id}: {reason}")
        return length

    async def reason_left_out(self, problem: Problem) -> str:
        """Return why a problem is left out, without building its environment; "" if it is used.

        This measures the prompt without tools, because the environment's tools are not known yet;
        `admit` measures it with them.
        """
        if not (self.knows_prompts and self._measures):
            return self._left_out.get(problem.id, "")

        def measure() -> int | None:
            messages = self.episode(problem).prompt()
            return None if messages is None else self._length(problem.id, messages, [])

        try:
            seconds = self.rollout.environment_timeout
            length = await call_user_code(measure, name=self._name, seconds=seconds)
            if length is not None:
                self._admit(problem.id, length)
        except TrajectoryError as error:
            return str(error)
        except Exception:
            return ""  # the trajectories of the problem will fail too, and are counted
        return ""

    async def admit(self, problem: Problem, episode: Episode) -> None:
        """Fail a trajectory whose prompt is too long or is refused by the template."""
        if not self._measures:
            return
        messages, schemas = episode.problem, self._offered(episode.toolbox.schemas)
        try:
            length = await in_thread_if_long(
                messages, lambda: self._length(problem.id, messages, schemas)
            )
        except InputError as error:
            if self._template.missing:
                raise
            raise TrajectoryError("template_refuses", str(error)) from error
        self._admit(problem.id, length)

    def _length(
        self, where: str, messages: Sequence[Message], schemas: Sequence[JsonObject]
    ) -> int:
        """Return the number of tokens of a first prompt; errors call the row `where`."""
        try:
            return len(self._template.render_first(messages, schemas))
        except (InputError, TrajectoryError) as error:  # a missing template, or a bad image
            raise InputError(f"{where}: {error}") from error
        except Exception as error:  # a template may raise anything
            refusal = "the chat template refuses the environment's problem"
            raise InputError(f"{where}: {refusal}: {describe_error(error)}") from error

    def _admit(self, where: str, length: int) -> None:
        """Leave out a problem whose prompt is too long; log a warning for the first one."""
        if reason := self._too_long(length):
            if not self._left_out:
                logger.warning("%s is left out, and so is every such row: %s", where, reason)
            if len(self._left_out) < _LEFT_OUT:
                self._left_out[where] = f"{where}: {reason}"
            raise TrajectoryError(TOO_LONG, f"{where}: {reason}")

    def _too_long(self, length: int) -> str:
        """Return why a prompt is too long; "" if it fits."""
        if length > self._longest:
            limit = f"{self._longest} (data.max_prompt_tokens)"
            return f"its prompt has {length} tokens, more than {limit}"
        if length < (room := self._config.model.max_length):
            return ""
        return (
            f"its prompt of {length} tokens does not fit the context of {room}; raise "
            "model.max_length, or leave such rows out with data.max_prompt_tokens"
        )

    def _offered(self, schemas: Sequence[JsonObject]) -> Sequence[JsonObject]:
        rollout = self.rollout
        bare = rollout.loop in ("single_turn", "sampler")
        if not rollout.tools_in_prompt or rollout.call_start or bare:
            return []
        return schemas


def _by_requests(loop: AgentLoop) -> bool:
    """Return whether agents or similar programs make a loop's requests and write its prompts."""
    return getattr(loop, "by_requests", False)


@dataclass(frozen=True, slots=True)
class _Run:
    engine: Generator
    problem: Problem
    sampling: SamplingConfig
    name: str  # unique name of the group; the names and seeds of its requests begin with it
    stage: Stage
    group: Group
    search: BeamSearch | None = None
    """The group's beam search; None if its answers are sampled."""
    priority: Priority = Priority.TRAINING
    change: Callable[[RolloutContext], None] = lambda _: None
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Episodes of finished trajectories by their position, until the whole group is rewarded."""


class Runner:
    """Makes groups; each environment has its own tools and agent loop.

    If `environment` is None, the runner uses the configured environments. The attribute
    `reward_functions` of an environment type holds a program's reward functions, by their paths in
    `rollout.rewards`. Without `files` the runner writes to the run's folder."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        environment: EnvironmentType | None = None,
        files: RunFiles | None = None,
    ) -> None:
        self._config = config
        if functions := reward_functions_of(environment):
            # Not sent to an environment's own process: reward functions need not be picklable.
            played: Foreign = copy(environment)
            played.reward_functions = {}
            environment = played
        self.template = load_template(config.model, config.sampling, config.engine, tokenizer)
        self._stages: dict[str, Stage] = {}  # by environment; "" if the run has one
        left_out: dict[str, str] = {}
        self.loops: dict[str, AgentLoop] = {}
        """Loops by name. Environments with the same loop share its instance and agent workers."""
        for name, part in (config.parts() if environment is None else {"": config}).items():
            loop = part.rollout.loop
            try:
                own = self.loops.setdefault(loop, self.loops.get(loop) or load_loop(loop))
                self._stages[name] = Stage(part, environment, own, self.template, left_out)
            except InputError as error:
                if not name:
                    raise
                raise InputError(f"environments.{name}: {error}") from error
        self.tokenizer = tokenizer
        self.files = files or RunFiles(config.run_folder)
        max_steps = config.training.steps * config.training.optimizer_steps
        self.rewards = RewardManager(
            config.rollout.rewards,
            functions,
            rollout=config.rollout,
            max_steps=max_steps,
            files=self.files,
        )
        self._warned = False  # whether a trajectory without any reward has been reported
        self.admission = Admission(limits_of(config))
        """Admits trajectories. A run replaces it by an `engine_admission`, with limits that follow
        the engines."""
        self._loading = asyncio.Lock()

    def with_environment(self, environment: EnvironmentType, loop: AgentLoop) -> "Runner":
        """Return a runner for another environment and loop that shares everything else with this
        runner, also the admission. It ignores `rollout.tools`, and does not measure prompts."""
        _ = self.tool_parser  # loaded once, here, so that the copy need not load it
        other = copy(self)
        stage = Stage(
            self._config, environment, loop, self.template, {}, measured=False, with_tools=False
        )
        other._stages = {"": stage}
        return other

    def _stage(self, problem: Problem) -> Stage:
        stage = self._stages.get(problem.environment)
        if stage is None:  # a program's problems do not name an environment
            raise InputError(
                f"{problem.id} names none of the environments ({', '.join(self._stages)}), and "
                "only train, eval and rollout choose among several: set environment for one"
            )
        return stage

    @property
    def admissions(self) -> dict[str, Admission]:
        """The admissions of engines and of judges, by name."""
        return {"engines": self.admission, **self.rewards.admissions}

    def load(self) -> None:
        """Call `load` of each loop that has this method (see `AgentLoop`); call in a thread."""
        for loop in self.loops.values():
            if (load := getattr(loop, "load", None)) is not None:
                load(self._config.rollout)

    @property
    def fronts(self) -> list[str]:
        """The names under which the terminal shows what `opened` starts."""
        return sorted({loop.front for loop in self.loops.values() if hasattr(loop, "front")})

    @asynccontextmanager
    async def opened(self, generator: Generator) -> AsyncIterator[None]:
        """Run the loops' services, such as a server for agents, during an `async with` block."""
        async with AsyncExitStack() as stack:
            for loop in self.loops.values():
                if (opened := getattr(loop, "opened", None)) is not None:
                    front = opened(self._config, generator, self.admission)
                    await stack.enter_async_context(front)
            yield

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Parser of the model's tool calls; loaded on first use, because that takes seconds."""
        return ToolParser(self._config.rollout.tool_parser, self.tokenizer)

    def check(self, problem: Problem) -> int | None:
        """Check a row before any engine is started; see `Stage.check`."""
        self.rewards.check_row(problem.id, problem.row)
        return self._stage(problem).check(problem, self.rewards)

    def within_prompt_limit(self, problems: Sequence[Problem]) -> list[Problem]:
        """Check all problems; return those whose prompt is within `data.max_prompt_tokens`."""
        longest = self._config.data.max_prompt_tokens
        lengths = [self.check(problem) or 0 for problem in problems]  # 0: not known yet
        if longest is None:
            return [*problems]
        kept = [one for one, length in zip(problems, lengths, strict=True) if length <= longest]
        if len(kept) < len(problems):
            number = f"{len(problems) - len(kept)} of {len(problems)} rows"
            limit = f"{longest} tokens (data.max_prompt_tokens)"
            too_long = f"{number} have prompts of more than {limit}"
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
        priority: Priority = Priority.TRAINING,
        change: Callable[[RolloutContext], None] = lambda _: None,
    ) -> Group:
        """Run `sampling.n` trajectories, whose requests' names begin with `tag`, when `admission`
        has room. `on_trajectory` gets each trajectory as soon as its reward is known; `change` may
        change a trajectory's context before its loop begins."""
        group, started = Group.of(problem) if into is None else into, time.perf_counter()
        stage, name = self._stage(problem), f"{tag}-{problem.id}"
        search: BeamSearch | None = None
        if sampling.use_beam_search:
            if _by_requests(stage.loop) or isinstance(stage.loop, SamplerLoop):
                raise InputError(
                    "sampling.use_beam_search: the requests of agents, chat schedulers and "
                    "samplers sample; choose another rollout.loop"
                )
            ends = self.template.stop_token_ids
            search = BeamSearch(engine, self.tokenizer, ends, sampling.n)
        run = _Run(engine, problem, sampling, name, stage, group, search, priority, change)
        async with self._loading:
            if "tool_parser" not in vars(self):  # loading it would block the event loop
                with suppress(OSError):  # no thread is free: a trajectory loads it
                    await run_in_thread(lambda: self.tool_parser)
        compares = self.rewards.compares
        if too_long := await stage.reason_left_out(problem):
            group.left_out = TOO_LONG
            group.note(TOO_LONG, too_long)
        else:
            async with task_group() as tasks:
                for index in range(sampling.n):
                    finished = self._fill(run, index, None if compares else on_trajectory)
                    tasks.create_task(finished)
        group.trajectories.sort(key=lambda trajectory: trajectory.sample_index)
        if compares:
            await self._reward_group(run)
            for trajectory in group.trajectories:
                on_trajectory(trajectory)
        for episode in run.episodes.values():
            episode.release()
        group.elapsed = time.perf_counter() - started
        return group

    async def _reward_group(self, run: _Run) -> None:
        """Compare a group's trajectories; drop all if this fails, else those without a reward."""
        group, row, where = run.group, run.problem.row, run.problem.id
        try:
            await self.rewards.reward_group(group.trajectories, row, run.episodes, group.judging)
        except TrajectoryError as error:
            group.drop(group.trajectories, error.reason, str(error))
            if isinstance(error.__cause__, Exception):
                await self.files.log_error(
                    error.reason, run.name, error.__cause__, group.environment
                )
        if lacking := [t for t in group.trajectories if self.rewards.lacks(t)]:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "All reward functions returned None for the following kwargs: %.500r, of "
                    "%s; such trajectories are not trained on, and counted as %s",
                    row, where, NO_REWARD,
                )  # fmt: skip
            group.drop(lacking, NO_REWARD, f"every reward of {where} is None")

    async def _fill(
        self, run: _Run, index: int, on_trajectory: Callable[[Trajectory], None] | None
    ) -> None:
        """Add trajectory `index` to its group; if it fails, count the reason."""
        group, tries = run.group, 1 + self._config.rollout.retries
        arrival = self.admission.arrive()
        for number in range(1, tries + 1):
            trajectory = Trajectory(run.problem.id, index, environment=run.problem.environment)
            name = f"{run.name}-{index}" + (f".{number}" if number > 1 else "")
            async with self.admission.admitted(run.priority, arrival) as place:
                if group.left_out:  # another trajectory of the group found the prompt too long
                    return
                failure = await self._try(run, trajectory, name, place)
            if failure is None:
                group.trajectories.append(trajectory)
                if on_trajectory is not None:
                    on_trajectory(trajectory)
                return
            reason, message = failure
            if reason == TOO_LONG:
                group.left_out = TOO_LONG
                group.note(TOO_LONG, message)
                return
            counts = group.dropped if number == tries else group.retried
            counts[reason] += 1
            group.dropped_tokens[reason] += trajectory.sampled_tokens
            group.note(reason, message)

    async def _try(
        self, run: _Run, trajectory: Trajectory, name: str, place: Place
    ) -> tuple[str, str] | None:
        """Make one attempt at a trajectory; if it fails, return the reason and the message."""
        rollout, own = run.stage.rollout, run.problem.environment
        limits = trajectory_limits(rollout.trajectory_timeout, rollout.stall_timeout)
        try:
            async with limits as clock:
                with agent_span(rollout.loop, name, trajectory.problem_id) as set_attribute:
                    await self._attempt(run, trajectory, name, clock, place)
                    lost = sum(not turn.experts for turn in trajectory.turns)
                    if lost and self._config.engine.routing_replay:
                        trajectory.events["experts_missing"] += lost
                    set_attribute("turnwise.status", trajectory.status)
                    set_attribute("turnwise.reward", trajectory.reward or 0.0)
                run.stage.played = True
                return None
        except TrajectoryError as error:
            failure = error.reason, str(error)
            if isinstance(error.__cause__, Exception):
                await self.files.log_error(error.reason, name, error.__cause__, own)
        except DeadlineError as error:
            failure = "engine_timeout", str(error)
        except EngineError as error:
            failure = "engine_error", str(error)
        except (OSError, MemoryError) as error:  # a temporary lack of threads, memory, ...
            failure = "system_error", str(error)
        except InputError as error:
            if not run.stage.played:
                raise
            failure = "input_error", str(error)
            await self.files.log_error(failure[0], name, error, own)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            failure = "cancelled", "something it waited for was cancelled"
        except TurnwiseError:
            raise
        except Exception as error:
            failure = "unexpected_error", await describe_user_error(error)
            await self.files.log_error(failure[0], name, error, own)
        logger.info("%s failed (%s): %s", name, *failure)
        return failure

    async def _attempt(
        self, run: _Run, trajectory: Trajectory, name: str, clock: StallClock, place: Place
    ) -> None:
        problem, stage = run.problem, run.stage

        async def report(reason: str, error: Exception) -> None:
            trajectory.events[reason] += 1
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            await self.files.log_error(reason, name, cause, problem.environment)

        async with playing(stage.episode(problem), clock, report) as episode:
            calls: list[TurnTimes] = []
            run.group.calls[trajectory.sample_index] = calls
            context = RolloutContext(
                trajectory=trajectory,
                calls=calls,
                engine=run.engine if run.search is None else run.search.of(trajectory.sample_index),
                template=self.template,
                tool_parser=self.tool_parser,
                rollout=stage.rollout,
                sampling=run.sampling,
                max_length=self._config.model.max_length,
                request_id=name,
                row=problem.row,
                episode=episode,
                route=Route(session=name, group=run.name),
                seed=stable_seed(self._config.seed, name) if self._config.deterministic else None,
                files=self.files,
                seconds=run.group.seconds,
                clock=clock,
                place=place,
            )
            run.change(context)
            await stage.admit(problem, episode)
            loop, passing = stage.loop, (InputError, TrajectoryError, DeadlineError, EngineError)
            async with user_errors("loop_error", "", passing):
                await run_abandonable(  # it may be user code
                    lambda: loop.run(episode.environment, context),
                    name=f"the loop {stage.rollout.loop}",
                    seconds=self._config.rollout.trajectory_timeout,
                    key="rollout.trajectory_timeout",
                )
            place.played()
            with context.timed("reward"):
                counts = run.group.judging
                await self.rewards.reward(episode, trajectory, problem.row, clock, counts)
            trajectory.row = row_texts(problem.row, trajectory.messages)
            run.episodes[trajectory.sample_index] = episode
            if episode.measures:
                try:
                    with context.timed("environment"):
                        own = await episode.metrics(trajectory)
                        trajectory.set_outcome(metrics={**trajectory.metrics, **own})
                except TrajectoryError as error:  # a trajectory is kept without metrics
                    await report("metrics_error", error)
