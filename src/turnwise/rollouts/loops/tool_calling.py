"""Conversations: one answer (`single_turn`), or answers whose tool calls are run (`tool_calling`).

In the latter, the default, the calls of a turn run together, and the model reads their results. A
turn without a call goes to the environment's `step`; its answer continues the conversation.
"""

import json

from turnwise.chat.tool_parser import ParsedText, ToolCall
from turnwise.core.aio import together
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import tool_span
from turnwise.core.watchdog import waiting
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment
from turnwise.tools.toolbox import encodable
from turnwise.trajectory import Message


class SingleTurnLoop:
    """Samples one answer to the problem; no tools."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Sample the answer and record it."""
        trajectory = context.trajectory
        trajectory.messages = [dict(message) for message in context.problem]
        completion = await context.sample(await self.prompt(context))
        if completion is None:
            return
        text = context.template.decode(completion.token_ids)
        trajectory.messages.append({"role": "assistant", "content": text})
        trajectory.status = "length" if completion.finish_reason == "length" else "completed"

    async def prompt(self, context: RolloutContext) -> list[int]:
        """Return the ids of the prompt."""
        return await context.first_prompt(context.trajectory.messages)


class ToolCallingLoop:
    """Alternates between the model's turns and the results of its tool calls.

    It ends at a turn without a call that the environment's `step` does not answer, or when the
    environment is `done`.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Run one trajectory, at most `rollout.max_turns` turns."""
        trajectory, template, tools = context.trajectory, context.template, context.toolbox.schemas
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages, tools=tools)
        for turn in range(context.rollout.max_turns):
            completion = await context.sample(prompt)
            if completion is None:
                return
            parsed = context.tool_parser.parse(template.decode(completion.token_ids), tools)
            answer = assistant_message(parsed, turn)
            trajectory.messages.append(answer)
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            called = bool(parsed.calls or parsed.malformed)
            replies = (
                await answer_calls(parsed, context, turn) if called else await context.step(answer)
            )
            trajectory.messages += replies or ()
            if replies is None or (called and await context.episode.done()):
                trajectory.status = "completed"
                return
            if turn + 1 < context.rollout.max_turns:
                prompt = await context.next_prompt(
                    prompt, completion.token_ids, replies, tools=tools
                )
        trajectory.status = "max_turns"


async def answer_calls(
    parsed: ParsedText, context: RolloutContext, turn: int, advice: str | None = None
) -> list[Message]:
    """Run the calls of one turn together; return a tool message for each, in their order.

    Args:
        advice: Content of the one message that is returned if the calls cannot be parsed; None:
            that of the model's format.
    """
    if parsed.malformed:
        context.count("tool_malformed")
        content = advice or context.tool_parser.advice
        return [{"role": "tool", "tool_call_id": _call_id(turn, 0), "content": content}]
    with context.timed("tools"):
        results = await together(_answer(call, context) for call in parsed.calls)
    return [
        {"role": "tool", "tool_call_id": _call_id(turn, index), **result}
        for index, result in enumerate(results)
    ]


def _call_id(turn: int, index: int) -> str:
    """Return nine letters and digits, as templates that print the id require."""
    return f"call{turn % 1000:03d}{index % 100:02d}"


async def _answer(call: ToolCall, context: RolloutContext) -> dict[str, str]:
    with (
        waiting(f"{call.name} of {context.trajectory.problem_id}", "tool"),
        tool_span(call.name) as span,
    ):
        result = await context.toolbox.call(call.name, call.arguments)
        if result.outcome != "ok":
            span.set_attribute("error.type", result.outcome)
    context.count("tool_call")
    if result.outcome != "ok":
        context.count(f"tool_{result.outcome}")
    if result.error is not None and context.errors is not None:
        await context.errors.write(f"tool_error of {call.name}", context.request_id, result.error)
    return {"name": call.name, "content": result.text}


def assistant_message(parsed: ParsedText, turn: int) -> Message:
    """Return a turn of the model as a message, with its calls in OpenAI's format."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": _call_id(turn, index),
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for index, call in enumerate(parsed.calls)
        ]
    return message


def _arguments(call: ToolCall) -> JsonObject:
    """Return a call's arguments; an escape of half a character (a lone surrogate) is replaced."""
    arguments: JsonObject = json.loads(call.arguments)
    if "\\ud" in call.arguments.lower():
        arguments = json.loads(encodable(json.dumps(arguments, ensure_ascii=False)))
    return arguments
