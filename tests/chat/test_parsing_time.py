"""Texts that vLLM's parsers read for seconds: no text of a model holds the event loop."""

import asyncio
import time
from typing import Any

import pytest

from tests.chat.tool_calls import CALLS, TOKENS
from turnwise.chat.parsing_process import ParsingProcess
from turnwise.chat.tool_parser import ToolParser

MAX_HELD = 0.2
"""Processor time in seconds that the event loop's thread may take for one text."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=TOKENS)


def shapes(name: str) -> list[str]:
    """Return texts of one kind each: a call's beginnings again and again, or an endless value."""
    call = CALLS[name]
    value = call.rindex("1")
    head, size = call[:value], 6_000
    repeated = [head * (size // len(head))]
    if name in SLOW:
        repeated.append(SLOW[name])
    return [
        *repeated,
        *(head + part * (size // len(part)) for part in ('{"', "\\")),
    ]


KEYS = "<arg_key>a</arg_key><arg_value>"
SLOW = {
    "glm45": f"<tool_call>add\n{KEYS * 800}</tool_call>",
    "glm47": f"<tool_call>add\n{KEYS * 800}</tool_call>",
    "ling3": f"<tool_call>add\n{KEYS * 800}</tool_call>",
}
"""A text that a parser reads for more than a second, by the parser."""


class Held:
    """The longest time for which a block's tasks kept the event loop's thread busy, in seconds of
    its processor time, and how often the loop ran another task meanwhile."""

    longest, ticks = 0.0, 0

    def __enter__(self) -> "Held":
        self._last = time.thread_time()
        self._ticking = asyncio.create_task(self._tick())
        return self

    def __exit__(self, *raised: object) -> None:
        self._look()
        self._ticking.cancel()

    def _look(self) -> None:
        now = time.thread_time()
        self.longest, self._last = max(self.longest, now - self._last), now

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            self.ticks += 1
            self._look()


@pytest.mark.parametrize("name", CALLS)
async def test_no_text_holds_the_event_loop(name: str, tokenizer: Any) -> None:
    parser = ToolParser(name, tokenizer)
    for text in shapes(name):
        with Held() as held:
            await parser.read(text, TOOLS)
        assert held.longest < MAX_HELD, text[:200]


@pytest.mark.parametrize("name", SLOW)
async def test_a_parse_that_takes_long_is_ended_and_costs_no_other(
    name: str, tokenizer: Any
) -> None:
    parser = ToolParser(name, tokenizer)
    call = CALLS[name].replace("1", "long " * 500)
    with Held() as held:
        slow, *rest = await asyncio.gather(
            parser.read(SLOW[name], TOOLS), *(parser.read(call, TOOLS) for _ in range(3))
        )
    assert slow.late
    assert slow.malformed
    assert held.longest < MAX_HELD
    assert held.ticks > 20
    for parsed in rest:
        assert [each.name for each in parsed.calls] == ["add"]
        assert parsed == parser.parse(call, TOOLS)


async def test_a_process_that_is_gone_is_replaced(tokenizer: Any) -> None:
    parser = ToolParser("hermes", tokenizer)
    process = parser._process
    assert isinstance(process, ParsingProcess)
    call = CALLS["hermes"]
    assert await process.parse(call, TOOLS) is not None
    process._end.peek()[2][0].kill()
    found = [await process.parse(call, TOOLS) for _ in range(3)]
    assert found[-1] is not None
    process.close()
    assert (again := await process.parse(call, TOOLS)) is not None
    assert again.calls == [("add", '{"a": 1}')]
    process.close()
