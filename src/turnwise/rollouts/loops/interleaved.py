"""Tools inside one assistant turn: sampling stops at a closing tag and continues after the result.

The result's tokens are part of the assistant's turn but were not sampled, so their response mask
is 0. The tags are those of `rollout.tool_parser`, or the configuration's own, such as `<code>` and
`</code>`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from turnwise.chat.tool_parser import ParsedText, ToolCall
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.loops.tool_calling import answer_calls
from turnwise.tools.toolbox import encodable


class InterleavedLoop:
    """Inserts tool results into the assistant's turn."""

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        """Sample, answer the call, and continue, until no call follows."""
        trajectory, template, rollout = context.trajectory, context.template, context.rollout
        tools = context.toolbox.schemas
        offered: list[JsonObject] | None = tools
        advice: str | None = None
        parse: Callable[[str, Sequence[JsonObject]], ParsedText]
        if rollout.call_start and rollout.call_end:
            open_tag, close_tag, offered = rollout.call_start, rollout.call_end, None
            parse = partial(_read_tagged, open_tag, close_tag, rollout.call_tool)
            form = "text" if rollout.call_tool else "one JSON object with name and arguments"
            between = f"between {open_tag} and {close_tag}"
            advice = f"Error: the call cannot be read; write {form} {between}"
        else:
            open_tag, close_tag = context.tool_parser.tags()
            parse = context.tool_parser.parse
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
            if completion.finish_reason == "length":
                trajectory.status = "length"
                return
            if end < 0 or completion.token_ids[-1] == template.tokenizer.eos_token_id:
                if text.rfind(open_tag) > end:  # the turn is over, so nothing can answer the call
                    context.count("tool_malformed")
                trajectory.status = "completed"
                return
            if turn + 1 < rollout.max_turns:
                call = text[max(start, 0) : end + len(close_tag)]
                parsed = parse(call, tools)
                if not parsed.calls:  # the closing tag shows that a call was meant
                    parsed = replace(parsed, malformed=True)
                results = await answer_calls(parsed, context, turn, advice)
                texts = [str(message["content"]) for message in results]
                form = rollout.result_format
                answer["content"] += "".join(form.format(result=text) for text in texts)
                escaped = "".join(form.format(result=template.escape(text)) for text in texts)
                prompt = [*prompt, *completion.token_ids, *await context.encode(escaped)]
        trajectory.status = "max_turns"


def _read_tagged(
    start: str, end: str, tool: str | None, text: str, schemas: Sequence[JsonObject]
) -> ParsedText:
    """Read the call in a text that ends with the closing tag.

    The text between the tags is the only argument of `tool`; if that is None, a JSON object.
    """
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
            return unreadable
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
