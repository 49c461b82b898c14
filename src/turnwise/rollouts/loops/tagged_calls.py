"""Calls between configured tags such as `<code>` and `</code>`, without a parser of vLLM."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.chat.tool_parser import ParsedText, ToolCall
from turnwise.config import RolloutConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.tools.toolbox import encodable


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Reads one call from the text between two tags; has the methods of `ToolParser`.

    Example:
        >>> parser = TaggedCalls("<call>", "</call>")
        >>> text = 'Let me see. <call>{"name": "look_up", "arguments": {"city": "Oslo"}}</call>'
        >>> parser.parse(text, []).calls[0].name
        'look_up'
    """

    start: str
    end: str
    tool: str | None = None
    """Tool that gets the text as its only argument; None parses the text as a JSON object."""

    @classmethod
    def configured(cls, rollout: RolloutConfig) -> "TaggedCalls | None":
        """Return a parser of the configured tags; None if there are none."""
        if not (rollout.call_start and rollout.call_end):
            return None
        return cls(rollout.call_start, rollout.call_end, rollout.call_tool)

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
