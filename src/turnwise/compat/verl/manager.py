"""verl's server manager with blocking calls: engines that answer chats and batches of prompts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import NoReturn, Self
from urllib.parse import urlsplit

import ray
from ray.actor import ActorHandle as RayActor

from turnwise.compat.verl.chat_scheduler import Callback, ChatBackend, ChatCompletionScheduler
from turnwise.compat.verl.data_proto import DataProto
from turnwise.compat.verl.loop import ChatSchedulerLoop, import_chat_scheduler
from turnwise.config import NO_DEADLINE, Config, ConfigSource, load_config
from turnwise.config.base import NEEDED_KEYS, Tree
from turnwise.core.json_types import Args, JsonObject, Kwargs
from turnwise.core.loop_thread import EventLoopThread
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code
from turnwise.errors import InputError
from turnwise.run.display import SILENT, Display
from turnwise.run.fleet import open_fleet
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.openai.serving_host import ServingHost
from turnwise.serving.seats import engine_admission, limits_of
from turnwise.trajectory import Message
from turnwise.weights.manifest import Manifest
from turnwise.weights.sync import WeightSync
from turnwise.weights.transport import find_transport

_START_SECONDS = 120.0  # for imports and Ray, before the engines start
_GRACE_SECONDS = 20.0  # the engines' own deadline passes first, as its error is more specific


class ChatHost(ServingHost):
    """A worker's actor class that also answers chats without HTTP, as verl's server actor does."""

    _chats: "asyncio.Task[ChatBackend] | None" = None

    async def chat_completion_generator(self, request: Foreign) -> AsyncIterator[tuple[int, str]]:
        """Answer a chat request.

        Args:
            request: vLLM's `ChatCompletionRequest`, or a dictionary of its keys.

        Yields:
            An HTTP status and a server-sent event ("data: ..." and an empty line): one pair for
            the answer or error; with `stream`, one pair for each chunk and one for "[DONE]".
        """
        tree = request if isinstance(request, dict) else request.model_dump(exclude_unset=True)
        if self._chats is None:
            self._chats = asyncio.create_task(self._start_chats())
        chats = await asyncio.shield(self._chats)
        async with aclosing(chats.events(tree)) as events:
            async for event in events:
                yield event

    async def _start_chats(self) -> ChatBackend:
        chats = ChatBackend(self._config, self.turns)
        await chats.start()
        return chats


@asynccontextmanager
async def open_manager(
    config: Config,
    progress: Display = SILENT,
    hosts: Mapping[str, RayActor] | None = None,
) -> AsyncIterator[tuple[AsyncLLMServerManager, ChatBackend]]:
    """Start Ray, the workers, and a chat backend in front of them; stop them all on exit.

    Args:
        hosts: The program's own actors, by name, in which the workers run; the program must already
            be connected to Ray then. None starts new actors.
    """
    async with open_fleet(
        config,
        progress,
        ChatSchedulerLoop.front,
        partial(import_chat_scheduler, config.rollout, config.engine.start_timeout),
        lambda chat_scheduler, manager: ChatBackend(
            config,
            manager.scheduler,
            chat_scheduler,
            engine_admission(limits_of(config), manager.scheduler),
        ),
        hosts,
        ChatHost,
    ) as opened:
        yield opened


class LLMServerManager:
    """The engines of a configuration behind blocking calls; a context manager.

    A separate thread controls the engines during the `with` block, or from `start` to `shutdown`.

    Args:
        config: A YAML file, a dictionary, OmegaConf's `DictConfig`, a dataclass or a `Config`. All
            but a `Config` may leave out `environment` and `data`; their workers serve HTTP unless
            `serving.worker_servers` is false, and their `sampling.n` is 1 unless it is set.
        overrides: `key.sub=value` changes; not of a `Config`.
        workers: Handles of your own actors (`WorkerHost`), in which the engines run. Each
            `engine.tensor_parallel_size` successive actors hold one engine. None starts processes
            for the engines.

    Raises:
        InputError: when the number of actors is not a multiple of the number of devices of an
            engine.

    Example:
        with LLMServerManager("config.yaml") as manager:
            batch = manager.generate_sequences([[{"role": "user", "content": "2 + 2?"}]], n=4)
            batch.batch["responses"]  # [4, R]
    """

    def __init__(
        self,
        config: ConfigSource,
        overrides: Sequence[str] = (),
        *,
        workers: Sequence[RayActor] | None = None,
    ) -> None:
        if not isinstance(config, Config):
            defaults: Tree = {"serving": {"worker_servers": True}, "sampling": {"n": 1}}
            config = load_config(config, overrides, defaults, optional=NEEDED_KEYS)
        hosts: dict[str, RayActor] | None = None
        if workers is not None:
            count, rest = divmod(len(workers), config.engine.tensor_parallel_size)
            if rest or not count or config.engine.pipeline_parallel_size > 1:
                raise InputError(
                    f"there are {len(workers)} workers, no multiple of engine.tensor_parallel_size "
                    f"{config.engine.tensor_parallel_size} with engine.pipeline_parallel_size 1"
                )
            if not ray.is_initialized():
                raise InputError("the workers' Ray is not connected: pass handles of live actors")
            hosts = {f"workers[{index}]": worker for index, worker in enumerate(workers)}
            config = config.changed({"serving": {"workers": count, "spread": False}})
        self.config = config
        self._thread = EventLoopThread(partial(open_manager, config, hosts=hosts), "the manager")
        self._asleep = False

    def start(self) -> Self:
        """Start all engines in parallel, as the beginning of a `with` block does."""
        with ExitStack() as stack:
            stack.enter_context(self._thread)
            self._thread.start(self.config.engine.start_timeout + _START_SECONDS)
            stack.pop_all()
        return self

    def shutdown(self) -> None:
        """End all engines, as the end of a `with` block does."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._thread.__exit__(kind, error, traceback)

    @property
    def chat_scheduler(self) -> ChatCompletionScheduler:
        """The only instance of the chat scheduler. Its methods may be awaited on any event loop,
        also in callbacks."""
        return self._thread.opened[1].instance

    @property
    def async_llm_servers(self) -> list[RayActor]:
        """Ray handles of the workers; their `chat_completion_generator` answers chats."""
        return [engine.actor for engine in self._thread.opened[0].engines]

    @property
    def server_addresses(self) -> list[str]:
        """Addresses HOST:PORT of the workers' OpenAI servers, for
        `base_url=f"http://{address}/v1"`. Clients on other nodes need `serving.host` 0.0.0.0.
        Raises `InputError` if `serving.worker_servers` is false."""
        if not self.config.serving.worker_servers:
            raise InputError("server_addresses needs serving.worker_servers: set it to true")
        return [urlsplit(url).netloc for url in self._thread.opened[0].base_urls.values()]

    def submit_chat_completions(
        self,
        callback: Callback,
        callback_additional_info: JsonObject,
        **chat_complete_request: object,
    ) -> None:
        """Complete a chat, and wait for its callback and all further turns that it awaits.

        The callback runs on a new event loop in this thread. Inside a running event loop, await
        `chat_scheduler.submit_chat_completions` instead; it takes the same arguments.
        """
        self._check_awake()
        submit = self.chat_scheduler.submit_chat_completions
        asyncio.run(submit(callback, callback_additional_info, **chat_complete_request))

    def generate_sequences(
        self, prompts: DataProto | Sequence[Sequence[Message]], **sampling_params: object
    ) -> DataProto:
        """Run conversations concurrently; see `ChatBackend.generate_sequences`."""
        self._check_awake()
        work = partial(self._thread.opened[1].generate_sequences, prompts, **sampling_params)
        # Each conversation has its own deadline.
        return self._thread.call(work, NO_DEADLINE, "the conversations")

    def update_weights(self, publish: Callable[[], Manifest]) -> int:
        """Load new weights into all engines, or into none; return the weights' version.

        Args:
            publish: Makes every actor publish its weights (`WorkerHost.publish_weights`), and
                returns the first actor's result. It is called again after an engine's restart.

        Raises:
            WeightUpdateError: when an engine refuses the weights.
        """
        seconds, patience = self.config.weights.update_timeout, self.config.engine.start_timeout
        sync = WeightSync(_Publisher(publish, seconds), seconds, patience)

        async def update() -> int:
            await sync.publish()
            updated = await self._thread.opened[0].update_weights(sync)
            return max(each.version for each in updated)

        # The limit applies once each to publishing, checking and loading.
        return self._thread.call(update, 3 * seconds, "the engines' new weights")

    def sleep(self) -> None:
        """Free the engines' memory. Until `wake_up`, turns in progress pause, and no new turn can
        start."""
        work, seconds = self._thread.opened[0].sleep, self.config.engine.request_timeout
        self._thread.call(work, seconds, "the engines to sleep")
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving. `tags` selects the memory to restore ("weights", "kv_cache"); None
        restores all of it."""
        work = partial(self._thread.opened[0].wake_up, tags)
        self._thread.call(work, self.config.engine.request_timeout, "the engines to wake up")
        self._asleep = bool(tags) and "kv_cache" not in (tags or ())

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Args = (), kwargs: Kwargs = None
    ) -> list[Foreign]:
        """Call a method of all engines' workers, such as a method of the class in
        `engine.vllm_args.worker_extension_cls`; see `VllmEngine.collective_rpc`."""
        rpc = self._thread.opened[0].scheduler.collective_rpc
        work = partial(rpc, method, timeout, args, kwargs)
        seconds = (timeout or self.config.engine.request_timeout) + _GRACE_SECONDS
        return self._thread.call(work, seconds, f"the engines to answer {method}")

    def _check_awake(self) -> None:
        if self._asleep:
            raise InputError("the engines sleep: call wake_up first")


class _Publisher:
    """A `Trainer` of `weights.sync` that only publishes."""

    def __init__(self, publish: Callable[[], Manifest], seconds: float) -> None:
        self._publish = publish
        self._seconds = seconds

    async def publish(self) -> Manifest:
        name, key = "the function that publishes the weights", "weights.update_timeout"
        made = await call_user_code(self._publish, name=name, seconds=self._seconds, key=key)
        if not isinstance(made, Manifest):
            kind = type(made).__name__
            raise InputError(f"{name} must return what publish_weights did, and not a {kind}")
        if find_transport(made.transport).streamed:  # its engines wait until the trainer sends
            await self.send()
        return made

    async def send(self, *_: object, **__: object) -> NoReturn:
        raise InputError(
            "update_weights takes weights that are published as a whole, by publish_weights or "
            "the transports shm and disk; ipc and collective need a trainer that sends them"
        )

    rendezvous = join = send
