"""The built-in agent loops, by name. The loop `agent`, in which an external agent requests the
turns, is in the module `agents`."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from turnwise.chat.messages import said
from turnwise.chat.tool_parser import ParsedText, ToolCall
from turnwise.config import LOOP_NAMES
from turnwise.config.rollout import BASE
from turnwise.core.aio import run_in_thread, together
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import tool_span
from turnwise.core.watchdog import waiting
from turnwise.engine.function_processor import read_call
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import AgentLoop, RolloutContext
from turnwise.rollouts.agents import HttpAgentLoop
from turnwise.rollouts.batch_sampler import SamplerLoop
from turnwise.rollouts.context_window import ContextWindow
from turnwise.rollouts.environment import Environment, load_object
from turnwise.tools.toolbox import encodable
from turnwise.trajectory import Message, Prompt, PromptLike, status_after
from turnwise.trajectory.images import images_in


class SingleTurnLoop:
    """Samples one answer to the problem; no tools."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory = context.trajectory
        trajectory.messages = [dict(message) for message in context.problem]
        completion = await context.sample(await self.prompt(context))
        if completion is None:
            return
        text = self.text(context, completion.token_ids)
        trajectory.messages.append({"role": "assistant", "content": text})
        trajectory.status = status_after(completion.finish_reason)

    async def prompt(self, context: RolloutContext) -> PromptLike:
        return await context.first_prompt(context.trajectory.messages)

    def text(self, context: RolloutContext, token_ids: list[int]) -> str:
        return context.template.decode(token_ids)


class ToolCallingLoop:
    """Alternates between the model's turns and the results of its tool calls. It ends when the
    environment is `done`, or when `step` returns no answer to a turn without a tool call. It
    shortens the conversation according to `rollout.context`."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory, template, tools = context.trajectory, context.template, context.toolbox.schemas
        trajectory.messages = [dict(message) for message in context.problem]
        window, max_turns = ContextWindow(context, tools), context.rollout.max_turns
        prompt: Prompt | None = await window.first_prompt()
        while prompt is not None and (turn := window.turns) < max_turns:
            completion = await window.sample(prompt)
            if completion is None:
                return
            parsed = await context.tool_parser.read(template.decode(completion.token_ids), tools)
            answer = assistant_message(parsed, turn)
            trajectory.messages.append(answer)
            if (ended := status_after(completion.finish_reason)) != "completed":
                trajectory.status = ended
                return
            called = bool(parsed.calls or parsed.malformed)
            replies = (
                await answer_calls(parsed, context, turn) if called else await context.step(answer)
            )
            trajectory.messages += replies or ()
            if replies is None or (called and await context.episode.done()):
                trajectory.status = "completed"
                return
            if window.turns < max_turns:
                prompt = await window.next_prompt(prompt, completion.token_ids, answer, replies)
        if prompt is not None:  # None: a summary has ended the trajectory
            trajectory.status = "max_turns"


class SelfPlayLoop:
    """Plays all `environment.players`. Each player has its own conversation, which is a branch of
    the trajectory.

    After a turn that calls tools, the same player has the next turn. A turn that calls no tool goes
    to the environment's `step`.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        players = context.episode.players
        if not players:
            raise InputError(
                f"loop self_play: {context.episode.name}.players must give the opening messages of "
                "each player"
            )
        trajectory, tools = context.trajectory, context.toolbox.schemas
        policies = {name: _policy_of(name, context) for name in players}
        said = {name: [dict(message) for message in opening] for name, opening in players.items()}
        last: dict[str, tuple[Prompt, list[int]]] = {}  # each player's last prompt and completion
        player, new = next(iter(players)), list[Message]()
        for turn in range(context.rollout.max_turns):
            read = said[player] = [*said[player], *new]
            if (own := last.get(player)) is None:
                prompt = await context.first_prompt(read, tools=tools)
            else:
                prompt = await context.next_prompt(*own, new, tools=tools, conversation=read)
            completion = await context.sample(prompt, messages=read, policy=policies[player])
            if completion is None:
                return
            trajectory.turn_players.append(player)
            last[player] = prompt, completion.token_ids
            text = context.template.decode(completion.token_ids)
            parsed = await context.tool_parser.read(text, tools)
            answer = assistant_message(parsed, turn)
            said[player] = [*read, answer]
            trajectory.messages += [{**message, "to": player} for message in new]
            trajectory.messages.append({**answer, "name": player})
            if (ended := status_after(completion.finish_reason)) != "completed":
                trajectory.status = ended
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


def _policy_of(player: str, context: RolloutContext) -> str:
    """Return the name of a player's policy; "" if the run has one policy."""
    trained, named = context.rollout.policies, context.episode.policies
    if named and not trained:  # `base` would be the trained policy here, not a frozen one
        raise InputError(
            f"{context.episode.name}.policies names policies, and this run has one: set "
            "rollout.policies"
        )
    policy = named.get(player, player if player in trained else "")
    if trained and policy not in (*trained, BASE):
        raise InputError(
            f"{context.episode.name}.policies must name the policy of {player}: "
            f"{', '.join([*trained, BASE])} (rollout.policies)"
        )
    return policy


class InterleavedLoop:
    """Runs tools inside one assistant turn: sampling stops at a closing tag and continues after the
    tool's result. The tokens of the result are part of the turn, but their response mask is 0
    because the model did not sample them.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory, template, rollout = context.trajectory, context.template, context.rollout
        tools = context.toolbox.schemas
        offered: list[JsonObject] | None = tools
        advice: str | None = None
        read: Callable[[str, Sequence[JsonObject]], Awaitable[ParsedText]]
        if rollout.call_start and rollout.call_end:
            open_tag, close_tag, offered = rollout.call_start, rollout.call_end, None
            read = partial(_read_tagged, open_tag, close_tag, rollout.call_tool)
            form = "text" if rollout.call_tool else "one JSON object with name and arguments"
            between = f"between {open_tag} and {close_tag}"
            advice = f"Error: the call cannot be read; write {form} {between}"
        else:
            open_tag, close_tag = context.tool_parser.tags()
            read = context.tool_parser.read
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages, tools=offered)
        answer = {"role": "assistant", "content": ""}
        trajectory.messages.append(answer)
        for turn in range(rollout.max_turns):
            completion = await context.sample(prompt, stop=[close_tag])
            if completion is None:
                return
            text = template.decode(completion.token_ids)
            answer["content"] += text
            end = text.rfind(close_tag)
            start = text.rfind(open_tag, 0, max(end, 0))
            if (ended := status_after(completion.finish_reason)) != "completed":
                trajectory.status = ended
                return
            if end < 0 or completion.token_ids[-1] in template.stop_token_ids:
                if text.rfind(open_tag) > end:  # the turn is over, so nothing can answer the call
                    context.count("tool_malformed")
                trajectory.status = "completed"
                return
            if turn + 1 < rollout.max_turns:
                call = text[max(start, 0) : end + len(close_tag)]
                parsed = await read(call, tools)
                if not parsed.calls:  # the closing tag shows that it was to be a call
                    parsed = replace(parsed, malformed=True)
                results = await answer_calls(parsed, context, turn, advice)
                if images_in(results):  # templates cannot show an image inside a turn
                    context.count("image_left_out")
                texts = [said(message) for message in results]
                form = rollout.result_format
                answer["content"] += "".join(form.format(result=text) for text in texts)
                escaped = "".join(form.format(result=template.escape(text)) for text in texts)
                more = await context.encode(escaped)
                prompt = Prompt.joined(prompt, completion.token_ids, more)
        trajectory.status = "max_turns"


async def answer_calls(
    parsed: ParsedText, context: RolloutContext, turn: int, advice: str | None = None
) -> list[Message]:
    """Run the calls of one turn concurrently; return a tool message for each call, in the order of
    the calls. If the calls cannot be parsed, return one message with `advice` (None: the advice of
    the model's format). If the model takes no images, images in results are left out and counted.
    """
    if parsed.malformed:
        context.count("tool_malformed")
        if parsed.late:
            context.count("parse_timeout")
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
            environment = context.trajectory.environment
            await context.files.log_error(kind, context.request_id, result.error, environment)
        content: object = result.text
        if result.parts is not None:
            images = context.template.images
            if images is not None and await run_in_thread(lambda: images.takes_images):
                content = result.parts
            else:
                context.count("image_left_out")
        number = _call_id(turn, index)
        return {"role": "tool", "tool_call_id": number, "name": call.name, "content": content}

    with context.timed("tools"):
        return await together(answer(index, call) for index, call in enumerate(parsed.calls))


def assistant_message(parsed: ParsedText, turn: int) -> Message:
    """Return a turn of the model as a message, with its calls in OpenAI's format."""
    message: Message = {"role": "assistant", "content": parsed.content}
    calls = []
    for index, call in enumerate(parsed.calls):
        arguments = json.loads(call.arguments)
        if "\\ud" in call.arguments.lower():  # perhaps half a surrogate pair
            arguments = json.loads(encodable(json.dumps(arguments, ensure_ascii=False)))
        function = {"name": call.name, "arguments": arguments}
        calls.append({"type": "function", "id": _call_id(turn, index), "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _call_id(turn: int, index: int) -> str:
    """Return an id of nine letters and digits, which some templates that print it require."""
    return f"call{turn % 1000:03d}{index % 100:02d}"


async def _read_tagged(
    start: str, end: str, tool: str | None, text: str, schemas: Sequence[JsonObject]
) -> ParsedText:
    """Read the call between the last tags of a text. The text between the tags is the only argument
    of `tool`; if `tool` is None, it is a JSON object, or a call in Python's syntax."""
    before, opened, body = text.rpartition(start)
    body = body.removesuffix(end)
    unreadable = ParsedText(text, [], malformed=True)
    if not opened:
        return unreadable
    if tool is None:
        try:
            call = json.loads(body)
            name, arguments = call["name"], json.dumps(call["arguments"])
        except (ValueError, TypeError, KeyError, RecursionError):
            call = _read_written(body, schemas)
            return unreadable if call is None else ParsedText(before, [call], malformed=False)
        if not isinstance(name, str) or not isinstance(call["arguments"], dict):
            return unreadable
        return ParsedText(before, [ToolCall(name, arguments)], malformed=False)
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    if tool not in functions:
        known = ", ".join(functions) or "none"
        raise InputError(f"rollout.call_tool: there is no tool {tool!r}; tools: {known}")
    parameters = functions[tool]["parameters"]
    properties = parameters["properties"]
    names = [str(name) for name in parameters.get("required") or properties]
    if len(names) != 1 or properties[names[0]].get("type") != "string":
        raise InputError(
            f"rollout.call_tool: {tool} must have one required argument, a string, to get the text "
            "between the tags"
        )
    arguments = json.dumps({names[0]: encodable(body)})
    return ParsedText(before, [ToolCall(tool, arguments)], malformed=False)


def _read_written(text: str, schemas: Sequence[JsonObject]) -> ToolCall | None:
    """Return a call such as `add(1, b=2)`; positional arguments are in the order of the tool's
    parameters. Return None if the text is not a call, or the arguments do not fit."""
    if (call := read_call(text)) is None:
        return None
    name, args, kwargs = call
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in schemas}
    unknown = {"properties": map(str, range(len(args)))}  # the toolbox reports it
    names = list(parameters.get(name, unknown)["properties"])[: len(args)]
    try:
        given = dict(zip(names, args, strict=True))
        if given.keys().isdisjoint(kwargs):
            return ToolCall(name, json.dumps(given | kwargs, allow_nan=False))
    except (ValueError, TypeError):  # too many arguments, or not a JSON type
        pass
    return None


LOOPS: dict[str, type[AgentLoop]] = {
    "tool_calling": ToolCallingLoop,
    "single_turn": SingleTurnLoop,
    "interleaved": InterleavedLoop,
    "agent": HttpAgentLoop,
    "self_play": SelfPlayLoop,
    "sampler": SamplerLoop,
}


def load_loop(name: str) -> AgentLoop:
    """Build a loop from its short name, or from the path `package.module:Class` of its class."""
    if name in LOOPS:
        return LOOPS[name]()
    path = f"turnwise.compat.loops:{name}" if name in LOOP_NAMES else name
    loop: AgentLoop = load_object(path, "rollout.loop")()
    return loop
