import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from pydantic_core import core_schema

from tests.blocking import gate, new_gate, tick
from turnwise.core import user_code as tasks
from turnwise.core.user_code import stuck_calls
from turnwise.errors import InputError, where_in_user_code
from turnwise.tools import Tool
from turnwise.tools.toolbox import Toolbox


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def shout(text: str, mark: Literal["!", "?"]) -> str:
    """Say it loudly.

    Args:
        text: What to say.
        mark: How to end.
    """
    await asyncio.sleep(0)
    return text.upper() + mark


def fail() -> None:
    """Fail."""
    raise RuntimeError("out of paper")


def exhaust() -> int:
    """Take from nothing."""
    return next(iter([]))


def leave() -> None:
    """Leave the program."""
    raise SystemExit(3)


def unreachable() -> None:
    """Find nobody."""
    raise TimeoutError("nobody home")


def tangle() -> dict[tuple[int, int], int]:
    """Answer with what JSON cannot hold."""
    return {(1, 2): 3}


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    gate = new_gate()
    yield
    gate.set()


def hang() -> None:
    """Never answer."""
    gate().wait()


async def hang_async() -> None:
    """Never answer, nor let anybody else."""
    gate().wait()


async def await_a_cancelled_task() -> None:
    """Await what somebody cancelled."""
    other = asyncio.ensure_future(asyncio.sleep(60))
    other.cancel()
    await other


async def leave_async() -> None:
    """Leave the program."""
    sys.exit(3)


async def swallow() -> None:
    """Ignore being cancelled."""
    own = gate()
    while not own.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


def shout_long() -> None:
    """Fail at length."""
    raise ValueError("x" * 50_000_000)


def unspeakable() -> None:
    """Fail without words."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise KeyError("no words")

    raise Unspeakable


def half() -> str:
    """Answer with half a character, and a whole one in two halves."""
    return "a\ud800b\ud83d\ude00"


def half_error() -> str:
    """Fail with half a character."""
    raise ValueError("a\ud800b")


def half_list() -> list[str]:
    """Answer with half a character in a list."""
    return ["\ud800"]


def lots() -> list[int]:
    """Answer at length."""
    return list(range(1000))


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def step(self, by: int) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return self.count


def toolbox(*functions: object, timeout: float = 60, max_chars: int = 100) -> Toolbox:
    return Toolbox(functions, timeout=timeout, max_chars=max_chars)  # type: ignore[arg-type]


def test_a_schema_comes_from_type_hints_and_the_docstring() -> None:
    """As for the functions of `tools`."""
    (schema,) = toolbox(shout).schemas
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("shout", "Say it loudly.")
    assert function["parameters"]["required"] == ["text", "mark"]
    assert function["parameters"]["properties"]["mark"]["enum"] == ["!", "?"]
    assert function["parameters"]["properties"]["text"]["description"] == "What to say."


@pytest.mark.parametrize(
    ("name", "arguments", "text", "outcome"),
    [
        ("add", '{"a": 2, "b": 3}', "5", "ok"),
        ("add", '{"a": 2}', "3", "ok"),
        ("shout", '{"text": "hi", "mark": "!"}', "HI!", "ok"),
        (
            "shout",
            '{"text": "hi", "mark": "."}',
            "mark: Input should be '!' or '?'",
            "bad_arguments",
        ),
        ("add", '{"a": "two"}', "a: Input should be a valid integer", "bad_arguments"),
        ("add", '{"b": 1}', "a: Field required", "bad_arguments"),
        ("add", '{"a": 1, "c": 1}', "c: Extra inputs are not permitted", "bad_arguments"),
        ("add", "[1, 2]", "cannot take these arguments", "bad_arguments"),
        ("add", "{", "cannot take these arguments", "bad_arguments"),
        ("fail", "{}", "Error: fail failed: RuntimeError: out of paper", "error"),
        ("subtract", "{}", "there is no tool 'subtract'; tools: add, shout, fail", "unknown"),
    ],
)
async def test_a_call_is_answered_whatever_the_model_did(
    name: str, arguments: str, text: str, outcome: str
) -> None:
    result = await toolbox(add, shout, fail).call(name, arguments)
    assert result.outcome == outcome
    assert text in result.text
    if outcome == "ok":
        assert result.text == text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (exhaust, "StopIteration"),
        (leave, "SystemExit(3)"),
        (unreachable, "TimeoutError: nobody home"),
        (tangle, "keys must be str"),
        (await_a_cancelled_task, "CancelledError"),
        (leave_async, "SystemExit(3)"),
        (unspeakable, "Unspeakable: (its message cannot be read: KeyError)"),
        (half_error, "ValueError: a\ufffdb"),
    ],
)
async def test_what_a_tool_raises_is_an_answer_whatever_it_is(function: object, text: str) -> None:
    result = await toolbox(function).call(function.__name__, "{}")  # type: ignore[attr-defined]
    assert result.outcome == "error"
    assert text in result.text
    assert isinstance(result.error, Exception)
    if function is not tangle:  # which returned well
        assert where_in_user_code(result.error).startswith("tests/tools/test_toolbox.py:")


async def test_a_tool_that_hangs_misses_its_deadline_and_blocks_nobody() -> None:
    """By `rollout.tool_timeout`."""
    started = time.perf_counter()
    box = toolbox(hang, timeout=0.5)
    results = await asyncio.gather(*(box.call("hang", "{}") for _ in range(100)))
    assert {r.outcome for r in results} == {"timeout"}
    assert "hang did not answer within 0.5 s" in results[0].text
    assert (await toolbox(add).call("add", '{"a": 1}')).text == "2"
    assert time.perf_counter() - started < 100 * 0.5, "they waited side by side"


@pytest.mark.parametrize("function", [hang_async, swallow])
async def test_a_stuck_async_tool_misses_its_deadline_alone(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(tasks, "BLOCKED_SECONDS", 0.2)
    box = toolbox(function, shout, timeout=1.0)  # by then it has begun
    ticks: list[None] = []
    ticking = asyncio.create_task(tick(ticks))
    assert (await box.call(function.__name__, "{}")).outcome == "timeout"
    ticking.cancel()
    assert len(ticks) > 1, "the event loop went on"
    assert f"the tool {function.__name__}" in stuck_calls()
    patient = toolbox(function, shout)
    assert (await patient.call("shout", '{"text": "hi", "mark": "!"}')).text == "HI!"


@pytest.mark.parametrize(
    ("function", "text"),
    [(half, "a\ufffdb😀"), (half_list, '["\ufffd"]'), (half_error, "a\ufffdb")],
)
async def test_half_a_character_is_replaced(function: Any, text: str) -> None:
    result = await toolbox(function).call(function.__name__, "{}")
    assert text in result.text
    assert result.text.encode()


async def test_a_long_error_is_cut_as_a_result_is() -> None:
    result = await toolbox(shout_long, max_chars=100).call("shout_long", "{}")
    assert result.outcome == "error"
    head = "Error: shout_long failed: ValueError: "
    assert result.text.startswith(head + "x" * (100 - len(head)) + "\n[")
    left_out = len(head) + 50_000_000 - 100
    assert result.text.endswith(f"\n[{left_out} more characters left out]")
    unknown = await toolbox(max_chars=100).call("y" * 1000, "{}")
    assert len(unknown.text) < 150


async def test_only_the_beginning_of_an_endless_result_is_made() -> None:
    made = 0

    class Endless(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal made
            for number in range(10**9):
                made += 1
                yield number

        def __bool__(self) -> bool:
            return True

    def endless() -> list[int]:
        """Answer without end."""
        return Endless()

    result = await toolbox(endless, timeout=60, max_chars=10).call("endless", "{}")
    assert result.outcome == "truncated"
    assert re.fullmatch(r"\[0, 1, 2, \n\[at least 1\d{6} more characters left out\]", result.text)
    assert made < 10**6


class Mood(Enum):
    GOOD = "good"


class Stay(BaseModel):
    nights: int
    mood: Mood


@dataclass
class Place:
    x: int
    stay: Stay


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            Place(1, Stay(nights=2, mood=Mood.GOOD)),
            '{"x": 1, "stay": {"nights": 2, "mood": "good"}}',
        ),
        ([Stay(nights=2, mood=Mood.GOOD)], '[{"nights": 2, "mood": "good"}]'),
        (Mood.GOOD, '"good"'),
        ({"seen": {1}}, '{"seen": "{1}"}'),
        (np.int64(5), "5"),
        (np.bool_(True), "true"),
        (np.float64(0.1), "0.1"),
        (np.float32(0.1), "0.1"),
        ({"a": np.float16(0.1)}, '{"a": 0.1}'),
        (np.array([[0.1, 2]], dtype=np.float32), "[[0.1, 2.0]]"),
        ([np.arange(3), np.array("a")], '[[0, 1, 2], "a"]'),
        (torch.tensor([1, 2]), "[1, 2]"),
        (np.datetime64("2026-01-02"), '"2026-01-02"'),
        (torch.float32, '"torch.float32"'),
    ],
)
async def test_a_result_with_fields_is_shown_as_an_object(value: object, text: str) -> None:
    def answer() -> object:
        return value

    assert (await toolbox(answer).call("answer", "{}")).text == text


async def test_a_long_result_is_cut_and_says_so() -> None:
    result = await toolbox(lots, max_chars=10).call("lots", "{}")
    whole = json.dumps(list(range(1000)))
    assert result.outcome == "truncated"
    assert result.text == f"{whole[:10]}\n[{len(whole) - 10} more characters left out]"


async def test_bound_methods_share_their_object() -> None:
    counter = Counter()
    box = toolbox(counter.step)
    assert "self" not in str(box.schemas)
    await box.call("step", '{"by": 2}')
    assert (await box.call("step", '{"by": 3}')).text == "5"
    assert counter.count == 5


def untyped(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Add.

    Args:
        a: One.
        b: Two.
    """
    return int(a + b)


@pytest.mark.parametrize("tool", [{"type": "function"}, "add", None])
def test_a_tool_that_is_no_function_is_refused(tool: object) -> None:
    with pytest.raises(InputError, match="a tool must be a function with type hints"):
        toolbox(tool)


def test_a_tool_without_types_is_refused() -> None:
    with pytest.raises(InputError, match=r"tool untyped .*argument a has no type hint"):
        toolbox(untyped)


THREADS: list[threading.Thread] = []


class Checked:
    """A type of arguments whose check is code of the user's own."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        def check(value: object) -> object:
            THREADS.append(threading.current_thread())
            if value == "slow":
                threading.Event().wait(20)
            return value

        return core_schema.no_info_plain_validator_function(check)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_arguments_are_checked_outside_the_event_loop(kind: str) -> None:
    def look_up(value: Checked) -> str:
        """Look something up.

        Args:
            value: What to look up.
        """
        return "found"

    async def look_up_async(value: Checked) -> str:
        """Look something up.

        Args:
            value: What to look up.
        """
        return "found"

    tool = look_up if kind == "plain" else look_up_async
    toolbox = Toolbox([tool], timeout=60, max_chars=99)
    assert (await toolbox.call(tool.__name__, '{"value": "quick"}')).text == "found"
    assert THREADS[-1] is not threading.current_thread()
    if kind == "plain":
        toolbox = Toolbox([tool], timeout=0.1, max_chars=99)
        assert (await toolbox.call(tool.__name__, '{"value": "slow"}')).outcome == "timeout"


NOTHING = {"type": "object", "properties": {}}


async def test_calls_of_ordered_tools_wait_for_each_other() -> None:
    begun, ended, first = list[str](), list[str](), threading.Event()

    def slow(arguments: Any) -> None:
        begun.append("slow")
        first.wait(20)
        ended.append("slow")

    def quick(arguments: Any) -> None:
        begun.append("quick")
        ended.append("quick")

    def beside(arguments: Any) -> None:
        ended.append("beside")
        first.set()

    tools = [
        Tool("slow", "Wait.", NOTHING, slow, in_order=True),
        Tool("quick", "Go.", NOTHING, quick, in_order=True),
        Tool("beside", "Go at once.", NOTHING, beside),
    ]
    toolbox = Toolbox(tools, timeout=60, max_chars=99)
    await asyncio.gather(*(toolbox.call(name, "{}") for name in ("slow", "quick", "beside")))
    assert begun == ["slow", "quick"]
    assert ended == ["beside", "slow", "quick"]


async def test_a_hidden_tool_is_not_described_and_can_be_called() -> None:
    tools = [
        Tool("shown", "Go.", NOTHING, lambda _: "shown"),
        Tool("later", "Go.", NOTHING, lambda _: "later", hidden=True),
    ]
    toolbox = Toolbox(tools, timeout=60, max_chars=99)
    assert [schema["function"]["name"] for schema in toolbox.schemas] == ["shown"]
    assert (await toolbox.call("later", "{}")).text == "later"
    unknown = await toolbox.call("none", "{}")
    assert unknown.text == "Error: there is no tool 'none'; tools: shown"
