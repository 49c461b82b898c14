"""The part of a conversation that the model sees, shortened according to `rollout.context`.

Sampled turns stay in the trajectory unchanged. A shortened conversation begins a branch with the
fork reason `COMPACTED`. Earlier turns that stay in the conversation are context in the new branch,
with their sampled ids; they are trained in the branch where they were sampled. A summary is the
last turn of the previous branch, so it is trained with the trajectory's advantage (as in
CompactionRL, arXiv 2607.05378).

To add a way to shorten conversations: write a function `(messages, row) -> messages`, and set
`rollout.context.compact: package.module:function`. A way that samples is a case in
`ContextWindow.next_prompt`, with a name in `COMPACTIONS` of `config/rollout.py`.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import NamedTuple

from turnwise.core.optional import load_object
from turnwise.core.user_code import call_user_code, user_errors
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import SUMMARISED, read_messages
from turnwise.trajectory import Message, Prompt
from turnwise.trajectory.chat_template import Tools
from turnwise.trajectory.prefix import without_reasoning

_KEY = "rollout.context.compact"
COMPACTED = "compacted"
"""Fork reason of a turn whose conversation was shortened, and the event that counts such turns."""
REQUEST = (
    "The conversation will be cut off here. Write down what you need to go on: what you have found "
    "out, what you have done, and what is left to do. You will see only the task and this summary."
)
"""Message that asks the model for a summary."""
SUMMARY = "Summary of the conversation so far:\n{}"
"""Message that shows the model its summary, after the problem."""
LEFT_OUT = "[left out to save room]"
"""Content that replaces a tool's result that is no longer shown."""


class _Step(NamedTuple):
    token_ids: list[int]  # the ids that the model sampled
    answer: Message  # the same answer as a message
    replies: list[Message]


class ContextWindow:
    """The conversation of one trajectory of `ToolCallingLoop`. This class makes the prompts and
    samples the turns; prompts describe `tools` to the model."""

    def __init__(self, context: RolloutContext, tools: Tools) -> None:
        self._context, self._tools = context, tools
        self._opening = [dict(message) for message in context.problem]
        self._steps: list[_Step] = []
        self._new: Sequence[Message] = self._opening  # since the turn that the prompt continues
        self.turns = 0
        """Number of turns so far, including summaries."""

    async def first_prompt(self) -> Prompt:
        """Return the prompt of the problem; raise the errors of `RolloutContext.first_prompt`."""
        return await self._context.first_prompt(self._opening, tools=self._tools)

    async def sample(self, prompt: Prompt) -> Completion | None:
        """Sample a turn. If there is no room for a turn, return None, and set the trajectory's
        status to `context_full`."""
        shortens = self._context.rollout.context.compact is not None  # so several conversations
        completion = await self._context.sample(prompt, messages=self._new if shortens else ())
        self.turns += completion is not None
        return completion

    async def next_prompt(
        self,
        prompt: Prompt,
        token_ids: list[int],
        answer: Message,
        replies: Sequence[Message],
    ) -> Prompt | None:
        """Return the prompt after a turn, of a shortened conversation if it would exceed the limit.

        Args:
            prompt: The turn's prompt.
            token_ids: The ids that the turn sampled.
            answer: The turn as a message, for display and for prompts that must be rendered.
            replies: The messages that follow the turn.

        Returns:
            The prompt. If the trajectory ends with a summary that was cut off or had no room, None,
            and the trajectory's status is set.

        Raises:
            TrajectoryError: as by `RolloutContext.next_prompt`; or with the reason
                `compaction_error`, when the user's function fails or does not return messages.
        """
        context = self._context
        self._steps.append(_Step(token_ids, answer, list(replies)))
        conversation = _messages(self._opening, self._steps)
        following = await context.next_prompt(
            prompt, token_ids, replies, tools=self._tools, conversation=conversation
        )
        self._new = replies if context.fork_reason is None else conversation
        compact, length = context.rollout.context.compact, context.max_length
        room = max(length - 2 * context.sampling.max_tokens, length // 2)
        if compact is None or len(following) <= (context.rollout.context.limit or room):
            return following
        if compact == "summarise":
            return await self._summarise(following)
        if compact == "drop_results":
            steps = [_without_results(step) for step in self._steps[:-1]] + self._steps[-1:]
            same = steps == self._steps
            return following if same else await self._restart(self._opening, steps)
        shorter = await self._call(compact, conversation)
        return following if shorter == conversation else await self._restart(shorter, [])

    async def _summarise(self, following: Prompt) -> Prompt | None:
        """Ask for a summary, and return the prompt of a conversation that continues with it. If
        there is no room for a summary, return `following`.

        If the last turn's results leave too little room for a summary, the summary does not cover
        that turn: the turn and its results follow it.
        """
        context, steps = self._context, self._steps
        if context.rollout.max_turns - self.turns < 2:  # keep the last turn for the answer
            return following
        reason = context.fork_reason
        for kept in (steps[:0], steps[-1:])[: len(steps)]:
            *before, last = steps[: len(steps) - len(kept)]
            last = last._replace(replies=_with_user_text(last.replies, REQUEST))
            prompt = await self._prompt(self._opening, [*before, last])
            if (room := context.max_length - len(prompt)) >= context.sampling.max_tokens:
                break
        if room <= 0:
            context.fork_reason = reason
            return following
        continues = not kept and context.fork_reason is None
        self._new = last.replies if continues else _messages(self._opening, [*before, last])
        completion = await self.sample(prompt)
        if completion is None:
            return None
        if completion.finish_reason == "length":
            context.trajectory.status = "length"
            return None
        context.count(SUMMARISED)
        said = without_reasoning(context.template.decode(completion.token_ids))
        summary = SUMMARY.format(said.strip())
        # This is a user message, because rewards look for answers in the model's messages, and a
        # summary is not an answer.
        context.trajectory.messages.append({"role": "user", "content": summary})
        return await self._restart(_with_user_text(context.problem, summary), kept)

    async def _restart(self, opening: list[Message], steps: list[_Step]) -> Prompt:
        """Continue with another conversation, in a new branch."""
        self._opening, self._steps, self._new = opening, steps, _messages(opening, steps)
        prompt = await self._prompt(opening, steps)
        self._context.count(COMPACTED)
        self._context.fork_reason = COMPACTED
        return prompt

    async def _prompt(self, opening: list[Message], steps: Sequence[_Step]) -> Prompt:
        context, tools = self._context, self._tools
        try:
            prompt = await context.first_prompt(opening, tools=tools)
        except (InputError, TrajectoryError):
            raise
        except Exception as error:  # a template may raise anything
            raise TrajectoryError("template_refuses", f"{type(error).__name__}: {error}") from error
        for number, step in enumerate(steps, 1):
            said = _messages(opening, steps[:number])
            prompt = await context.next_prompt(
                prompt, step.token_ids, step.replies, tools=tools, conversation=said
            )
        return prompt

    async def _call(self, path: str, conversation: list[Message]) -> list[Message]:
        context, name = self._context, f"{_KEY} {path}"
        seconds, key = context.rollout.environment_timeout, "rollout.environment_timeout"
        given = deepcopy(conversation), dict(context.row)

        def shorten() -> object:
            return load_object(path, _KEY)(*given)

        async with user_errors("compaction_error", f"{name}: ", ()):
            with context.timed("environment"):
                value = await call_user_code(shorten, name=name, seconds=seconds, key=key)
            read = partial(read_messages, value, f"what {name} returns")
            messages: list[Message] = await call_user_code(read, name=name, seconds=seconds)
        return messages


def _messages(opening: Sequence[Message], steps: Sequence[_Step]) -> list[Message]:
    return [*opening, *chain.from_iterable([step.answer, *step.replies] for step in steps)]


def _without_results(step: _Step) -> _Step:
    """Return a step without its tool results, except those no longer than the note `LEFT_OUT`."""
    replies = [
        {**message, "content": LEFT_OUT}
        if message["role"] == "tool" and len(str(message.get("content"))) > len(LEFT_OUT)
        else message
        for message in step.replies
    ]
    return step._replace(replies=replies)


def _with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a text of the user at the end. If the last message is the user's, add
    the text to it, because many templates refuse two user messages in a row."""
    *before, last = messages
    content, more = last.get("content"), f"\n\n{text}"
    if last["role"] == "user" and isinstance(content, str | list):
        added = [{"type": "text", "text": more}]
        whole = content + more if isinstance(content, str) else [*content, *added]
        return [*before, {**last, "content": whole}]
    return [*messages, {"role": "user", "content": text}]
