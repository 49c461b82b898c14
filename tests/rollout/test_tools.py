import asyncio
import json
import threading
import time
from typing import Literal

import pytest

from turnwise.errors import InputError
from turnwise.rollout.tools import Toolbox


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


def hang() -> None:
    """Never answer."""
    threading.Event().wait()


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


def toolbox(*functions: object, timeout: float = 5, max_chars: int = 100) -> Toolbox:
    return Toolbox(functions, timeout=timeout, max_chars=max_chars)  # type: ignore[arg-type]


def test_a_schema_comes_from_type_hints_and_the_docstring() -> None:
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
    ],
)
async def test_what_a_tool_raises_is_an_answer_whatever_it_is(function: object, text: str) -> None:
    result = await toolbox(function).call(function.__name__, "{}")  # type: ignore[attr-defined]
    assert result.outcome == "error"
    assert text in result.text


async def test_a_tool_that_hangs_misses_its_deadline_and_blocks_nobody() -> None:
    started = time.perf_counter()
    box = toolbox(hang, add, timeout=0.2)
    results = await asyncio.gather(*(box.call("hang", "{}") for _ in range(100)))
    assert {r.outcome for r in results} == {"timeout"}
    assert "hang did not answer within 0.2 s" in results[0].text
    assert (await box.call("add", '{"a": 1}')).text == "2"
    assert time.perf_counter() - started < 5


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


def undescribed(a: int) -> int:
    """Negate."""
    return -a


@pytest.mark.parametrize(("function", "argument"), [(untyped, "a"), (undescribed, "a")])
def test_a_tool_that_cannot_be_described_is_refused(function: object, argument: str) -> None:
    name = function.__name__  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=rf"tool {name} .*\b{argument}\b.*type hint"):
        toolbox(function)
