"""A rollout process: an actor with a runner and a scheduler of its own (`rollout.processes`).

`processes`, in the driver, sends it problems.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core import logs
from turnwise.core.aio import freeze_gc, run_in_thread
from turnwise.core.user_code import import_user_code
from turnwise.engine.protocol import Generator
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.group import Group
from turnwise.rollouts.loops import import_chat_scheduler
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.run_files import RunFiles
from turnwise.rollouts.runner import Runner
from turnwise.serving.chat_scheduler import ChatBackend
from turnwise.serving.openai import import_server
from turnwise.serving.scheduler_process import SchedulerProcess


class RolloutProcess(SchedulerProcess):
    """An actor's class; see the module's docstring.

    Args:
        environment: None means the configured one.
    """

    def __init__(self, config: Config, environment: EnvironmentType | None = None) -> None:
        super().__init__(config)
        self._files = RunFiles(None)
        self._make_runner = partial(Runner, config, environment=environment, files=self._files)
        self._stack = AsyncExitStack()

    async def start(self) -> int:
        """Load the tokenizer, the environment and the loop; return this process's id.

        Raises:
            InputError: when one of them cannot be used.
        """
        logs.follow()
        config = self.config
        self._runner = await import_user_code(
            lambda: self._make_runner(load_tokenizer(config)),
            config=config,
            what="the environment, loop, rewards and tools",
        )
        await run_in_thread(lambda: self._runner.tool_parser)
        await self._stack.enter_async_context(open_front(config, self._runner, self.scheduler))
        freeze_gc()
        return os.getpid()

    async def run_group(self, problem: Problem, sampling: SamplingConfig, tag: str) -> Group:
        """Run the group of a problem, under a unique tag.

        Raises:
            InputError: when something that the user gave cannot be used.
        """
        group = await self._runner.run_group(self.scheduler, problem, sampling, tag)
        group.appended = self._files.take()
        return group

    async def stop(self) -> bool:
        """End servers and agents, and return True; the owner kills the actor."""
        await self._runner.close()
        await self._stack.aclose()
        return True


@asynccontextmanager
async def open_front(config: Config, runner: Runner, generator: Generator) -> AsyncIterator[None]:
    """Give a runner the server of its agents, or the backend of its chat scheduler, if it has any.

    Raises:
        InputError: when the chat scheduler cannot be loaded, or the server cannot start.
    """
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
