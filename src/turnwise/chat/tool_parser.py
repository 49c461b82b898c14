"""Tool calls in a model's text, read by vLLM's parser for the model's format.

vLLM's parsers return complete calls, but differ for a call that is cut off or badly written: some
take it for text, some raise, and some return a call with fewer arguments or with a part of its
name. `ToolFormat.unreadable` finds such calls for all parsers in the same way, by the marks that
begin and end a call in each format.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from turnwise.chat import gemma4
from turnwise.chat.parsing_process import Parsed, ParsingProcess
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SHORTEST_PART = 4
"""Minimum number of a mark's first characters at the end of a text that count as a begun mark."""
_MAX_CALLS, _MAX_NESTED, _MAX_SPACE = 200, 200, 2_000
"""Maximum number of call marks, of nested brackets, and of consecutive spaces in one turn. With
more, the time of some of vLLM's parsers grows with the square of the turn's length or faster."""
_SPACE = re.compile(r"([\[{(:,])\s+")
"""Space that a call without a mark may have after its punctuation."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Marks of a tool-call format."""

    begins: tuple[str, ...]
    """Texts that begin a section of calls, or one call."""
    each: str = ""
    """Text that begins every single call; "" if the texts in `begins` do."""
    ends: str = ""
    """Pattern of the end of a call; "" where valid JSON arguments show that a call is complete, or
    the parser itself waits for the end."""
    bare: Callable[[str], str] | None = None
    """Function that returns the beginning of a tool's call, where no mark precedes calls."""
    value_ends: tuple[str, ...] = ()
    """Mark at the end of a value, then the marks that may follow it; () where values are JSON. If a
    value quotes a mark, parsers cut the value there."""
    in_place: int = 1_000
    """Number of characters that its parser always reads within some hundredths of a second."""
    shape: str = "it again, complete and in the format that you were given"
    """Description of a call, for the advice to the model."""

    @property
    def advice(self) -> str:
        """Message to the model about a call that cannot be read."""
        return f"Error: the tool call cannot be read; write {self.shape}"

    def unreadable(self, text: str, tools: Iterable[str], arguments: Sequence[str]) -> bool:
        """Return whether an assistant's text, outside of its reasoning, begins a call that was not
        read. `tools` names the offered tools; `arguments` has the arguments of the calls read."""
        text = text.rpartition("</think>")[2]
        openings = [self.bare(tool) for tool in tools] if self.bare else []
        if arguments:
            return self._has_another_call(text, openings, arguments)
        return self._begins_a_call(text, openings)

    def takes_too_long(self, text: str) -> bool:
        """Return whether a text exceeds a limit beyond which some parsers take too long."""
        marks = {*self.begins, self.each} - {""}
        if any(text.count(mark) > _MAX_CALLS for mark in marks):
            return True
        if any(len(run) > _MAX_SPACE for run in re.findall(r"\s+", text)):
            return True
        depth = 0
        for bracket in re.findall(r"[\[\]{}]", text):
            depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
            if depth > _MAX_NESTED:
                return True
        return False

    def _begins_a_call(self, text: str, openings: Sequence[str]) -> bool:
        """Return whether a text from which no call was read begins a call or ends within a mark."""
        if any(mark in text for mark in self.begins):
            return True
        parts = [
            mark[:length]
            for mark in self.begins
            if not mark[0].isalnum()  # no plain word
            for length in range(_SHORTEST_PART, len(mark))
        ]
        if text.endswith(tuple(parts)):
            return True
        compact = _without_space(text)
        if any(opening in compact for opening in openings):
            return True
        return len(compact) > 1 and any(opening.startswith(compact) for opening in openings)

    def _has_another_call(
        self, text: str, openings: Sequence[str], arguments: Sequence[str]
    ) -> bool:
        """Return whether a text has more calls than were read; `arguments` has the arguments of the
        calls read."""
        # Count the marks of calls, except those that the arguments quote.
        if self.bare:
            where, marks = _without_space(text), openings
        else:
            where, marks = text, [self.each] if self.each else self.begins
        found = sum(where.count(mark) for mark in marks)
        quoted = sum(call.count(mark) for call in arguments for mark in marks)
        begun = max(0, found - quoted)
        # More calls begin than were read, or fewer end than begin.
        if begun > len(arguments):
            return True
        if self.value_ends and self._cuts_a_value(text, arguments):
            return True
        return bool(self.ends) and len(re.findall(self.ends, text)) < max(1, begun)

    def _cuts_a_value(self, text: str, arguments: Sequence[str]) -> bool:
        """Return whether a text has more ends of values than the parser read values, or an end
        inside a value."""
        end, *marks = self.value_ends
        after = text.split(end)[1:]
        if len(after) > sum(len(json.loads(call)) for call in arguments if is_object(call)):
            return True
        return not all(rest.lstrip().startswith(tuple(marks)) for rest in after if rest.strip())


def _without_space(text: str) -> str:
    """Return a text as `ToolFormat.bare` writes a call: without space after its punctuation."""
    return _SPACE.sub(r"\1", text.strip())


def is_object(arguments: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _typed(arguments: str, schema: object) -> str:
    """Return arguments with the types that the tool's schema names; some parsers leave values
    as texts."""
    if not is_object(arguments) or not isinstance(schema, dict):
        return arguments
    known = schema.get("properties")
    given = json.loads(arguments)
    typed = (
        {key: _of_type(value, known.get(key)) for key, value in given.items()} if known else given
    )
    return arguments if typed == given else json.dumps(typed, ensure_ascii=False)


def _of_type(value: object, schema: object) -> object:
    if not isinstance(value, str) or not isinstance(schema, dict) or gemma4.takes_texts(schema):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _python_call(tool: str) -> str:
    return f"[{tool}("


def _tagged(name: str, ends: str = "", value_ends: tuple[str, ...] = ()) -> ToolFormat:
    return ToolFormat((f"<{name}>",), ends=ends, value_ends=value_ends)


def _tagged_object(name: str) -> ToolFormat:
    return replace(_tagged(name), shape="one JSON object with name and arguments")


def _section(
    section: str, call: str, ends: str = "", value_ends: tuple[str, ...] = ()
) -> ToolFormat:
    return ToolFormat((section, call), call, ends, value_ends=value_ends)


def _dsml(section: str, space: str = "") -> ToolFormat:
    tag = f"｜DSML｜{space}invoke"
    value = f"｜DSML｜{space}parameter"
    value_ends = (f"</{value}>", f"<{value}", f"</{tag}>")
    return _section(f"<｜DSML｜{section}", f"<{tag} ", re.escape(f"</{tag}>"), value_ends)


def _functions(tag: str) -> ToolFormat:
    value_ends = ("</parameter>", "<parameter=", "</function>")
    return _section(f"<{tag}>", "<function=", "</function>", value_ends)


_DEEPSEEK = _section("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_PAIRS = ("</arg_value>", "<arg_key>", "</tool_call")
_INVOKED = ("</parameter>", "<parameter", "</invoke>")
_HUNYUAN = ToolFormat(
    ("<tool_calls", "<tool_call"), "<tool_call>", "</tool_call(:[^>]*)?>", value_ends=_PAIRS
)
_LLAMA = ToolFormat(("<|python_tag|>",), bare=lambda tool: '{"name":' + json.dumps(tool))
_MINIMAX = "]<]minimax[>["

FORMATS: dict[str, ToolFormat] = {
    "apertus": ToolFormat(("<|tools_prefix|>",), "<|tools_prefix|>", r"\]"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _dsml("function_calls>"),
    "deepseek_v4": _dsml("tool"),
    "deepseek_v41": _dsml(" calls>", " "),
    "dots": replace(
        _section("<dots_function_call>", "<invoke ", "</invoke>", _INVOKED), in_place=250
    ),
    "ernie45": _tagged_object("tool_call"),
    "functiongemma": ToolFormat(("<start_function_call>",), ends=r"\}"),
    "gemma4": ToolFormat(("<|tool_call>",), ends=re.escape("<tool_call|>")),
    "gigachat3": ToolFormat(("<|function_call|>", "function call<|role_sep|>")),
    "glm45": _tagged("tool_call", "</tool_call>", _PAIRS),
    "glm47": _tagged("tool_call", "</tool_call>", _PAIRS),
    "granite": ToolFormat(("<|tool_call|>", "<tool_call>"), ends=r"\]"),
    "granite-20b-fc": _tagged_object("function_call"),
    "granite4": _tagged_object("tool_call"),
    "hermes": _tagged_object("tool_call"),
    "hunyuan_a13b": _tagged("tool_calls"),
    "hy_v3": _HUNYUAN,
    "hy_v4": _HUNYUAN,
    "inkling": ToolFormat(
        ("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        "<|content_invoke_tool_json|>",
        r"\}",
    ),
    "internlm": ToolFormat(("<|action_start|>",)),
    "jamba": _tagged("tool_calls"),
    "k2_horizon": _section(
        "<ifm|tool_calls>",
        "<ifm|tool_call>",
        value_ends=("</ifm|arg_value>", "<ifm|arg_key>", "</ifm|tool_call>"),
    ),
    "kimi_k2": _section(
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", r"<\|tool_call_end\|>|\}\s*$"
    ),
    "kimi_k3": ToolFormat(
        ("<|open|>tools<|sep|>",),
        "<|open|>call",
        value_ends=("<|close|>argument<|sep|>", "<|open|>argument", "<|close|>call"),
    ),
    "lfm2": ToolFormat(("<|tool_call_start|>",)),
    "ling3": _tagged("tool_call", "</tool_call>", _PAIRS),
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": ToolFormat(("<|python_start|>",), bare=_python_call, in_place=500),
    "longcat": _tagged_object("longcat_tool_call"),
    "mimo": _functions("tool_call"),
    "minicpm5": ToolFormat(("<function name",), value_ends=("</param>", "<param ", "</function>")),
    "minimax_m2": _section("<minimax:tool_call>", "<invoke name=", "</invoke>", _INVOKED),
    "minimax_m3": ToolFormat(
        (f"{_MINIMAX}<tool_call>",), f"{_MINIMAX}<invoke", re.escape(f"{_MINIMAX}</invoke>")
    ),
    "mistral": ToolFormat(("[TOOL_CALLS]",), ends=r"[}\]]\s*$"),
    "muse_glimmer": _section(
        "<atem:function_calls>",
        "<atem:invoke",
        value_ends=("</atem:parameter>", "<atem:parameter", "</atem:invoke>"),
    ),
    "olmo3": _tagged("function_calls"),
    "phi4_mini_json": ToolFormat(("functools[",)),
    "plamo3": _section(
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:begin_tool_request:plamo|>",
        r"<\|plamo:end_tool_arguments:plamo\|>",
    ),
    "poolside_v1": _tagged("tool_call", value_ends=_PAIRS),
    "pythonic": ToolFormat((), bare=_python_call, in_place=500),
    "qwen3_coder": _functions("tool_call"),
    "qwen3_json": _tagged_object("tool_call"),
    "qwen3_xml": _functions("tool_call"),
    "seed_oss": _functions("seed:tool_call"),
    "step3": ToolFormat(
        ("<｜tool_calls_begin｜>",),
        "<｜tool_call_begin｜>",
        value_ends=("</steptml:parameter>", "<steptml:parameter", "</steptml:invoke>"),
    ),
    "step3p5": _functions("tool_call"),
    "xlam": ToolFormat(("[TOOL_CALLS]", "<tool_call>"), bare=_LLAMA.bare),
}
"""The formats of vLLM's parsers, by name; tests compare them with vLLM's list."""


def format_of(name: str, parser: object = None) -> ToolFormat:
    """Return the format of a parser. A plug-in's parser is not in `FORMATS`; its attributes give
    its opening mark."""
    if name in FORMATS:
        return FORMATS[name]
    names = ("tool_calls_start_token", "tool_call_start_token", "bot_token", "bot_string")
    marks = [getattr(parser, attribute, None) for attribute in names]
    return ToolFormat(tuple(mark for mark in marks if isinstance(mark, str) and mark))


def check_parser_name(name: str) -> None:
    """Raise an `InputError` if vLLM has no parser of this name. Import vLLM, if it is
    installed, only for a name that is not in `FORMATS`, such as a plug-in's."""
    if name in FORMATS:
        return
    if find_spec("vllm") is None:
        raise _unknown(name)
    silence(name)


def _unknown(name: str) -> InputError:
    close = get_close_matches(name, FORMATS, 1)
    meant = f"; did you mean {close[0]}?" if close else "; hermes fits Qwen models"
    return InputError(
        f"rollout.tool_parser should be one of {', '.join(FORMATS)}, not {name!r}{meant}"
    )


def silence(name: str) -> "Callable[[Tokenizer], Any]":
    """Return vLLM's parser class of a format, or raise InputError. Switch off the parser's logging,
    because it logs a traceback for each unreadable call. (vLLM resets log levels, not filters.)"""
    from turnwise.internals import vllm  # seconds to import

    try:
        parser: Callable[[Tokenizer], Any] = vllm.ToolParserManager.get_tool_parser(name)
    except KeyError:
        raise _unknown(name) from None
    logging.getLogger(parser.__module__).addFilter(_drop)
    return parser


def _drop(record: logging.LogRecord) -> bool:  # one function, so it is added only once
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
    """Text before the calls; the whole text if there are no calls."""
    calls: list[ToolCall]
    malformed: bool
    """True when the text begins a call that cannot be read, because it is cut off or its arguments
    are not a JSON object. If so, no call is returned, so that a turn never runs only some of its
    calls."""
    late: bool = False
    """True when `malformed` is True because the parse did not end in time."""


def _same(tokenizer: "Tokenizer") -> "Tokenizer":
    return tokenizer


def _make(name: str, load: "Callable[[], Tokenizer]") -> "ToolParser":
    return ToolParser(name, load())


class ToolParser:
    """Reads calls in one of vLLM's tool-call formats, such as `hermes`, which Qwen models also
    write. Raise InputError when vLLM has no such format, or the format does not fit the tokenizer.

    `load` loads the tokenizer in another process; it is needed for a tokenizer that cannot be
    pickled, such as vLLM's.
    """

    def __init__(
        self, name: str, tokenizer: "Tokenizer", load: "Callable[[], Tokenizer] | None" = None
    ) -> None:
        from transformers import PreTrainedTokenizerBase

        from turnwise.internals import vllm  # seconds to import

        self._name, self._type, self._tokenizer = name, silence(name), tokenizer
        self._request_type = vllm.ChatCompletionRequest
        if isinstance(tokenizer, PreTrainedTokenizerBase):  # each call builds its vocabulary
            self._tokenizer = vllm.get_cached_tokenizer(tokenizer)
        try:
            probe = self._type(self._tokenizer)
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
        # The process starts when it is first needed.
        self._process = ParsingProcess(partial(_make, name, load or partial(_same, tokenizer)))
        self.advice = self._format.advice  # message to the model about a call that cannot be read

    def tags(self) -> tuple[str, str]:
        """Return the tags that open and close a call; raise InputError if a format has no tags."""
        if not (self._start and self._end):
            raise InputError(
                f"rollout.tool_parser: {self._name} does not mark where a call ends, which the "
                "interleaved loop needs; hermes does"
            )
        return self._start, self._end

    async def read(self, text: str, schemas: Sequence[JsonObject]) -> ParsedText:
        """Split a finished assistant turn as `parse` does, without blocking the event loop. A text
        that may take long is parsed in another process; if that parse is late, it is malformed."""
        if self._format.takes_too_long(text):
            tools = [schema["function"]["name"] for schema in schemas]
            return ParsedText(text, [], malformed=self._format.unreadable(text, tools, ()))
        if not self.may_take_long(text):
            return self.parse(text, schemas)
        parsed = await self.read_elsewhere(text, schemas)
        if parsed is None:
            return ParsedText(text, [], malformed=True, late=True)
        calls = [ToolCall(*each) for each in parsed.calls]
        return ParsedText(parsed.content, calls, parsed.malformed)

    async def read_elsewhere(self, text: str, schemas: Sequence[JsonObject]) -> Parsed | None:
        """Parse a text in another process, and measure the CPU time; None if the parse did not end
        in time."""
        return await self._process.parse(text, schemas)

    def may_take_long(self, text: str) -> bool:
        """Return whether the parse of a text may take more than some hundredths of a second."""
        if self._start and self._start not in text:
            return False
        return len(text) > self._format.in_place or self._format.takes_too_long(text)

    def parse(self, text: str, schemas: Sequence[JsonObject]) -> ParsedText:
        """Split a finished assistant turn into its text and its calls; `schemas` describes the
        tools.

        The parse may take any time, while `read` has a time limit. A broken call makes the turn
        malformed, whether vLLM's parser raises, takes the call for text, or returns a part of it. A
        call without any arguments has the arguments {}.
        """
        content, calls = text, list[ToolCall]()
        tools = [schema["function"]["name"] for schema in schemas]
        if not self._start or self._start in text:
            request = self._request_type(messages=[], tools=list(schemas) or None)
            try:
                # Make a new parser each time, because some parsers keep state of texts.
                found = self._type(self._tokenizer).extract_tool_calls(text, request)
            except Exception:  # a model's text may be anything, and parsers have their own errors
                return ParsedText(text, [], malformed=True)
            calls = [
                ToolCall(c.function.name, c.function.arguments.strip() or "{}")
                for c in found.tool_calls
            ]
            if self._format.value_ends or self._name == "gemma4":
                parameters = {
                    each["function"]["name"]: each["function"].get("parameters") or {}
                    for each in schemas
                }
                if self._name == "gemma4":
                    read = [(call.name, call.arguments) for call in calls]
                    typed = gemma4.with_types(text, read, parameters)
                else:
                    typed = [_typed(c.arguments, parameters.get(c.name)) for c in calls]
                calls = [ToolCall(call.name, t) for call, t in zip(calls, typed, strict=True)]
            content = (found.content or "") if calls else text
        arguments = [call.arguments for call in calls]
        if not all(map(is_object, arguments)) or self._format.unreadable(text, tools, arguments):
            return ParsedText(text, [], malformed=True)
        return ParsedText(content, calls, malformed=False)
