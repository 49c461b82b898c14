"""Rollouts in several processes (`rollout.processes`).

Groups are spread over actors (`serving.front_processes`). Each actor has its own event loop, tools,
templates and sessions, and sends its requests to the engines directly.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import cloudpickle  # type: ignore[import-untyped]
import ray

from turnwise.chat.template import load_tokenizer
from turnwise.config import NO_DEADLINE, Config, SamplingConfig
from turnwise.core.actor import get_with_deadline, is_death
from turnwise.core.admission import Admission, Limits, Priority, Use, divide_limits
from turnwise.core.aio import freeze_gc, run_in_thread
from turnwise.core.run_files import RunFiles
from turnwise.core.user_code import import_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, StepError, TrajectoryError, describe_error
from turnwise.rollouts.environment import EnvironmentType, reward_functions_of
from turnwise.rollouts.group import Group
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.runner import Runner
from turnwise.serving.front_process import FrontProcess, GroupRunner, Report
from turnwise.serving.front_processes import FrontProcesses, Process
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.seats import engine_admission, limits_of

logger = logging.getLogger(__name__)

DIED = "rollout_process_died"  # reason of trajectories whose process died
_MAX_DEATHS = 2  # process deaths after which a group fails, because it may cause them


class RolloutProcesses(FrontProcesses):
    """The rollout processes of a run; if `environment` is None, they use the configured one.

    The limits of each of the `admissions` hold for all processes together. Each process gets a
    share of a limit according to the demand that it last reported. By default there is one
    admission, for the engines.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        environment: EnvironmentType | None = None,
        process_class: type[FrontProcess] = FrontProcess,
        *,
        admissions: Mapping[str, Admission] | None = None,
    ) -> None:
        for what in (*reward_functions_of(environment).values(), environment):
            try:
                cloudpickle.dumps(what)
            except Exception as error:
                name = getattr(what, "__name__", what)
                raise InputError(
                    f"{name} cannot be sent to another process (rollout.processes): "
                    f"{describe_error(error)}"
                ) from error
        super().__init__(
            config,
            scheduler,
            process_class,
            names=[f"rollout-{index}" for index in range(config.rollout.processes)],
            open_runner=partial(open_runner, environment),
        )
        self._admissions = admissions or {"engines": engine_admission(limits_of(config), scheduler)}
        self._shared: list[Limits] = []  # total limits at the last division
        self._files = RunFiles(config.run_folder)

    async def _start(self, process: Process) -> None:
        process.uses, process.limits = {}, {}
        await super()._start(process)
        self._share_limits()

    def _take(self, process: Process, report: Report) -> None:
        super()._take(process, report)
        limits = [admission.limits for admission in self._admissions.values()]
        if report.uses != process.uses or limits != self._shared:
            process.uses = report.uses
            self._share_limits()

    def _share_limits(self) -> None:
        up = self.up
        self._shared = [admission.limits for admission in self._admissions.values()]
        for name, admission in self._admissions.items():
            uses = [process.uses.get(name, Use()) for process in up]
            ordered = [process.limits.get(name, Limits(0, 0, 0)) for process in up]
            shares = divide_limits(admission.limits, uses, ordered)
            for process, before, share in zip(up, ordered, shares, strict=True):
                if share != before:
                    process.limits[name] = share
                    self._tell(process, "limit", name, share)

    async def run_group(
        self,
        problem: Problem,
        sampling: SamplingConfig,
        tag: str,
        priority: Priority = Priority.TRAINING,
    ) -> Group:
        """Run a problem's group in the process with the fewest groups. If that process dies, run
        the group again in another process (`Group.retried`); after the second death, the group
        fails (`Group.dropped`)."""
        causes: list[str] = []
        while len(causes) < _MAX_DEATHS:
            with waiting(f"a rollout process for {tag}", "rollout process"):
                while not self.failure and not self.up:
                    self.changed.clear()
                    await self.changed.wait()
            if self.failure:
                raise StepError(f"no rollout process is left: {self.failure}")
            process = min(self.up, key=lambda each: each.busy)
            process.busy += 1
            try:
                name = f"{tag}.{len(causes)}" if causes else tag
                answer = await self._ask(process, problem, sampling, name, priority)
            except TrajectoryError as error:  # such as a row that cannot be sent
                answer = Group.of(problem)
                answer.dropped[error.reason] += sampling.n
                answer.note(error.reason, str(error), sampling.n)
            finally:
                process.busy -= 1
            if isinstance(answer, Group):
                group = answer
                process.restarts = 0
                break
            causes.append(answer)
        else:
            group = Group.of(problem)
        for number, cause in enumerate(causes, 1):
            counts = group.dropped if number == _MAX_DEATHS else group.retried
            counts[DIED] += sampling.n
            group.note(DIED, cause, sampling.n)
        appended, group.appended = group.appended, []
        for name, text in appended:
            await self._files.add(name, text)
        return group

    async def _ask(
        self,
        process: Process,
        problem: Problem,
        sampling: SamplingConfig,
        name: str,
        priority: Priority,
    ) -> Group | str:
        """Run a group in one process and return it; if the process dies or hangs meanwhile, return
        the reason."""
        assert process.actor is not None
        lost = process.lost
        try:
            reply = process.actor.actor.run_group.remote(problem, sampling, name, priority)
        except TypeError as error:
            raise TrajectoryError(
                "input_error",
                f"{problem.id} cannot be sent to another process (rollout.processes): "
                f"{describe_error(error)}",
            ) from error
        # No deadline here: the process limits the group's time.
        answer: asyncio.Future[Group] = asyncio.ensure_future(
            get_with_deadline(reply, process.name, "finish a group", NO_DEADLINE, StepError)
        )
        try:
            with waiting(f"{process.name} to finish {name}", "group"):
                either: list[asyncio.Future[Group] | asyncio.Future[str]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and not is_death(answer.exception()):
                    return answer.result()
                return await asyncio.shield(lost)  # a death also ends the reports
        finally:
            if not answer.done():
                answer.cancel()
                if not lost.done():
                    ray.cancel(reply)


@asynccontextmanager
async def open_runner(
    environment: EnvironmentType | None, config: Config, scheduler: Scheduler
) -> AsyncIterator[GroupRunner]:
    files = RunFiles(None)
    runner = await import_user_code(
        lambda: Runner(config, load_tokenizer(config.model), environment, files),
        seconds=config.engine.start_timeout,
        what="the environment, loop, rewards and tools",
    )
    await run_in_thread(lambda: runner.tool_parser)

    async def run_group(
        problem: Problem, sampling: SamplingConfig, tag: str, priority: Priority
    ) -> Group:
        group = await runner.run_group(scheduler, problem, sampling, tag, priority=priority)
        group.appended = files.take()
        return group

    async with runner.opened(scheduler):
        freeze_gc()
        yield GroupRunner(run_group, runner.admissions)
