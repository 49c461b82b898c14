"""Rollouts in several processes (`rollout.processes`), and the servers of a runner's agents.

Groups are spread over actors (`serving.front_processes`), each with an event loop, tools, templates
and sessions of its own, which sample from the engines directly.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
import ray

from turnwise.chat.template import load_tokenizer
from turnwise.config import NO_DEADLINE, Config, SamplingConfig
from turnwise.core.actor import get_with_deadline, is_death
from turnwise.core.aio import freeze_gc, run_in_thread
from turnwise.core.run_files import RunFiles
from turnwise.core.user_code import import_user_code
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError, StepError, TrajectoryError, describe_error
from turnwise.rollouts.agents import import_chat_scheduler
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.group import Group
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.runner import Runner, reward_functions_of
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.serving.front_processes import FrontProcess, FrontProcesses, Process, RunWithSampling
from turnwise.serving.openai import import_server
from turnwise.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

DIED = "rollout_process_died"  # reason of trajectories whose process died
_MAX_DEATHS = 2  # processes that may die during a group until the group fails: it may be the cause


class RolloutProcesses(FrontProcesses):
    """The rollout processes of a run; `environment` is None for the configured one."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        environment: EnvironmentType | None = None,
        process_class: type[FrontProcess] = FrontProcess,
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
        count = config.rollout.processes
        share = -(-config.rollout.concurrency // count)
        super().__init__(
            config.changed({"rollout": {"concurrency": share}}),
            scheduler,
            process_class,
            names=[f"rollout-{index}" for index in range(count)],
            open_runner=partial(open_runner, environment),
        )
        self._files = RunFiles(Path(config.output_dir, config.name))

    async def run_group(
        self, problem: Problem, sampling: SamplingConfig, tag: str, *, last: bool = False
    ) -> Group:
        """Run a problem's group in the process with the fewest, and again in another if that dies
        (`Group.retried`; after the second death `Group.dropped`); `last` as in `Runner`'s."""
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
                answer = await self._ask(process, problem, sampling, name, last)
            except TrajectoryError as error:  # of the row
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
        self, process: Process, problem: Problem, sampling: SamplingConfig, name: str, last: bool
    ) -> Group | str:
        """Run a group in one process; if that dies or hangs meanwhile, return the reason."""
        assert process.actor is not None
        lost = process.lost
        try:
            reply = process.actor.actor.run_group.remote(problem, sampling, name, last)
        except TypeError as error:
            raise TrajectoryError(
                "input_error",
                f"{problem.id} cannot be sent to another process (rollout.processes): "
                f"{describe_error(error)}",
            ) from error
        # Its process limits the group's time.
        answer: asyncio.Future[Group] = asyncio.ensure_future(
            get_with_deadline(reply, process.name, "finish a group", NO_DEADLINE, StepError)
        )
        try:
            with waiting(f"{process.name} to finish {name}", "group"):
                either: list[asyncio.Future[Group] | asyncio.Future[str]] = [answer, lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done() and not is_death(answer.exception()):
                    return answer.result()
                return await asyncio.shield(lost)  # after a death, its reports end too
        finally:
            if not answer.done():
                answer.cancel()
                if not lost.done():
                    ray.cancel(reply)


@asynccontextmanager
async def open_runner(
    environment: EnvironmentType | None, config: Config, scheduler: Scheduler
) -> AsyncIterator[RunWithSampling]:
    files = RunFiles(None)
    runner = await import_user_code(
        lambda: Runner(config, load_tokenizer(config), environment, files),
        config=config,
        what="the environment, loop, rewards and tools",
    )
    scheduler.grow(runner.slots)
    await run_in_thread(lambda: runner.tool_parser)

    async def run_group(problem: Problem, sampling: SamplingConfig, tag: str, last: bool) -> Group:
        group = await runner.run_group(scheduler, problem, sampling, tag, last=last)
        group.appended = files.take()
        return group

    async with open_front(config, runner, scheduler):
        freeze_gc()
        yield run_group


@asynccontextmanager
async def open_front(config: Config, runner: Runner, generator: Generator) -> AsyncIterator[None]:
    """Give a runner the server of its agents, or the backend of its chat scheduler, if any."""
    async with AsyncExitStack() as stack:
        if "agent" in config.loops:
            server = (await import_server())(config, generator, port=0)
            await server.start()
            stack.push_async_callback(server.stop)
            stack.push_async_callback(runner.close)
            runner.server = server
        if "chat_scheduler" in config.loops:
            scheduler = await import_chat_scheduler(config)
            runner.chats = chats = ChatBackend(config, generator, scheduler)
            await chats.start()
            stack.push_async_callback(chats.stop)
        yield
