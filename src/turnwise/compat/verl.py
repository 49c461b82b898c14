"""verl's server manager behind plain calls: engines, and chats and batches on them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Self, TypeVar

from turnwise.config import NO_DEADLINE, Config, load_config
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread
from turnwise.errors import InputError
from turnwise.run.fleet import open_manager
from turnwise.serving.chat_scheduler import Callback, ChatBackend, ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.trajectory import Message

_Result = TypeVar("_Result")
_Opened = tuple[AsyncLLMServerManager, ChatBackend]
_START_SECONDS = 120.0
"""Deadline of the work before the engines start: imports and Ray."""
_STOP_SECONDS = 60.0


class LLMServerManager:
    """The engines of a configuration behind plain calls; a context manager.

    The engines run in a separate thread for the duration of the `with` block.

    Args:
        config: A YAML file or a `Config`; a file may leave out `environment` and `data`.
        overrides: `key.sub=value` changes to a file.

    Example:
        with LLMServerManager("config.yaml") as manager:
            batch = manager.generate_sequences([[{"role": "user", "content": "2 + 2?"}]], n=4)
            batch.batch["responses"]  # [4, R]
    """

    def __init__(self, config: str | Path | Config, overrides: Sequence[str] = ()) -> None:
        if not isinstance(config, Config):
            config = load_config(config, overrides, optional=("environment", "data.path"))
        self.config = config
        self._thread: EventLoopThread[_Opened] | None = None
        self._opened: _Opened | None = None
        self._asleep = False

    def __enter__(self) -> Self:
        """Start all engines in parallel."""
        if self._thread is not None:
            raise InputError("a manager can run only once: create another")
        self._thread = EventLoopThread(lambda: open_manager(self.config), "the manager")
        try:
            self._opened = self._thread.start(self.config.engine.start_timeout + _START_SECONDS)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._thread is not None
        self._opened = None
        self._thread.leave(_STOP_SECONDS, error)

    @property
    def chat_scheduler(self) -> ChatCompletionScheduler:
        """The scheduler of chats; its methods may be awaited on any event loop, as callbacks do."""
        chats = self._running[1]
        return chats.scheduler(chats)

    @property
    def server_addresses(self) -> list[str]:
        """Base URLs of the workers' own OpenAI servers (`serving.worker_servers`)."""
        return list(self._running[0].base_urls.values())

    def submit_chat_completions(
        self,
        callback: Callback,
        callback_additional_info: JsonObject,
        **chat_complete_request: object,
    ) -> None:
        """Complete a chat and wait for its callback, with all further turns that it awaits.

        The callback runs on a new event loop in this thread; inside a running event loop, await
        `chat_scheduler.submit_chat_completions` instead, which takes the same arguments.
        """
        self._check_awake()
        submit = self.chat_scheduler.submit_chat_completions
        asyncio.run(submit(callback, callback_additional_info, **chat_complete_request))

    def generate_sequences(
        self, prompts: DataProto | Sequence[Sequence[Message]], **sampling_params: object
    ) -> DataProto:
        """Hold conversations in parallel; see `ChatBackend.generate_sequences`."""
        self._check_awake()
        return self._call(
            lambda _, chats: chats.generate_sequences(prompts, **sampling_params),
            NO_DEADLINE,  # each conversation has its own
            "the conversations",
        )

    def sleep(self) -> None:
        """Free the engines' memory; until `wake_up` turns in progress wait, and none can start."""
        seconds = self.config.engine.request_timeout
        self._call(lambda manager, _: manager.sleep(), seconds, "the engines to sleep")
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving; `tags` (weights, kv_cache) wake a part, None wakes all of it."""
        seconds = self.config.engine.request_timeout
        self._call(lambda manager, _: manager.wake_up(tags), seconds, "the engines to wake up")
        self._asleep = bool(tags) and "kv_cache" not in (tags or ())

    def _check_awake(self) -> None:
        if self._asleep:
            raise InputError("the engines sleep: call wake_up first")

    @property
    def _running(self) -> _Opened:
        if self._opened is None:
            raise InputError("the manager does not run: use it inside its with block")
        return self._opened

    def _call(
        self,
        work: Callable[[AsyncLLMServerManager, ChatBackend], Coroutine[object, None, _Result]],
        seconds: float,
        who: str,
    ) -> _Result:
        opened, thread = self._running, self._thread
        assert thread is not None
        return thread.call(lambda: work(*opened), seconds, who)
