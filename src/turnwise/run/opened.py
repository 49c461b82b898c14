"""Opening of a program's own run, in the program's event loop or in a separate thread."""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial, update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from rich.console import Console

from turnwise.config import NO_DEADLINE, Config
from turnwise.core import logs
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.interrupt import exit_on_sigterm
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code
from turnwise.core.watchdog import watching_progress
from turnwise.rollouts import Problem
from turnwise.rollouts.problems import first_of_each
from turnwise.run.checks import check_sampled
from turnwise.run.commands import ProgramInputs, all_problems, check_sources
from turnwise.run.display import Display
from turnwise.run.program import AsyncRun
from turnwise.run.run_dir import RunDir, find_resume
from turnwise.run.runtime import open_runtime
from turnwise.trajectory import ExactnessReport

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_START_SECONDS = 600.0
"""Seconds allowed for imports, Ray and the data, before the engines and the trainer start."""


@asynccontextmanager
async def opened_run(
    config: Config, inputs: ProgramInputs, console: Console, resume: Path | None
) -> AsyncIterator[AsyncRun]:
    """Start a run's engines and trainer, and stop them on exit; if `resume` is given, continue that
    run from its last checkpoint."""
    check_sampled(config)
    check_sources(config, *inputs.paths(config))
    start = None if resume is None else await run_in_thread(find_resume, resume)
    display = Display(config.name, config.training.steps, console, config.eval.success_reward)
    with logs.open_logs(config.run_folder, config.log_level), ExitStack() as shown:
        shown.enter_context(display)
        load = partial(all_problems, config, inputs)
        data, heldout = await call_user_code(load, name="the data", seconds=_START_SECONDS)
        files = await run_in_thread(RunDir, config, start)
        runtime_of = partial(open_runtime, folder=files.path, progress=display)
        own = inputs.environment_for(config)
        try:
            async with (
                runtime_of(config, first_of_each(data), environment=own) as runtime,
                task_group() as tasks,
            ):
                run = AsyncRun(config, runtime, data, heldout, files)
                assert runtime.policy is not None
                watching = tasks.create_task(runtime.policy.watch())
                if start is None:
                    await run.sync()
                else:
                    await run.load(start.checkpoint)
                shown.close()  # from here on, the program shows its own progress
                try:
                    yield run
                finally:
                    run.close()
                    watching.cancel()
        finally:
            await run_in_thread(files.metrics.close)
            if files.metrics.rows:
                await run_in_thread(files.draw)


def _waits(
    method: Callable[Concatenate[AsyncRun, _P], Coroutine[Foreign, Foreign, _R]],
) -> Callable[Concatenate["Run", _P], _R]:
    """Return a blocking version of a coroutine method."""

    def call(run: "Run", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return run.call(lambda own: method(own, *args, **kwargs), method.__name__)

    update_wrapper(call, method)
    return call


class Run:
    """A run with blocking calls, for a `with` block; `async with` gives the `AsyncRun` itself.

    Each method runs the `AsyncRun` method of the same name in the run's thread, waits for it, and
    raises its errors. Leaving the block, even by Ctrl-C, ends everything that the run started. The
    attributes are the same as the attributes of `AsyncRun`.

    Example:
        with turnwise.open("config.yaml") as run:
            print(run.sample("What is 1 plus 2?")[0].text)
    """

    def __init__(
        self, config: Config, context: Callable[[], AbstractAsyncContextManager[AsyncRun]]
    ) -> None:
        self.config = config
        self._context = context
        self._thread = EventLoopThread(context, "the run")
        self._stack = ExitStack()
        self._own: AbstractAsyncContextManager[AsyncRun] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(exit_on_sigterm())
            stack.enter_context(self._thread)
            config = self.config
            seconds = config.engine.start_timeout + config.training.step_timeout
            self._thread.start(_START_SECONDS + seconds + 2 * config.weights.update_timeout)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._stack.__exit__(type(error) if error else None, error, None)

    async def __aenter__(self) -> AsyncRun:
        self._own = self._context()
        return await self._own.__aenter__()

    async def __aexit__(self, *error: Foreign) -> None:
        assert self._own is not None
        await self._own.__aexit__(*error)

    def call(self, work: Callable[[AsyncRun], Coroutine[Foreign, Foreign, _R]], name: str) -> _R:
        """Wait for a coroutine of the run, and return its result; `name` is the call's name in
        errors."""
        own = self._thread.opened

        async def watched() -> _R:
            async with watching_progress(self.config.watchdog_seconds, logger.warning):
                return await work(own)

        return self._thread.call(watched, NO_DEADLINE, name)

    @property
    def folder(self) -> Path:
        return self._thread.opened.folder

    @property
    def step(self) -> int:
        return self._thread.opened.step

    @property
    def version(self) -> int:
        return self._thread.opened.version

    @property
    def exactness(self) -> ExactnessReport:
        return self._thread.opened.exactness

    @property
    def state(self) -> JsonObject:
        return self._thread.opened.state

    def problems(self, count: int) -> list[Problem]:
        """Return the next problems of `data.path`, in an endless order of shuffled epochs."""
        return self._thread.opened.problems(count)

    rollout = _waits(AsyncRun.rollout)
    samples = _waits(AsyncRun.samples)
    forward_backward = _waits(AsyncRun.forward_backward)
    forward_backward_custom = _waits(AsyncRun.forward_backward_custom)
    optim_step = _waits(AsyncRun.optim_step)
    drop = _waits(AsyncRun.drop)
    sync = _waits(AsyncRun.sync)
    evaluate = _waits(AsyncRun.evaluate)
    sample = _waits(AsyncRun.sample)
    logprobs = _waits(AsyncRun.logprobs)
    save = _waits(AsyncRun.save)
    load = _waits(AsyncRun.load)
