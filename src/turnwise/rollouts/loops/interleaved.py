"""Tools inside one assistant turn: sampling stops at a closing tag and continues after the result.

The result's tokens are part of the assistant's turn but were not sampled, so their response mask
is 0. The tags are those of `rollout.tool_parser`, or the configuration's own, such as `<code>` and
`</code>`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        tagged: TaggedCalls | None = None
        if rollout.call_start and rollout.call_end:
            tagged = TaggedCalls(rollout.call_start, rollout.call_end, rollout.call_tool)
        parser = tagged or context.tool_parser
        open_tag, close_tag = parser.tags()
        trajectory.messages = [dict(message) for message in context.problem]
        offered = None if tagged else tools
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
                parsed = parser.parse(call, tools)
                if not parsed.calls:  # the closing tag shows that a call was meant
                    parsed = replace(parsed, malformed=True)
                results = await answer_calls(parsed, context, turn, parser.advice)
                texts = [str(message["content"]) for message in results]
                form = rollout.result_format
                answer["content"] += "".join(form.format(result=text) for text in texts)
                escaped = "".join(form.format(result=template.escape(text)) for text in texts)
                prompt = [*prompt, *completion.token_ids, *await context.encode(escaped)]
        trajectory.status = "max_turns"


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Reads one call from the text between two tags; has the methods of `ToolParser`."""

    start: str
    end: str
    tool: str | None = None
    """Tool that gets the text as its only argument; None parses the text as a JSON object."""

    @property
    def advice(self) -> str:
        """Message to the model about a call that cannot be parsed."""
        form = "text" if self.tool else "one JSON object with name and arguments"
        return f"Error: the call cannot be read; write {form} between {self.start} and {self.end}"

    def tags(self) -> tuple[str, str]:
        """Return the opening and the closing tag of a call."""
        return self.start, self.end

    def parse(self, text: str, schemas: Sequence[JsonObject]) -> ParsedText:
        """Read the call in a text that ends with the closing tag.

        Raises:
            InputError: when `rollout.call_tool` names no tool with one text argument.
        """
        before, opened, body = text.rpartition(self.start)
        body = body.removesuffix(self.end)
        unreadable = ParsedText(text, [], malformed=True)
        if not opened:
            return unreadable
        if self.tool is not None:
            arguments = json.dumps({self._argument(schemas): encodable(body)})
            return ParsedText(before, [ToolCall(self.tool, arguments)], malformed=False)
        try:
            call = json.loads(body)
            name, arguments = call["name"], json.dumps(call["arguments"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return unreadable
        if not isinstance(name, str) or not isinstance(call["arguments"], dict):
            return unreadable
        return ParsedText(before, [ToolCall(name, arguments)], malformed=False)

    def _argument(self, schemas: Sequence[JsonObject]) -> str:
        """Return the name of the tool's argument that gets the text."""
        functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
        if self.tool not in functions:
            known = ", ".join(functions) or "none"
            raise InputError(f"rollout.call_tool: there is no tool {self.tool!r}; tools: {known}")
        parameters = functions[self.tool]["parameters"]
        properties = parameters["properties"]
        names = [str(name) for name in parameters.get("required") or properties]
        if len(names) != 1 or properties[names[0]].get("type") != "string":
            raise InputError(
                f"rollout.call_tool: {self.tool} must have one required argument, a string, to get "
                "the text between the tags"
            )
        return names[0]
