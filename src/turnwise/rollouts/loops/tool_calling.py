"""Conversations: one answer (`single_turn`), answers whose tool calls are run (`tool_calling`), and
games whose sides are all played by the policy (`self_play`).

In the second, the default, the calls of a turn run together, and the model reads their results. A
turn without a call goes to the environment's `step`; its answer continues the conversation.

In a game every player has a conversation, hence a branch of the trajectory; the environment's
`step` says who moves next, and what this player reads before. All players' tokens are trained, each
with its player's reward, which advantages compare with the same player's in the group.
"""

import json

from turnwise.chat.tool_parser import ParsedText, ToolCall
from turnwise.core.aio import together
from turnwise.core.spans import tool_span
from turnwise.core.watchdog import waiting
from turnwise.errors import InputError
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


class SelfPlayLoop:
    """Plays `environment.players` against or with each other, at most `rollout.max_turns` turns.

    A turn that calls tools is followed by another of the same player; any other turn goes to the
    environment's `step`.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Play one game."""
        players = context.episode.players
        if not players:
            raise InputError(
                f"loop self_play: {context.episode.name}.players must give the opening messages of "
                "each player"
            )
        trajectory, tools = context.trajectory, context.toolbox.schemas
        said = {name: [dict(message) for message in opening] for name, opening in players.items()}
        last: dict[str, tuple[list[int], list[int]]] = {}  # prompt and completion of a player
        player, new = next(iter(players)), list[Message]()
        for turn in range(context.rollout.max_turns):
            read = said[player] = [*said[player], *new]
            if player in last:
                prompt = await context.next_prompt(
                    *last[player], new, tools=tools, conversation=read
                )
            else:
                prompt = await context.first_prompt(read, tools=tools)
            completion = await context.sample(prompt, messages=read)
            if completion is None:
                return
            trajectory.turn_players.append(player)
            last[player] = prompt, completion.token_ids
            parsed = context.tool_parser.parse(context.template.decode(completion.token_ids), tools)
            answer = assistant_message(parsed, turn)
            said[player] = [*read, answer]
            trajectory.messages += [{**message, "to": player} for message in new]
            trajectory.messages.append({**answer, "name": player})
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            if parsed.calls or parsed.malformed:
                new = await answer_calls(parsed, context, turn)
                if not await context.episode.done():
                    continue
                trajectory.messages += [{**message, "to": player} for message in new]
                trajectory.status = "completed"
                return
            move = await context.move({**answer, "name": player})
            if move is None:
                trajectory.status = "completed"
                return
            player, new = move
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

    async def answer(index: int, call: ToolCall) -> Message:
        with (
            waiting(f"{call.name} of {context.trajectory.problem_id}", "tool"),
            tool_span(call.name) as set_attribute,
        ):
            result = await context.toolbox.call(call.name, call.arguments)
            if result.outcome != "ok":
                set_attribute("error.type", result.outcome)
        context.count("tool_call")
        if result.outcome != "ok":
            context.count(f"tool_{result.outcome}")
        if result.error is not None and context.files is not None:
            kind = f"tool_error of {call.name}"
            await context.files.log_error(kind, context.request_id, result.error)
        number = _call_id(turn, index)
        return {"role": "tool", "tool_call_id": number, "name": call.name, "content": result.text}

    with context.timed("tools"):
        return await together(answer(index, call) for index, call in enumerate(parsed.calls))


def assistant_message(parsed: ParsedText, turn: int) -> Message:
    """Return a turn of the model as a message, with its calls in OpenAI's format."""
    message: Message = {"role": "assistant", "content": parsed.content}
    calls = []
    for index, call in enumerate(parsed.calls):
        arguments = json.loads(call.arguments)
        if "\\ud" in call.arguments.lower():  # an escape of half a character: it is replaced
            arguments = json.loads(encodable(json.dumps(arguments, ensure_ascii=False)))
        function = {"name": call.name, "arguments": arguments}
        calls.append({"type": "function", "id": _call_id(turn, index), "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _call_id(turn: int, index: int) -> str:
    """Return nine letters and digits, as templates that print the id require."""
    return f"call{turn % 1000:03d}{index % 100:02d}"
