"""What training, evaluation and plain rollouts run on: the engine, the runner, the policy.

`open_machinery` starts them side by side and ends them all, whatever happens in between.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from turnwise import fork_server
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.ray_calls import start_ray, watching_ray
from turnwise.rollout import (
    Group,
    Problem,
    Runner,
    check_failures,
    load_eval_rows,
    load_rows,
)
from turnwise.rollout.evaluation import summarize
from turnwise.rollout.loops import load_chat_scheduler
from turnwise.rollout.reward_model import start_reward_models
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.placement import WorkerStarter
from turnwise.sources import check_model, check_tokenizer
from turnwise.tasks import run_in_thread, task_group
from turnwise.training.remote import RemotePolicy
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from turnwise.serving.openai_server import OpenAIServer

_Result = TypeVar("_Result")
_TRAINER = "starting the trainer"
_SERVER = "starting the OpenAI server"
_CHATS = "starting the chat scheduler"


class Progress(Protocol):
    """What watches a run; `turnwise.display` shows it to a person."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """A part of the start ("starting Ray"), while it lasts; several run side by side."""
        ...

    def phase(self, name: str, total: int = 0) -> None:
        """The run now does this, in `total` parts where they can be counted."""
        ...

    def advance(self) -> None:
        """One part of the phase is done."""
        ...

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is done, or (step 0) the first evaluation."""
        ...

    def warn(self, text: str) -> None:
        """Something that a person should know at once; called from any thread."""
        ...


class Silent:
    """A `Progress` that nobody watches."""

    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str, total: int = 0) -> None: ...

    def advance(self) -> None: ...

    def step(self, metrics: dict[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...


_SILENT = Silent()


async def _part(progress: Progress, name: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
    """Show a part of the start while it lasts."""
    with progress.part(name):
        return await work()


@dataclass(slots=True)
class Machinery:
    """What a run works with; made and ended by `open_machinery`."""

    manager: AsyncLLMServerManager
    runner: Runner
    policy: RemotePolicy | None
    left_out: frozenset[str] = frozenset()
    """Problems whose prompt is too long (data.max_prompt_tokens)."""

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems that are not left out."""
        return [problem for problem in problems if problem.id not in self.left_out]

    @property
    def generator(self) -> Generator:
        """What agent loops sample from."""
        return self.manager.scheduler


@asynccontextmanager
async def open_machinery(
    config: Config,
    problems: Sequence[Problem],
    *,
    folder: Path | None = None,
    progress: Progress = _SILENT,
) -> AsyncIterator[Machinery]:
    """Start Ray, the engines and, for training, the policy, side by side; end them all after.

    Args:
        problems: All that will be run; each is checked once.
        folder: Of a run that trains.
        progress: Shown what is started.

    Raises:
        InputError: when anything that the user gave cannot be used; nothing is left running.
    """
    _begin_imports(config)
    with progress.part("loading the tokenizer"):
        runner = await run_in_thread(lambda: _make_runner(config, problems))
        scheduler = await run_in_thread(lambda: load_chat_scheduler(config.rollout.chat_scheduler))
    # Ray's start cannot be cancelled: it is waited for before Ray is ended.
    ray_started = asyncio.ensure_future(
        _part(progress, "starting Ray", lambda: asyncio.to_thread(start_ray, config.ray_address))
    )
    rendering = f"rendering {_count(len(problems), 'prompt')}"
    prepared = asyncio.ensure_future(
        _part(progress, rendering, lambda: run_in_thread(lambda: _prepare(runner, problems)))
    )
    manager: AsyncLLMServerManager | None = None
    server: OpenAIServer | None = None
    chats: ChatBackend | None = None
    policy: RemotePolicy | None = None
    try:
        gpus = await asyncio.shield(ray_started)
        share = _gpu_share(config, gpus, training=folder is not None)

        def start_policy() -> Awaitable[RemotePolicy]:
            assert folder is not None
            return RemotePolicy.start(config, folder, num_gpus=share)

        if folder is not None and config.training.colocated:
            policy = await _part(progress, _TRAINER, start_policy)
            manager = make_manager(config, share, policy.actors)
        else:
            manager = make_manager(config, share)
        async with task_group() as starting:
            starting.create_task(_part(progress, _engines(config), manager.start))
            rewards = starting.create_task(_start_reward_models(config, progress))
            if folder is not None and policy is None:
                own = starting.create_task(_part(progress, _TRAINER, start_policy))
            await asyncio.shield(prepared)
        runner.rewards.models = rewards.result()
        if folder is not None and policy is None:
            policy = own.result()
        if config.rollout.loop == "agent":
            with progress.part(_SERVER):
                server = (await run_in_thread(_import_server))(config, manager.scheduler, port=0)
                await server.start()
            runner.server = server
        if config.rollout.loop == "chat_scheduler":
            runner.chats = chats = ChatBackend(config, manager.scheduler, scheduler)
            await _part(progress, _CHATS, chats.start)
        async with watching_ray(config.ray_address):
            yield Machinery(manager, runner, policy, prepared.result())
    finally:
        prepared.cancel()
        await asyncio.wait([ray_started])
        if server is not None:
            await server.stop()
        if chats is not None:
            await chats.stop()
        if manager is not None:
            await manager.shutdown()
        await asyncio.to_thread(ray.shutdown)  # ends the policy, and a worker half started


class _Front(Protocol):
    """What stands before a fleet: the OpenAI server, or what answers chats without HTTP."""

    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


_FrontType = TypeVar("_FrontType", bound=_Front)


@asynccontextmanager
async def open_server(
    config: Config, progress: Progress = _SILENT
) -> AsyncIterator["OpenAIServer"]:
    """Start Ray, the workers and the OpenAI server before them; end them all after.

    Args:
        progress: Shown what is started.

    Raises:
        InputError: when anything that the user gave cannot be used; nothing is left running.
    """
    if config.engine.metrics is None:
        engine = config.engine.model_copy(update={"metrics": True})
        config = config.model_copy(update={"engine": engine})

    def prepare() -> Callable[[AsyncLLMServerManager], "OpenAIServer"]:
        make = _import_server()
        return lambda manager: make(config, manager.scheduler)

    async with _open_fleet(config, progress, _SERVER, prepare) as (manager, server):
        server.workers = lambda: manager.base_urls
        yield server


@asynccontextmanager
async def open_manager(
    config: Config, progress: Progress = _SILENT
) -> AsyncIterator[AsyncLLMServerManager]:
    """Start Ray and the workers, with `submit_chat_completions` and `generate_sequences` on them.

    Args:
        progress: Shown what is started.

    Raises:
        InputError: when anything that the user gave cannot be used; nothing is left running.
    """

    def prepare() -> Callable[[AsyncLLMServerManager], ChatBackend]:
        scheduler = load_chat_scheduler(config.rollout.chat_scheduler)
        return lambda manager: ChatBackend(config, manager.scheduler, scheduler)

    async with _open_fleet(config, progress, _CHATS, prepare) as (manager, chats):
        manager.chats = chats
        yield manager


@asynccontextmanager
async def _open_fleet(
    config: Config,
    progress: Progress,
    name: str,
    prepare: Callable[[], Callable[[AsyncLLMServerManager], _FrontType]],
) -> AsyncIterator[tuple[AsyncLLMServerManager, _FrontType]]:
    """Start the workers and, beside them, what stands before them.

    Args:
        name: Of its start, for people.
        prepare: Imports what it takes, and returns what makes it.
    """
    _begin_imports(config)
    with progress.part("loading the tokenizer"):
        await run_in_thread(lambda: _load_tokenizer(config))
    ray_started = asyncio.ensure_future(
        _part(progress, "starting Ray", lambda: asyncio.to_thread(start_ray, config.ray_address))
    )
    importing = asyncio.ensure_future(run_in_thread(prepare))
    manager: AsyncLLMServerManager | None = None
    front: _FrontType | None = None
    try:
        gpus = await asyncio.shield(ray_started)
        manager = make_manager(config, _gpu_share(config, gpus, training=False))
        front = (await importing)(manager)
        async with task_group() as starting:
            starting.create_task(_part(progress, _engines(config), manager.start))
            starting.create_task(_part(progress, name, front.start))
        async with watching_ray(config.ray_address):
            yield manager, front
    finally:
        importing.cancel()
        await asyncio.wait([ray_started])
        if front is not None:
            await front.stop()
        if manager is not None:
            await manager.shutdown()
        await asyncio.to_thread(ray.shutdown)


def _begin_imports(config: Config) -> None:
    """Let the process that workers are forked from import what they need."""
    if config.ray_address is None:
        fork_server.address()


def _import_server() -> "type[OpenAIServer]":
    """Take the seconds that vLLM's application takes to import."""
    from turnwise.serving.openai_server import OpenAIServer

    return OpenAIServer


async def _start_reward_models(config: Config, progress: Progress) -> Mapping[str, Any]:
    count = sum(1 for part in config.rollout.rewards if part.model)
    with progress.part(f"starting {_count(count, 'reward model')}") if count else nullcontext():
        return await start_reward_models(config)


def _engines(config: Config) -> str:
    return f"starting {_count(config.serving.workers, 'engine')}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def make_manager(
    config: Config, gpu_share: float, hosts: Mapping[str, Any] | None = None
) -> AsyncLLMServerManager:
    """The fleet of `serving.workers` workers, each device on `gpu_share` of a GPU; not yet started.

    Args:
        hosts: Handles of `WorkerHost`s, by name, in which the workers' models live: one for each
            device of an engine.
    """
    return AsyncLLMServerManager(
        WorkerStarter(config, gpu_share, hosts),
        config.serving,
        config.weights,
        config.engine.start_timeout + config.engine.request_timeout,
    )


def _gpu_share(config: Config, gpus: float, training: bool) -> float:
    """Share of a GPU for each device of an engine and each rank of the trainer: 1, or less where
    there are fewer GPUs than these."""
    takers = config.serving.workers * config.engine.devices
    if training and not config.training.colocated:
        takers += config.training.ranks
    return min(1.0, gpus / takers)


def _load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    model = config.model
    check_model(model.path)
    key, path = "model.path", model.path
    if model.tokenizer is not None:
        key, path = "model.tokenizer", model.tokenizer
        check_tokenizer(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{key}: the tokenizer of {path} cannot be loaded: {reason}") from error


def _make_runner(config: Config, problems: Sequence[Problem]) -> Runner:
    """The runner, with the first problem checked: most mistakes show there, before anything is
    started. It imports and calls user code."""
    runner = Runner(config, _load_tokenizer(config))
    runner.check(problems[:1])
    return runner


def _prepare(runner: Runner, problems: Sequence[Problem]) -> frozenset[str]:
    """What takes seconds: every row's prompt, and vLLM's parsers; returns who is left out."""
    fitting = {problem.id for problem in runner.fitting(problems)}
    _ = runner.tool_parser
    return frozenset(problem.id for problem in problems) - fitting


@dataclass(slots=True)
class Evaluation:
    """How the model did on held-out problems."""

    trajectories: list[Trajectory]
    dropped: Counter[str]
    seconds: float
    summary: dict[str, float]
    """As `rollout.evaluation.summarize` has it."""

    @property
    def accuracy(self) -> float:
        """The share of trajectories whose reward is `eval.success_reward` or more; dropped ones
        count as wrong."""
        return self.summary["accuracy"]

    @property
    def tokens_per_s(self) -> float:
        return sum(t.sampled_tokens for t in self.trajectories) / self.seconds


async def run_groups(
    machinery: Machinery,
    problems: Sequence[Problem],
    sampling: SamplingConfig,
    tag: str,
    progress: Progress,
) -> list[Group]:
    """Run the groups of all problems side by side; results are in the problems' order."""

    async def one(problem: Problem) -> Group:
        group = await machinery.runner.run_group(machinery.generator, problem, sampling, tag)
        progress.advance()
        return group

    return await asyncio.gather(*map(one, machinery.fitting(problems)))


async def evaluate(
    machinery: Machinery,
    problems: Sequence[Problem],
    config: Config,
    progress: Progress,
    tag: str = "eval",
) -> Evaluation:
    """Run each problem under `eval.sampling`.

    Raises:
        StepError: when more than `rollout.max_failed_fraction` of the trajectories fail.
    """
    problems = machinery.fitting(problems)
    progress.phase("evaluate", len(problems))
    started = time.perf_counter()
    groups = await run_groups(machinery, problems, config.eval.sampling, tag, progress)
    seconds = time.perf_counter() - started
    dropped = check_failures(groups, config.rollout.max_failed_fraction, "evaluation")
    trajectories = [t for group in groups for t in group.trajectories]
    summary = summarize(groups, config.eval.sampling.n, config.eval.success_reward)
    return Evaluation(trajectories, dropped, seconds, summary)


def mean(values: Sequence[float]) -> float:
    """The mean, 0.0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def load_training(config: Config) -> list[Problem]:
    """The problems of data.path."""
    data = config.data
    rows = load_rows(data.path, split=data.split, subset=data.subset, limit=data.limit)
    return _problems(data.path, rows)


def load_heldout(config: Config) -> list[Problem]:
    """The problems of data.eval_path, or of data.path where there is none."""
    return _problems(*load_eval_rows(config.data))


def load_problems(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Training problems, and held-out ones where data.eval_path names some."""
    heldout = load_heldout(config) if config.data.eval_path else []
    return load_training(config), heldout


def _problems(path: str, rows: Sequence[dict[str, Any]]) -> list[Problem]:
    name = Path(path).name
    return [Problem(f"{name}:{number}", row) for number, row in enumerate(rows, start=1)]
