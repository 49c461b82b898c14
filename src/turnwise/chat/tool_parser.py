"""Tool calls in a model's text, read by vLLM's parser for the model's format."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.chat.tool_formats import format_of, is_object
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
    from turnwise.internals import vllm  # seconds to import

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
    """One call that a model asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """An assistant's turn, split into its text and its calls."""

    content: str
    """Text before the calls; the whole text if there are none."""
    calls: list[ToolCall]
    malformed: bool
    """True when the text begins a call that cannot be read: one that is cut off, or whose
    arguments are no JSON object. Then no call is returned, so that none runs by halves."""


class ToolParser:
    """Reads calls in one of vLLM's tool-call formats.

    Args:
        name: vLLM's name of the format, such as `hermes`, which Qwen models write too.
        tokenizer: The model's tokenizer.

    Raises:
        InputError: when vLLM has no parser of that name, or the parser does not fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: "Tokenizer") -> None:
        from transformers import PreTrainedTokenizerBase

        from turnwise.internals import vllm  # seconds to import

        parser = silence(name)
        self._name = name
        self._request_type = vllm.ChatCompletionRequest
        self._type = parser
        self._tokenizer = tokenizer
        if isinstance(tokenizer, PreTrainedTokenizerBase):  # it makes its vocabulary at each call
            self._tokenizer = vllm.get_cached_tokenizer(tokenizer)
        try:
            probe = parser(self._tokenizer)
            probe.extract_tool_calls("", self._request_type(messages=[]))
        except NotImplementedError:
            raise InputError(
                f"rollout.tool_parser: vLLM's parser {name} reads calls in its server only: use "
                "loop: agent"
            ) from None
        except Exception as error:  # each parser raises its own errors
            raise InputError(
                f"rollout.tool_parser: {name} does not fit the model's tokenizer: {error}"
            ) from error
        self._start: str | None = getattr(probe, "tool_call_start_token", None)
        self._end: str | None = getattr(probe, "tool_call_end_token", None)
        self._format = format_of(name, probe)

    @property
    def advice(self) -> str:
        """Message to the model about a call that cannot be read."""
        return self._format.advice

    def tags(self) -> tuple[str, str]:
        """Return the tags that open and close a call.

        Raises:
            InputError: when the format has no such tags.
        """
        if not (self._start and self._end):
            raise InputError(
                f"rollout.tool_parser: {self._name} does not mark where a call ends, which the "
                "interleaved loop needs; hermes does"
            )
        return self._start, self._end

    def parse(self, text: str, schemas: Sequence[JsonObject]) -> ParsedText:
        """Split a finished assistant turn into its text and its calls.

        A call is malformed whatever the parser makes of it: it may raise, take the call for text,
        or return a part of it. A call without any arguments has the arguments {}.

        Args:
            schemas: JSON schemas of the offered tools.
        """
        content, calls = text, list[ToolCall]()
        if not self._start or self._start in text:
            request = self._request_type(messages=[], tools=list(schemas) or None)
            try:
                # A parser of its own: some keep state of the texts that they read.
                found = self._type(self._tokenizer).extract_tool_calls(text, request)
            except Exception:  # a model's text may be anything, and parsers have their own errors
                return ParsedText(text, [], malformed=True)
            calls = [
                ToolCall(c.function.name, c.function.arguments.strip() or "{}")
                for c in found.tool_calls
            ]
            content = (found.content or "") if calls else text
        tools = [schema["function"]["name"] for schema in schemas]
        arguments = [call.arguments for call in calls]
        if not all(map(is_object, arguments)) or self._format.unreadable(text, tools, arguments):
            return ParsedText(text, [], malformed=True)
        return ParsedText(content, calls, malformed=False)
