"""The fleet: Ray, the engines, and a server in front of them.

`open_server` starts a fleet that only serves; `run.runtime` uses the same parts to start one that
also generates trajectories and trains.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import ray
from ray.actor import ActorHandle as RayActor

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config
from turnwise.config.gpus import gpu_share
from turnwise.core import fork_server
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.optional import check_vllm
from turnwise.core.precision import precision
from turnwise.core.ray import leave_ray, start_ray, watching_ray
from turnwise.run.display import SILENT, Display, show_part
from turnwise.run.scaling import scaling
from turnwise.serving.engine_host import EngineHost
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.openai.opening import import_server, make_server
from turnwise.serving.openai.serving_host import ServingHost
from turnwise.serving.placement import WorkerStarter
from turnwise.serving.worker_handle import WorkerHandle

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer

SERVER = "starting the OpenAI server"


class Front(Protocol):
    """A server, or another front end of a fleet."""

    async def start(self) -> object: ...

    async def stop(self) -> None: ...


_Front = TypeVar("_Front", bound=Front)
_Imported = TypeVar("_Imported")


@asynccontextmanager
async def open_server(config: Config, progress: Display = SILENT) -> AsyncIterator["OpenAIServer"]:
    """Start Ray, the workers and the OpenAI server in front of them; stop them all on exit."""
    if config.engine.metrics is None:
        config = config.changed({"engine": {"metrics": True}})

    def front(server: "type[OpenAIServer]", manager: AsyncLLMServerManager) -> "OpenAIServer":
        scheduler, processes = manager.scheduler, None
        if config.serving.session_processes:
            from turnwise.serving.front_processes import FrontProcesses

            processes = FrontProcesses(config, scheduler, make_server=make_server)
        return server(config, scheduler, processes=processes)

    async with open_fleet(config, progress, SERVER, import_server, front) as (manager, server):
        server.workers = lambda: manager.base_urls
        yield server


@asynccontextmanager
async def open_fleet(
    config: Config,
    progress: Display,
    name: str,
    load: Callable[[], Coroutine[object, object, _Imported]],
    make_front: Callable[[_Imported, AsyncLLMServerManager], _Front],
    hosts: Mapping[str, RayActor] | None = None,
    host: type[EngineHost] | None = None,
) -> AsyncIterator[tuple[AsyncLLMServerManager, _Front]]:
    """Start the workers and the front end concurrently; `load` imports what the front end needs."""
    begin_imports(config)
    with progress.part("loading the tokenizer"):
        await run_in_thread(lambda: load_tokenizer(config.model))
    async with AsyncExitStack() as stack:
        importing = asyncio.ensure_future(load())
        stack.callback(importing.cancel)
        config, gpus = await stack.enter_async_context(ray_running(config, progress))
        share = gpu_share(config, gpus, training=False) if hosts is None else 0.0
        manager = make_manager(config, share, hosts, host=host)
        stack.push_async_callback(manager.shutdown)
        front = make_front(await importing, manager)
        stack.push_async_callback(front.stop)
        async with task_group() as starting:
            starting.create_task(show_part(progress, starting_engines(config), manager.start))
            starting.create_task(show_part(progress, name, front.start))
        if hosts is None:  # with hosts, the number of workers is fixed
            await stack.enter_async_context(scaling(config, manager))
        async with watching_ray(config.ray_address):
            yield manager, front


@asynccontextmanager
async def ray_running(config: Config, progress: Display) -> AsyncIterator[tuple[Config, float]]:
    """Start Ray, and shut it down with all its actors on exit; or use the Ray that the program is
    already connected to, and leave it running. Yield the configuration, with the model's precision
    set for its devices, and the number of GPUs."""
    where = config.ray_address, config.ray_env
    starting = asyncio.ensure_future(
        show_part(progress, "starting Ray", lambda: run_in_thread(start_ray, *where))
    )
    try:
        gpus = await asyncio.shield(starting)
        dtype = await run_in_thread(precision, config.model, gpus > 0)
        yield config.changed({"model": {"dtype": dtype}}), gpus
    finally:
        await asyncio.wait([starting])  # Ray's start cannot be cancelled
        if starting.exception() is None:
            await run_in_thread(leave_ray)


def begin_imports(config: Config) -> None:
    """Start importing the workers' modules in the process from which workers are forked."""
    check_vllm()
    if config.ray_address is None and not config.ray_env and not ray.is_initialized():
        fork_server.address()


def starting_engines(config: Config) -> str:
    return f"starting {count_of(config.serving.min_workers, 'engine')}"


def count_of(number: int, noun: str) -> str:
    """Return a number and its noun, as in "1 engine" and "2 engines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def make_manager(
    config: Config,
    share: float,
    hosts: Mapping[str, RayActor] | None = None,
    prefix: str = "",
    host: type[EngineHost] | None = None,
) -> AsyncLLMServerManager:
    """Return a manager of workers that are not started yet. Each device gets a `share` of a GPU;
    with `hosts`, the models run in these `WorkerHost`s instead. Names of processes begin with
    `prefix`; `host` is the class of the workers' actors."""
    if host is None:
        host = ServingHost if config.serving.worker_servers else EngineHost
    starter, seconds = WorkerStarter(config, share, hosts, host), config.engine.start_timeout
    seconds += config.engine.request_timeout
    ends = starter.end, starter.leave

    async def start(name: str, index: int) -> WorkerHandle:
        return await starter(f"{prefix}{name}", index)

    return AsyncLLMServerManager(start, config.serving, config.weights, seconds, *ends)
