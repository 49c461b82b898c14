"""The agent loop for chat schedulers: users' classes that run conversations."""

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnwise.chat.images import with_urls
from turnwise.compat.verl.chat_scheduler import ChatBackend, ChatCompletionScheduler
from turnwise.compat.verl.data_proto import DataProto, apply_batch
from turnwise.config import Config, RolloutConfig
from turnwise.core.admission import Admission
from turnwise.core.aio import run_in_thread
from turnwise.core.user_code import call_user_code, import_user_code, user_errors
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, load_object
from turnwise.trajectory.images import images_in


class ChatSchedulerLoop:
    """Passes a problem to the chat scheduler; the scheduler's requests become the turns."""

    by_requests = True
    front = "starting the chat scheduler"

    def __init__(self) -> None:
        self.chats: ChatBackend | None = None
        """The backend of the user's chat scheduler, inside the block of `opened`; else None."""

    def load(self, rollout: RolloutConfig) -> None:
        """Import the user's class."""
        load_chat_scheduler(rollout.chat_scheduler)

    @asynccontextmanager
    async def opened(
        self, config: Config, generator: Generator, admission: Admission
    ) -> AsyncIterator[None]:
        """Run a chat backend with the user's class during an `async with` block."""
        scheduler = await import_chat_scheduler(config.rollout, config.engine.start_timeout)
        self.chats = chats = ChatBackend(config, generator, scheduler, admission)
        try:
            await chats.start()
            yield
        finally:
            await chats.stop()
            self.chats = None

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        if self.chats is None:
            needs = "rollout.loop chat_scheduler needs a ChatBackend"
            raise InputError(f"{needs}, which is not running")
        # The scheduler gets a copy, because the environment's reward needs the original row.
        row, messages = await call_user_code(
            *(copy.deepcopy, (context.row, list(context.problem))),
            name="the copy of a row",
            seconds=context.rollout.environment_timeout,
            key="rollout.environment_timeout",
        )
        if images_in(messages):
            messages = await run_in_thread(with_urls, messages)
        config = self.chats.config
        batch = DataProto.from_conversations(
            [messages],
            {name: [value] for name, value in row.items()},
            do_sample=context.sampling.temperature > 0,
            validate=config.eval.sampling == context.sampling != config.sampling,
        )
        with context.timed("agent"), waiting(context.request_id, "chat scheduler"):
            made = await self.chats.converse(
                context.trajectory,
                batch,
                context.sampling,
                agent_sampling=context.rollout.agent_sampling,
                group=context.route.group,
                clock=context.clock,
                place=context.place,
                calls=context.calls,
            )
        if made is None:
            return
        name = "the chat scheduler's batch"
        async with user_errors("inexact_rows", f"{name} cannot be read: "):
            await call_user_code(
                *(apply_batch, context.trajectory, made, row),
                name=name,
                seconds=context.rollout.environment_timeout,
                key="rollout.environment_timeout",
            )


async def import_chat_scheduler(
    rollout: RolloutConfig, seconds: float
) -> type[ChatCompletionScheduler]:
    path = rollout.chat_scheduler
    return await import_user_code(
        load_chat_scheduler, path, seconds=seconds, what=path or "the chat scheduler"
    )


def load_chat_scheduler(path: str | None) -> type[ChatCompletionScheduler]:
    """Load the class that `rollout.chat_scheduler` names; None loads `ChatCompletionScheduler`."""
    if path is None:
        return ChatCompletionScheduler
    found = load_object(path, "rollout.chat_scheduler")
    if not (isinstance(found, type) and issubclass(found, ChatCompletionScheduler)):
        raise InputError(
            f"rollout.chat_scheduler: {path} is not a subclass of "
            "turnwise.compat.verl.ChatCompletionScheduler"
        )
    return found
