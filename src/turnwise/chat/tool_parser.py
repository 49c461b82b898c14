"""Tool calls in a model's text, read by vLLM's parser for the model's format."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def silence(name: str) -> "Callable[[Tokenizer], Any]":
    """Return vLLM's parser class of a format, and switch its logging off.

    The parser logs a traceback for each call that it cannot read, but such calls are counted and
    reported to the model, or reach the client as text. A filter is used because vLLM resets log
    levels.

    Raises:
        InputError: when vLLM has no parser of that name.
    """
    from turnwise.engine import vllm_api as vllm  # seconds to import

    try:
        parser: Callable[[Tokenizer], Any] = vllm.ToolParserManager.get_tool_parser(name)
    except KeyError:
        raise InputError(
            f"rollout.tool_parser: vLLM has no tool parser {name!r}; hermes fits Qwen models"
        ) from None
    logging.getLogger(parser.__module__).addFilter(_drop)
    return parser


def _drop(record: logging.LogRecord) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asks for.

    Example:
        >>> ToolCall("calculate", '{"operation": "+", "a": 12, "b": 30}')
    """

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """An assistant's turn, split into its text and its calls.

    Example:
        >>> ParsedText("The answer is 42.", [], malformed=False)
    """

    content: str
    """Text before the calls; the whole text if there are none."""
    calls: list[ToolCall]
    malformed: bool
    """True when the text opens a call that cannot be read."""


class ToolParser:
    """Reads calls in one of vLLM's tool-call formats.

    Args:
        name: vLLM's name of the format, such as `hermes`, which Qwen models write too.
        tokenizer: The model's tokenizer.

    Raises:
        InputError: when vLLM has no parser of that name, or the parser does not fit the tokenizer.

    Example:
        >>> parser = ToolParser("hermes", tokenizer)
        >>> parser.parse('<tool_call>{"name": "now", "arguments": {}}</tool_call>', []).calls
        [ToolCall(name='now', arguments='{}')]
    """

    def __init__(self, name: str, tokenizer: "Tokenizer") -> None:
        from turnwise.engine import vllm_api as vllm  # seconds to import

        parser = silence(name)
        self._name = name
        try:
            self._parser = parser(tokenizer)
        except Exception as error:  # each parser raises its own errors
            raise InputError(
                f"rollout.tool_parser: {name} does not fit the model's tokenizer: {error}"
            ) from error
        self._start: str | None = getattr(self._parser, "tool_call_start_token", None)
        self._request_type = vllm.ChatCompletionRequest

    def tags(self) -> tuple[str, str]:
        """Return the tags that open and close a call.

        Raises:
            InputError: when the format has no such tags.
        """
        end: str | None = getattr(self._parser, "tool_call_end_token", None)
        if not (self._start and end):
            raise InputError(
                f"rollout.tool_parser: {self._name} does not mark where a call ends, which the "
                "interleaved loop needs; hermes does"
            )
        return self._start, end

    def parse(self, text: str, schemas: Sequence[JsonObject]) -> ParsedText:
        """Split a finished assistant turn into its text and its calls.

        Args:
            schemas: JSON schemas of the offered tools.
        """
        if self._start and self._start not in text:
            return ParsedText(text, [], malformed=False)
        request = self._request_type(messages=[], tools=list(schemas) or None)
        found = self._parser.extract_tool_calls(text, request)
        calls = [ToolCall(c.function.name, c.function.arguments) for c in found.tool_calls]
        malformed = bool(self._start) and not calls
        return ParsedText((found.content or "") if calls else text, calls, malformed)
