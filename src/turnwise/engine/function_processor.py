"""Function calls inside an answer: the engine runs `name(1, 2)` between tags, and adds the result.

`FunctionProcessor` is a logits processor, so every request waits while a function computes. For
slow tools use `rollout.loop: interleaved`, which reads the same calls and runs them outside the
engine.
"""

import ast
import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_and_wait
from turnwise.errors import InputError, describe_error
from turnwise.trajectory.chat_template import any_of

if TYPE_CHECKING:
    import torch

_MAX_CHARS = 8192  # a longer call is refused, and a longer result is cut off
_MARGIN = 8
"""Number of tokens that are searched for the closing tag, in addition to one token for each of the
tag's characters."""


def read_call(text: str) -> tuple[str, list[object], dict[str, object]] | None:
    """Parse a text as one Python call with literal arguments; return its name, positional arguments
    and keyword arguments, or None if the text is anything else.

    Example:
        >>> read_call("add(1, b=2)")
        ('add', [1], {'b': 2})
    """
    if len(text) > _MAX_CHARS:
        return None
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return None
        kwargs = {given.arg: ast.literal_eval(given.value) for given in call.keywords if given.arg}
        if len(kwargs) < len(call.keywords):  # **mapping
            return None
        return call.func.id, [ast.literal_eval(arg) for arg in call.args], kwargs
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


class FunctionProcessor:
    """Runs the calls that a model writes, and forces their results into its answer.

    When the model has written `start_tag`, a call such as `add(1, 2)`, and `end_tag`, the next
    tokens are `result_start`, the result and `result_end`, whatever the model would sample. These
    tokens were not sampled, so training treats them as context, with response mask 0. If a call
    cannot be read, its function is unknown, or an exception is raised, the result begins with
    `Error:`. With several shards, only the first shard runs the function. A subclass may override
    `check_marker`, which finds a call, and `evaluate_expression`, which runs it.

    Args:
        tokenizer: The engine's tokenizer, which the engine passes to functions and classes of
            `engine.logits_processors` that have a parameter named `tokenizer`.
        function_map: Functions by the names that the model uses in calls.
        timeout: Seconds for one call, during which the whole engine waits.
        floats: Whether integers in calls become floats, so that `multiply(3, 302)` gives 906.0.

    Raises:
        InputError: when a tag is empty, or a value of `function_map` is not callable.

    Example:
        # my_processors.py, for engine.logits_processors: [my_processors:calculator]
        def calculator(tokenizer):
            return FunctionProcessor(tokenizer, {"add": lambda a, b: a + b}, "<call>", "</call>")
    """

    def __init__(
        self,
        tokenizer: Foreign,
        function_map: Mapping[str, Callable[..., object]],
        start_tag: str = "<tool_call>",
        end_tag: str = "</tool_call>",
        result_start: str = "\n<tool_result>\n",
        result_end: str = "\n</tool_result>\n",
        *,
        timeout: float = 10.0,
        floats: bool = False,
    ) -> None:
        if not start_tag or not end_tag:
            raise InputError("FunctionProcessor: start_tag and end_tag must not be empty")
        if wrong := [name for name, function in function_map.items() if not callable(function)]:
            raise InputError(f"FunctionProcessor: {wrong[0]} in function_map is not callable")
        self._tokenizer = tokenizer
        self._functions = dict(function_map)
        self._tags = start_tag, end_tag
        self._result_tags = result_start, result_end
        self._timeout = timeout
        self._floats = floats
        self._result: list[int] = []  # ids of the last result
        self._at = 0  # position in the completion of the first of these ids
        self.forced = False
        """Whether this processor, when it was last called, allowed only one token."""

    def clone(self) -> "FunctionProcessor":
        """Return a copy with a new state, because each request needs its own processor."""
        other = copy.copy(self)
        other._result, other._at, other.forced = [], 0, False
        return other

    def __call__(self, token_ids: list[int], logits: "torch.Tensor") -> "torch.Tensor":
        """Return the logits [V] of the token after `token_ids`, the completion so far."""
        # vLLM may call twice at the same position, if it drops a token or computes a prompt in
        # parts.
        place = len(token_ids) - self._at
        inside = 0 <= place < len(self._result)
        if not inside and (call := self.check_marker(token_ids)) is not None:
            from turnwise.internals import vllm  # an engine's process has imported it already

            result = vllm.once_for_all_shards(partial(self._evaluated, call))
            before, after = map(self._encode, self._result_tags)
            self._result, place = [*before, *self._escape(result), *after], 0
        self.forced = 0 <= place < len(self._result)
        if not self.forced:
            return logits
        forced = logits.new_full(logits.shape, -math.inf)
        forced[self._result[place]] = 0.0
        return forced

    def check_marker(self, token_ids: list[int]) -> str | None:
        """Return the text between the tags if the last of `token_ids` completes the closing tag of
        a call; otherwise None."""
        start_tag, end_tag = self._tags
        start = self._at + len(self._result)
        recent = max(start, len(token_ids) - len(end_tag) - _MARGIN)
        if end_tag not in self._decode(token_ids[recent:]):
            return None
        text, _, _ = self._decode(token_ids[start:]).rpartition(end_tag)
        self._at, self._result = len(token_ids), []  # do not read the same tag twice
        _, opened, call = text.rpartition(start_tag)
        return call if opened else None

    def evaluate_expression(self, expression: str) -> object:
        """Run the call between the tags, and return its result, which is shown to the model as
        text. If this method raises an error, the model sees `Error:` and the error."""
        if (call := read_call(expression)) is None:
            return f"Error: write one call such as name(1, 2), not {expression.strip()[:80]!r}"
        name, args, kwargs = call
        if (function := self._functions.get(name)) is None:
            known = ", ".join(self._functions) or "none"
            return f"Error: there is no function {name}; functions: {known}"
        if self._floats:
            args = [_as_float(value) for value in args]
            kwargs = {key: _as_float(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    def _evaluated(self, expression: str) -> str:
        """Return the result of a call, or its error, as text; never raise."""
        try:
            # Also convert the result to text inside the call, because its __str__ is user code.
            run = lambda: str(self.evaluate_expression(expression))  # noqa: E731
            what = f"the function {expression.strip().partition('(')[0][:80]}"
            result = call_and_wait(run, name=what, seconds=self._timeout)
        except Exception as error:
            result = f"Error: {describe_error(error)}"
        return result[:_MAX_CHARS]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return any_of({*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()})

    def _escape(self, text: str) -> list[int]:
        """Return the ids of a result, with the text of special tokens as ordinary tokens."""
        edges = [found.start() + 1 for found in self._special.finditer(text)]
        parts = itertools.pairwise([0, *edges, len(text)])
        return [id for start, end in parts for id in self._encode(text[start:end])]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
