"""Rollouts in several processes (`rollout.processes`), seen from the driver.

Groups are spread over actors (`rollout_process`), each with an event loop, tools, templates and
sessions of its own, which sample from the engines directly.
"""

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import ray

from turnwise.config import NO_DEADLINE, Config, SamplingConfig
from turnwise.core.actor import ActorHandle, get_with_deadline, is_death
from turnwise.core.aio import run_in_thread
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError, StepError, TurnwiseError, describe_error
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.group import Group
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.rollout_process import RolloutProcess
from turnwise.rollouts.run_files import RunFiles
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.scheduler_processes import Process, SchedulerProcesses

logger = logging.getLogger(__name__)

DIED = "rollout_process_died"
"""Reason of trajectories whose process died."""
_MAX_DEATHS = 2
"""Processes that may die during a group until the group fails: it may be the cause."""
_MAX_CALLS = 1 << 14
"""Largest number of groups at once in an actor."""


class _DeathError(TurnwiseError):
    """The process of a group died."""


class RolloutProcesses(SchedulerProcesses):
    """The rollout processes of a run.

    Args:
        scheduler: Scheduler of the engines.
        environment: None means the configured one.
        process_class: Class of the actors.

    Raises:
        InputError: when the environment cannot be sent to another process.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        environment: EnvironmentType | None = None,
        process_class: type[RolloutProcess] = RolloutProcess,
    ) -> None:
        try:
            cloudpickle.dumps(environment)
        except Exception as error:
            name = getattr(environment, "__name__", environment)
            raise InputError(
                f"{name} cannot be sent to another process (rollout.processes): "
                f"{describe_error(error)}"
            ) from error
        count = config.rollout.processes
        share = -(-config.rollout.concurrency // count)
        rollout = config.rollout.model_copy(update={"concurrency": share})
        names = [f"rollout-{index}" for index in range(count)]
        super().__init__(config.model_copy(update={"rollout": rollout}), scheduler, names)
        self._environment = environment
        self._class = process_class
        self._files = RunFiles(Path(config.output_dir, config.name))

    def create(self, process: Process) -> ActorHandle:
        return ActorHandle.create(
            self._class,
            *(self.config, self._environment),
            name=process.name,
            config=self.config,
            log=process.name,
            placement="SPREAD",
            max_concurrency=_MAX_CALLS,
            failure=StepError,
        )

    async def run_group(self, problem: Problem, sampling: SamplingConfig, tag: str) -> Group:
        """Run the group of a problem in the process with the fewest groups.

        A group whose process dies begins again in another one; that is counted in `Group.retried`,
        or in `Group.dropped` after the second death.

        Raises:
            InputError: when something that the user gave cannot be used.
            StepError: when no process is left.
        """
        causes: list[str] = []
        while len(causes) < _MAX_DEATHS:
            process = await self._free_process(tag)
            process.busy += 1
            try:
                name = f"{tag}.{len(causes)}" if causes else tag
                group = await self._ask(process, problem, sampling, name)
            except _DeathError as error:
                causes.append(str(error))
                continue
            finally:
                process.busy -= 1
            process.restarts = 0
            break
        else:
            group = Group.of(problem)
        for number, cause in enumerate(causes, 1):
            counts = group.dropped if number == _MAX_DEATHS else group.retried
            counts[DIED] += sampling.n
            group.causes.setdefault(DIED, cause)
        appended, group.appended = group.appended, []
        try:
            for name, text in appended:
                await run_in_thread(partial(self._files.append, name, text))
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._files.path(name), error.strerror)
        return group

    async def _free_process(self, tag: str) -> Process:
        """Return the process with the fewest groups; wait while there is none."""
        with waiting(f"a rollout process for {tag}", "rollout process"):
            while True:
                if self.failure:
                    raise StepError(f"no rollout process is left: {self.failure}")
                if up := self.up:
                    return min(up, key=lambda process: process.busy)
                self.changed.clear()
                await self.changed.wait()

    async def _ask(
        self, process: Process, problem: Problem, sampling: SamplingConfig, name: str
    ) -> Group:
        """Run a group in one process.

        Raises:
            _DeathError: when the process dies or hangs meanwhile.
        """
        assert process.actor is not None
        lost = process.lost
        try:
            reply = process.actor.actor.run_group.remote(problem, sampling, name)
        except TypeError as error:
            raise InputError(
                f"{problem.id} cannot be sent to another process (rollout.processes): "
                f"{describe_error(error)}"
            ) from error
        answer = asyncio.ensure_future(_answer(reply, process.name))
        try:
            with waiting(f"{process.name} to finish {name}", "group"):
                either: list[asyncio.Future[Group] | asyncio.Future[str]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and not is_death(answer.exception()):
                    return answer.result()
                raise _DeathError(await asyncio.shield(lost))  # after a death, its reports end too
        finally:
            if not answer.done():
                answer.cancel()
                if not lost.done():
                    ray.cancel(reply)


async def _answer(reply: Awaitable[Group], who: str) -> Group:
    """Wait for a group; its process limits its time."""
    return await get_with_deadline(reply, who, "finish a group", NO_DEADLINE, StepError)
