"""verl's server manager behind plain calls: engines, and chats and batches on them."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from turnwise.config import NO_DEADLINE, Config, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.run.fleet import open_manager
from turnwise.serving.chat_scheduler import Callback, ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto
from turnwise.trajectory import Message

_START_SECONDS = 120.0  # deadline of the work before the engines start: imports and Ray
_GRACE_SECONDS = 20.0  # time after the engines' own deadline, whose error is more specific


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
            config = load_config(config, overrides, optional=NEEDED_KEYS)
        self.config = config
        self._thread = EventLoopThread(lambda: open_manager(self.config), "the manager")
        self._asleep = False

    def __enter__(self) -> Self:
        """Start all engines in parallel."""
        with ExitStack() as stack:
            stack.enter_context(self._thread)
            self._thread.start(self.config.engine.start_timeout + _START_SECONDS)
            stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._thread.__exit__(kind, error, traceback)

    @property
    def chat_scheduler(self) -> ChatCompletionScheduler:
        """The scheduler of chats; its methods may be awaited on any event loop, as callbacks do."""
        chats = self._thread.opened[1]
        return chats.scheduler(chats)

    @property
    def server_addresses(self) -> list[str]:
        """Base URLs of the workers' own OpenAI servers (`serving.worker_servers`)."""
        return list(self._thread.opened[0].base_urls.values())

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
        work = partial(self._thread.opened[1].generate_sequences, prompts, **sampling_params)
        # Each conversation has its own deadline.
        return self._thread.call(work, NO_DEADLINE, "the conversations")

    def sleep(self) -> None:
        """Free the engines' memory; until `wake_up` turns in progress wait, and none can start."""
        work, seconds = self._thread.opened[0].sleep, self.config.engine.request_timeout
        self._thread.call(work, seconds, "the engines to sleep")
        self._asleep = True

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume serving; `tags` (weights, kv_cache) wake a part, None wakes all of it."""
        work = partial(self._thread.opened[0].wake_up, tags)
        self._thread.call(work, self.config.engine.request_timeout, "the engines to wake up")
        self._asleep = bool(tags) and "kv_cache" not in (tags or ())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: JsonObject | None = None,
    ) -> list[Foreign]:
        """Call a method of all engines' workers, such as one of the class that
        `engine.vllm_args.worker_extension_cls` names; see `VllmEngine.collective_rpc`."""
        rpc = self._thread.opened[0].scheduler.collective_rpc
        work = partial(rpc, method, timeout, args, kwargs)
        seconds = (timeout or self.config.engine.request_timeout) + _GRACE_SECONDS
        return self._thread.call(work, seconds, f"the engines to answer {method}")

    def _check_awake(self) -> None:
        if self._asleep:
            raise InputError("the engines sleep: call wake_up first")
