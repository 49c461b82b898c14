"""The loop for conversations led by callbacks of a user's class (`rollout.chat_scheduler`)."""

import copy

from turnwise.config import Config
from turnwise.core.user_code import call_user_code, import_user_code
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, load_object
from turnwise.serving.chat_scheduler import ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto


class ChatSchedulerLoop:
    """Passes a problem to the chat scheduler, whose requests become the turns."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run one trajectory's conversation."""
        if context.chats is None:
            what = "rollout.loop chat_scheduler needs a ChatBackend"
            raise InputError(f"{what}, which is not running")
        # A copy: the environment computes the reward from the original row.
        row, messages = await call_user_code(
            *(copy.deepcopy, (context.row, list(context.problem))),
            name="the copy of a row",
            seconds=context.rollout.environment_timeout,
            key="rollout.environment_timeout",
        )
        config = context.chats.config
        batch = DataProto.from_conversations(
            [messages],
            {name: [value] for name, value in row.items()},
            do_sample=context.sampling.temperature > 0,
            validate=config.eval.sampling == context.sampling != config.sampling,
        )
        with context.timed("agent"), waiting(context.request_id, "chat scheduler"):
            await context.chats.converse(
                context.trajectory,
                batch,
                context.sampling,
                group=context.route.group,
                clock=context.clock,
                calls=context.calls,
            )


async def import_chat_scheduler(config: Config) -> type[ChatCompletionScheduler]:
    """Load the configured class in a thread, within `engine.start_timeout`."""
    path = config.rollout.chat_scheduler
    return await import_user_code(
        load_chat_scheduler, path, config=config, what=path or "the chat scheduler"
    )


def load_chat_scheduler(path: str | None) -> type[ChatCompletionScheduler]:
    """Load the class that `rollout.chat_scheduler` names; None loads `ChatCompletionScheduler`.

    Raises:
        InputError: when it cannot be imported, or is not a `ChatCompletionScheduler`.
    """
    if path is None:
        return ChatCompletionScheduler
    found = load_object(path, "rollout.chat_scheduler")
    if not (isinstance(found, type) and issubclass(found, ChatCompletionScheduler)):
        raise InputError(
            f"rollout.chat_scheduler: {path} is not a subclass of "
            "turnwise.serving.chat_scheduler.ChatCompletionScheduler"
        )
    return found
