"""A limit on the time that vLLM's answer parsers take on the event loop.

A whole answer is parsed there only if it is short, or if another process has parsed it quickly.
Otherwise the answer has the calls that the other process found, or no calls if parsing took too
long there. A stream is parsed until its pieces take too long; the rest of the stream is plain text.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from turnwise.chat.parsing_process import Parsed
from turnwise.chat.template import load_tokenizer
from turnwise.chat.tool_parser import ToolParser
from turnwise.config import ModelConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.internals import vllm_server as vllm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_SECONDS = 0.03
"""Maximum processor time of a parse on the event loop, of a text or of a piece of a stream."""
_SLOW_PIECES = 3  # slow pieces that end parsing; fewer may be due to a busy machine
_MAX_KNOWN = 1_024


class BoundedParsing:
    """Limits the time of vLLM's parsers, and keeps the outcomes of parses of long answers.

    Args:
        name: vLLM's parser of tool calls.
        model: The model, whose tokenizer is loaded again in a process that parses.
        reasons: Whether another parser of vLLM removes reasoning first.
        tokenizer: The model's tokenizer.
        late: Function that is called when an answer is not parsed because that takes too long.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        tokenizer: "Tokenizer",
        late: Callable[[], None],
        *,
        reasons: bool,
    ) -> None:
        self._reasons, self._late = reasons, late
        self._known: dict[int, Parsed | None] = {}
        """Outcomes by the hash of the text; None for a text that is parsed quickly."""
        try:
            self._parser: ToolParser | None = ToolParser(
                name, tokenizer, partial(load_tokenizer, model)
            )
        except InputError:  # a parser of tokens, which reads each token once, needs no limit
            self._parser = None

    async def prepare(self, text: str, tools: Sequence[JsonObject] | None) -> None:
        """Parse a finished answer in another process if that may take long. Await this before
        vLLM's parser gets the answer."""
        parser = self._parser
        if parser is None or not parser.may_take_long(text):
            return
        schemas = [{"function": tool.get("function") or tool} for tool in tools or ()]
        if self._reasons:  # vLLM removes the reasoning first, and may find other calls in the rest
            seconds = await self._seconds(text, schemas)
            seconds += await self._seconds(text.partition("</think>")[2], schemas)
            if seconds > max(_SECONDS, len(text) * 30e-6):
                return
            outcome = None
        elif (outcome := await parser.read_elsewhere(text, schemas)) is None:
            return
        elif outcome.seconds <= _SECONDS:
            outcome = None
        self._known[hash(text)] = outcome
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    async def _seconds(self, text: str, schemas: Sequence[JsonObject]) -> float:
        """Return the processor seconds that a text's parse takes; infinity if it does not end in
        time."""
        assert self._parser is not None
        parsed = await self._parser.read_elsewhere(text, schemas)
        return math.inf if parsed is None else parsed.seconds

    def _parse(self, text: str, request: Foreign, parse: Callable[[], object]) -> object:
        """Return the reasoning, content and calls of a text; call `parse` only if it is quick."""
        parser = self._parser
        if parser is None or not parser.may_take_long(text):
            return parse()
        key, called = hash(text), request.tools and request.tool_choice != "none"
        if self._known.get(key, text) is None:
            return parse()
        outcome = self._known.pop(key, None)
        if outcome is None or not called:
            if called:
                self._late()
            return None, text, None
        calls = [vllm.FunctionCall(name=name, arguments=given) for name, given in outcome.calls]
        return None, outcome.content if outcome.content.strip() else None, calls

    def bounded(self, parser: Foreign) -> Foreign:
        """Return a subclass of one of vLLM's parsers whose parses take a limited time."""
        own = self

        def parse(self: Foreign, text: str, request: Foreign, **options: object) -> object:
            return own._parse(text, request, partial(parser.parse, self, text, request, **options))

        def parse_delta(
            self: Foreign, delta_text: str, *given: object, **options: object
        ) -> object:
            slow = getattr(self, "slow_pieces", 0)
            if slow >= _SLOW_PIECES:
                return vllm.DeltaMessage(content=delta_text) if delta_text else None
            began = time.thread_time()
            delta = parser.parse_delta(self, delta_text, *given, **options)
            if time.thread_time() - began > _SECONDS:
                self.slow_pieces = slow + 1
                if self.slow_pieces == _SLOW_PIECES:
                    own._late()
            return delta

        methods: dict[str, Foreign] = {"parse": parse, "parse_delta": parse_delta}
        return type(parser.__name__, (parser,), methods)
