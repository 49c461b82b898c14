"""Start and stop engines, a trainer of adapters and a server for Tinker's clients together."""

import fcntl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, load_config, make_config
from turnwise.config.base import NEEDED_KEYS, Tree
from turnwise.config.gpus import gpu_share
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.ray import watching_ray
from turnwise.errors import InputError, translate_unwritable
from turnwise.run.display import SILENT, Display, show_part
from turnwise.run.fleet import SERVER, begin_imports, make_manager, ray_running, starting_engines
from turnwise.serving.openai.opening import make_server
from turnwise.tinker.access import TinkerAccess
from turnwise.tinker.losses import STAND_INS
from turnwise.tinker.routes import add_routes
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import message_classes
from turnwise.training.trainer_group import TrainerGroup

KEY_PREFIX = "tml-"
"""Beginning of every key that the SDK accepts."""
DEFAULTS: Tree = {
    "name": "tinker",
    "model": {"lora": {"rank": 128}},
    "weights": {"lora": "adapter"},
    "engine": {"vllm_args": {"max_loras": 8, "max_cpu_loras": 8}},
}
"""Defaults of a server's configuration, such as the maximum rank of an adapter, and the number of
adapters that can sample at once."""


def server_config(
    model: str | None, file: Path | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Return a server's configuration for a model, from the defaults and, if given, a file.

    Raises:
        InputError: when there is no model, or the server cannot work as configured.
    """
    settings = {} if model is None else {"model.path": model}
    if file is None:
        config = make_config({}, overrides, DEFAULTS, settings, NEEDED_KEYS)
    else:
        config = load_config(file, overrides, DEFAULTS, settings, NEEDED_KEYS)
    if not config.model.lora.rank or config.weights.lora != "adapter":
        raise InputError(
            "a Tinker server trains adapters: model.lora.rank must be the largest rank that "
            "clients may ask for, and weights.lora must be adapter"
        )
    if config.training.colocated:
        raise InputError(
            "a Tinker server trains beside its engines, which sample at any time: leave out "
            "training.colocated"
        )
    key = config.serving.key
    if key is not None and not key.startswith(KEY_PREFIX):
        raise InputError(
            f"serving.api_key (or TURNWISE_API_KEY) must begin with {KEY_PREFIX}: Tinker's SDK "
            "sends no other key"
        )
    message_classes()  # fail before anything slow if protobuf is missing
    return config


@asynccontextmanager
async def open_tinker(
    config: Config, progress: Display = SILENT, stable: str = ""
) -> AsyncIterator[str]:
    """Start everything, and stop it on exit; yield the URL to set as TINKER_BASE_URL. `stable` is
    the loss to compute for stable_reinforce; "" refuses stable_reinforce."""
    if stable not in ("", *STAND_INS):
        raise InputError(f"stable-reinforce {stable!r}: it may be {', '.join(STAND_INS)}")
    begin_imports(config)
    folder = await run_in_thread(config.run_folder.absolute)
    async with AsyncExitStack() as stack:
        stack.enter_context(_alone_in(folder))
        config, gpus = await stack.enter_async_context(ray_running(config, progress))
        share = gpu_share(config, gpus, training=True)
        manager = make_manager(config, share)
        stack.push_async_callback(manager.shutdown)
        start = partial(TrainerGroup.start, config, folder, num_gpus=share)
        trainers = show_part(progress, "starting the trainer", start)
        async with task_group() as starting:
            starting.create_task(show_part(progress, starting_engines(config), manager.start))
            started = starting.create_task(trainers)
            texts = starting.create_task(run_in_thread(load_tokenizer, config.model))
        trainer = started.result()
        stack.push_async_callback(trainer.close)
        words, decode = await trainer.begin_adapters(), texts.result().decode
        made = trainer, words, folder, decode, stable
        service = TinkerService(config, manager.scheduler, *made)
        await run_in_thread(service.restore)
        server = await make_server(
            config,
            manager.scheduler,
            extend=lambda app: add_routes(app, service),
            access=TinkerAccess(),
        )
        stack.push_async_callback(server.stop)
        await show_part(progress, SERVER, server.start)
        async with task_group() as tasks, watching_ray(config.ray_address):
            watching = [tasks.create_task(one) for one in (trainer.watch(), service.watch())]
            yield server.base_url.removesuffix("/v1")
            for task in watching:
                task.cancel()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Refuse a second server in a folder, because it would treat the first server as killed."""
    with translate_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "tinker.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is another server's: choose another name=...") from None
        yield
