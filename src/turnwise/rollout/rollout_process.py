"""A rollout process: an actor with a runner and a scheduler of its own (`rollout.processes`).

It samples from the same engines as the driver and the other rollout processes. `processes`, in the
driver, tells it of engines that come and go, and sends it problems.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from ray.actor import ActorHandle as RayActor

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core import logs
from turnwise.core.aio import freeze_gc, run_in_thread
from turnwise.core.watchdog import last_progress
from turnwise.engine.protocol import Engine, Generator
from turnwise.rollout.environment import EnvironmentType
from turnwise.rollout.foreign.trl_reward import RewardFunction
from turnwise.rollout.group import Group
from turnwise.rollout.loops import load_chat_scheduler
from turnwise.rollout.problems import Problem
from turnwise.rollout.runner import Runner
from turnwise.serving.chat_backend import ChatBackend
from turnwise.serving.openai import import_server
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.serving.worker_state import Worker

REPORT_SECONDS = 0.25
"""Time between two reports of a process that has nothing urgent."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of a worker; see `Worker`."""

    turns: int = 0
    tokens: int = 0
    failed_turns: Counter[str] = field(default_factory=Counter)

    def since(self, before: "_Counts") -> "_Counts":
        turns, tokens = self.turns - before.turns, self.tokens - before.tokens
        return _Counts(turns, tokens, self.failed_turns - before.failed_turns)

    def plus(self, other: "_Counts") -> "_Counts":
        turns, tokens = self.turns + other.turns, self.tokens + other.tokens
        return _Counts(turns, tokens, self.failed_turns + other.failed_turns)


@dataclass(slots=True)
class Report:
    """News of a rollout process since its last report."""

    progressed: bool
    """Whether a wait ended or tokens arrived."""
    loads: dict[str, float]
    """Load that the process puts on each worker, by name."""
    events: Counter[str]
    """Counts to add to `Scheduler.events`."""
    counts: "dict[str, _Counts]" = field(default_factory=dict)
    """Counts to add to each worker's, by name."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Workers on which a request failed, and why: each waits for `restore` or `remove`."""
    excused: list[str] = field(default_factory=list)
    """Workers whose death a single request caused."""


class RolloutProcess:
    """An actor's class; see the module's docstring.

    Args:
        environment: None means the configured one.
        functions: Reward functions of a program, by their paths in `rollout.rewards`.
    """

    def __init__(
        self,
        config: Config,
        environment: EnvironmentType | None = None,
        functions: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        self._config = config
        self._make_runner = partial(Runner, config, environment=environment, functions=functions)
        self._stack = AsyncExitStack()
        self._urgent = asyncio.Event()
        self._failures: list[tuple[str, str]] = []
        self._excused: list[str] = []
        self._counted: dict[Worker, _Counts] = {}
        """Reported counts of each worker, also of removed ones whose turns are not over."""
        self._events: Counter[str] = Counter()
        self._moved = 0.0

    async def start(self) -> int:
        """Load the tokenizer, the environment and the loop; return this process's id.

        Raises:
            InputError: when one of them cannot be used.
        """
        logs.follow()
        config = self._config
        seconds = config.engine.start_timeout + config.engine.request_timeout
        self.scheduler = Scheduler(config.serving, seconds)
        self._runner = await run_in_thread(lambda: self._make_runner(load_tokenizer(config)))
        await run_in_thread(lambda: self._runner.tool_parser)
        await self._stack.enter_async_context(open_front(config, self._runner, self.scheduler))
        freeze_gc()
        return os.getpid()

    async def add(self, name: str, worker: RayActor) -> None:
        """See `Follower.add`."""
        if name in self.scheduler.workers:
            await self.remove(name)
        added = self.scheduler.add(name, self._attach(name, worker), _Remote(self, name))
        self._counted[added] = _Counts()

    def _attach(self, name: str, worker: RayActor) -> Engine:
        return WorkerHandle.attach(worker, name, self._config)

    async def restore(self, name: str) -> None:
        """See `Follower.restore`."""
        self.scheduler.restore(name)

    async def remove(self, name: str) -> None:
        """See `Follower.remove`."""
        if name in self.scheduler.workers:
            worker = self.scheduler.remove(name)
            if isinstance(worker.engine, WorkerHandle):
                worker.engine.fail(f"{name} is lost")

    async def close(self, why: str) -> None:
        """See `Follower.close`."""
        self.scheduler.close(why)

    async def prefer(self, names: Sequence[str]) -> None:
        """See `Scheduler.prefer`."""
        self.scheduler.prefer(names)

    async def run_group(self, problem: Problem, sampling: SamplingConfig, tag: str) -> Group:
        """Run the group of a problem, under a unique tag.

        Raises:
            InputError: when something that the user gave cannot be used.
        """
        return await self._runner.run_group(self.scheduler, problem, sampling, tag)

    async def report(self) -> Report:
        """Return the news at the next urgent event, or after `REPORT_SECONDS`."""
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self._urgent.wait()
        except TimeoutError:
            pass
        self._urgent.clear()
        moved, self._moved = self._moved, last_progress()
        events, self._events = self._events, Counter(self.scheduler.events)
        workers = self.scheduler.workers
        report = Report(
            progressed=self._moved != moved,
            loads={name: worker.load for name, worker in workers.items()},
            events=self._events - events,
            failures=self._failures,
            excused=self._excused,
        )
        self._failures, self._excused = [], []
        for worker, before in list(self._counted.items()):
            new = _Counts(worker.turns, worker.tokens, Counter(worker.failed_turns))
            known = report.counts.get(worker.name, _Counts())  # of a worker before it
            report.counts[worker.name] = known.plus(new.since(before))
            if worker.running or workers.get(worker.name) is worker:
                self._counted[worker] = new
            else:
                del self._counted[worker]
        return report

    def report_failure(self, name: str, why: str) -> None:
        """Report at once that a request failed on a worker."""
        self._failures.append((name, why))
        self._urgent.set()

    def excuse_death(self, name: str) -> None:
        """Report that a single request caused a worker's death."""
        self._excused.append(name)
        self._urgent.set()

    async def stop(self) -> bool:
        """End servers and agents, and return True; the owner kills the actor."""
        await self._runner.close()
        await self._stack.aclose()
        return True


@dataclass(frozen=True, slots=True)
class _Remote:
    """The supervisor of a worker, which is in the driver."""

    process: RolloutProcess
    name: str

    def report_failure(self, why: str) -> None:
        self.process.report_failure(self.name, why)

    def excuse_death(self) -> None:
        self.process.excuse_death(self.name)


@asynccontextmanager
async def open_front(config: Config, runner: Runner, generator: Generator) -> AsyncIterator[None]:
    """Give a runner the server of its agents, or the backend of its chat scheduler, if it has any.

    Raises:
        InputError: when the chat scheduler cannot be loaded, or the server cannot start.

    Example:
        async with open_front(config, runner, scheduler):
            group = await runner.run_group(scheduler, problem, config.sampling, tag="demo")
    """
    if config.rollout.loop == "agent":
        server = (await import_server())(config, generator, port=0)
        await server.start()
        runner.server = server
        try:
            yield
        finally:
            await runner.close()
            await server.stop()
    elif config.rollout.loop == "chat_scheduler":
        scheduler = await run_in_thread(lambda: load_chat_scheduler(config.rollout.chat_scheduler))
        runner.chats = chats = ChatBackend(config, generator, scheduler)
        await chats.start()
        try:
            yield
        finally:
            await chats.stop()
    else:
        yield
