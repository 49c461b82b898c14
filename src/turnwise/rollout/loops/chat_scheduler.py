"""A conversation that a class of the user's holds by callbacks (`rollout.chat_scheduler`)."""

import copy

from turnwise.errors import InputError
from turnwise.rollout.agent_loop import RolloutContext
from turnwise.rollout.environment import Environment, load_object
from turnwise.serving.chat_scheduler import ChatCompletionScheduler
from turnwise.serving.data_proto import DataProto
from turnwise.watchdog import waiting


class ChatSchedulerLoop:
    async def run(self, environment: Environment, context: RolloutContext) -> None:
        if context.chats is None:
            raise InputError(
                "rollout.loop chat_scheduler wants a ChatBackend, which is not running"
            )
        # The environment keeps the row itself, to judge by.
        row, messages = copy.deepcopy((context.row, list(context.problem)))
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
                group=context.route.group if context.route is not None else "",
                clock=context.clock,
            )


def load_chat_scheduler(path: str | None) -> type[ChatCompletionScheduler]:
    """The class that `rollout.chat_scheduler` names; its base where it names none.

    Raises:
        InputError: when it cannot be imported, or is no `ChatCompletionScheduler`.
    """
    if path is None:
        return ChatCompletionScheduler
    found = load_object(path, "rollout.chat_scheduler")
    if not (isinstance(found, type) and issubclass(found, ChatCompletionScheduler)):
        raise InputError(
            f"rollout.chat_scheduler: {path} is no subclass of "
            "turnwise.serving.chat_scheduler.ChatCompletionScheduler"
        )
    return found
