"""A model's text to tool calls, by vLLM's own parser for the model's format."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import InputError


def silence(name: str) -> Any:
    """vLLM's parser class of a format, which from now on logs nothing.

    It would log a traceback for each call that it cannot read, which is counted and answered to
    the model, or goes to the client as text. A filter outlives vLLM's setting of levels.

    Raises:
        InputError: when vLLM has no parser of that name.
    """
    from turnwise.engine import vllm_names as vllm  # seconds to import

    try:
        parser = vllm.ToolParserManager.get_tool_parser(name)
    except KeyError:
        raise InputError(
            f"rollout.tool_parser: vLLM has no tool parser {name!r}; hermes fits Qwen models"
        ) from None
    logging.getLogger(parser.__module__).addFilter(_nothing)
    return parser


def _nothing(record: logging.LogRecord) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    content: str
    """What stands before the calls."""
    calls: list[ToolCall]
    malformed: bool
    """The text opens a call that cannot be read."""


class ToolParser:
    """Reads calls in one of vLLM's tool-call formats.

    Args:
        name: vLLM's name of the format, such as `hermes` (which Qwen models write too).
        tokenizer: The model's tokenizer.

    Raises:
        InputError: when vLLM has no parser of that name, or it does not fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        from turnwise.engine import vllm_names as vllm  # seconds to import

        parser = silence(name)
        self._name = name
        try:
            self._parser = parser(tokenizer)
        except Exception as error:  # each parser has its own ways
            raise InputError(
                f"rollout.tool_parser: {name} does not fit the model's tokenizer: {error}"
            ) from error
        self._marker: str | None = getattr(self._parser, "tool_call_start_token", None)
        self._request_type = vllm.ChatCompletionRequest

    def tags(self) -> tuple[str, str]:
        """What opens and what closes a call.

        Raises:
            InputError: when the format has no such marks.
        """
        end: str | None = getattr(self._parser, "tool_call_end_token", None)
        if not (self._marker and end):
            raise InputError(
                f"rollout.tool_parser: {self._name} does not mark where a call ends, which the "
                "interleaved loop needs; hermes does"
            )
        return self._marker, end

    def parse(self, text: str, schemas: Sequence[dict[str, Any]]) -> ParsedText:
        """Split a finished assistant turn into its text and its calls."""
        if self._marker and self._marker not in text:
            return ParsedText(text, [], malformed=False)
        request = self._request_type(messages=[], tools=list(schemas) or None)
        found = self._parser.extract_tool_calls(text, request)
        calls = [ToolCall(c.function.name, c.function.arguments) for c in found.tool_calls]
        malformed = bool(self._marker) and not calls
        return ParsedText((found.content or "") if calls else text, calls, malformed)
