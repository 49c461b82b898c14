"""The reader of what is not trusted: whatever comes, a value of the type or an AnswerError."""

import asyncio
import json
import math
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from turnwise.core.untrusted import (
    HEADER,
    MAX_BYTES,
    AnswerError,
    JsonCount,
    Number,
    checked,
    read_answer,
    read_frame,
    read_line,
    receive,
)


class Scored(TypedDict, total=False):
    reward: Number
    names: list[str]


ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)
SCORED = TypeAdapter(Scored)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["reward", "names", "more"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    for kind in (ANYTHING, SCORED):
        with suppress(AnswerError):
            read_answer(body, kind)


@given(json_values, st.integers(0, 200))
def test_json_is_of_the_type_or_refused(value: Any, cut: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    for sent in (body, body[:cut]):
        try:
            read = read_answer(sent, SCORED)
        except AnswerError:
            continue
        assert isinstance(read, dict)
        assert math.isfinite(read.get("reward", 0.0))
        assert all(isinstance(name, str) for name in read.get("names", []))
        "".join(read.get("names", [])).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not readable JSON"),
        (b"{}{}", "not readable JSON"),
        (b'"\xff"', "not readable JSON"),
        (b'{"names": ["\\ud800"]}', "not readable JSON"),
        (b'{"reward": ' + b"1" * 5_000 + b"}", "not readable JSON"),
        (b"[" * 300 + b"]" * 300, "not readable JSON"),
        (b"[" * 300_000, "not readable JSON"),
        (b'{"a":' * 100_000, "not readable JSON"),
        (b"[" + b"[]," * 600_000 + b"[]]", "more than 500,000 values"),
        (b'{"reward": NaN}', "reward: Input should be a finite number"),
        (b'{"reward": -Infinity}', "reward: Input should be a finite number"),
        (b'{"reward": 1e999}', "reward: Input should be a finite number"),
        (b'{"reward": ' + b"9" * 400 + b"}", "reward: Input should be a valid number"),
        (b'{"reward": "1"}', "reward: Input should be a valid number"),
        (b'{"reward": null}', "reward: Input should be a valid number"),
        (b'{"names": "ab"}', "names: Input should be a valid list"),
        (b'{"names": [1]}', "names.0: Input should be a valid string"),
        (b"[]", "wrong answer"),
    ],
)
def test_what_is_refused_says_why(body: bytes, words: str) -> None:
    with pytest.raises(AnswerError, match=words) as raised:
        read_answer(body, SCORED)
    assert len(str(raised.value)) < 500


def test_what_is_sound_is_read() -> None:
    assert read_answer(b' {"reward": 1, "names": ["\\ud83d\\ude00"], "more": {}}\n', SCORED) == {
        "reward": 1.0,
        "names": ["😀"],
    }
    assert checked({"reward": True}, SCORED) == {"reward": 1.0}


def test_an_answer_may_be_a_long_text_with_commas_and_brackets() -> None:
    prose = "first, [second], {third}; " * 200_000
    assert read_answer(json.dumps([prose]).encode(), ANYTHING) == [prose]


async def frames(sent: bytes) -> bytes:
    reader = asyncio.StreamReader()
    reader.feed_data(sent)
    reader.feed_eof()
    return await read_frame(reader)


@given(st.binary(max_size=40))
def test_a_frame_is_whole_or_refused(sent: bytes) -> None:
    size = int.from_bytes(sent[:HEADER], "big")
    try:
        body = asyncio.run(frames(sent))
    except asyncio.IncompleteReadError:
        assert len(sent) < HEADER + size
    except AnswerError:
        assert size > MAX_BYTES
    else:
        assert body == sent[HEADER : HEADER + size]


def test_a_huge_frame_is_refused_before_it_comes() -> None:
    for size in (MAX_BYTES + 1, 2**31, 2**32 - 1):
        with pytest.raises(AnswerError, match="an answer of more than 8,388,608 bytes"):
            asyncio.run(frames(size.to_bytes(HEADER, "big")))


def test_what_drips_has_one_deadline_for_all_of_it() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            theirs.send(b"x")

    thread = threading.Thread(target=drip)
    with ours, theirs:
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(ours, 100, time.monotonic() + 0.3)
        ended.set()
        thread.join()
        assert time.monotonic() - began >= 0.3
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(b"half")
        with pytest.raises(EOFError):
            receive(ours, 100, time.monotonic() + 60.0)


async def test_a_line_has_a_largest_length() -> None:
    reader = asyncio.StreamReader(limit=1_000)
    reader.feed_data(b"short\n" + b"x" * 5_000)
    assert await read_line(reader) == b"short\n"
    with pytest.raises(AnswerError, match="a line of more than"):
        await read_line(reader)


def counted(value: object, depth: int = 0) -> tuple[int, int, int, int]:
    """Return the values, keys, objects and lists in a value, and its depth."""
    if not isinstance(value, dict | list):
        return 1, 0, 0, depth
    inner = list(value.values()) if isinstance(value, dict) else value
    parts = [counted(each, depth + 1) for each in inner]
    values, keys, nested = (sum(part[number] for part in parts) for number in range(3))
    keys += len(value) if isinstance(value, dict) else 0
    deepest = max((part[3] for part in parts), default=depth + 1)
    return values + 1, keys, nested + 1, deepest


@given(json_values, st.integers(1, 12), st.booleans())
def test_what_json_becomes_is_counted_as_it_arrives(value: Any, size: int, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode(errors="replace")
    count = JsonCount()
    for begin in range(0, len(body), size):
        count.add(body[begin : begin + size])
    values, keys, nested, depth = counted(value)
    assert (count.keys, count.nested, count.depth) == (keys, nested, depth)
    assert values - 1 <= count.values <= values + nested


@given(
    st.lists(st.tuples(st.text('[]{},:"\\\\a', max_size=12), json_values), max_size=4),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.integers(1, 12),
)
def test_lines_between_hide_no_value(lines: list[tuple[str, Any]], end: str, size: int) -> None:
    """Events of a server have lines that are no JSON, with any number of quotation marks."""
    count = JsonCount()
    body = "".join(f": {line}{end}data: {json.dumps(each)}{end}" for line, each in lines).encode()
    for begin in range(0, len(body), size):
        count.add(body[begin : begin + size])
    assert count.values >= sum(counted(each)[0] - 1 for _, each in lines)
    assert count.nested >= sum(counted(each)[2] for _, each in lines)
    count.add(b"[1,2]")
    read = count.values
    count.add(b"[1,2]")
    assert count.values == read + 2


def test_one_mistake_of_an_answer_is_looked_for() -> None:
    kind = TypeAdapter(list[dict[str, Number]])
    with pytest.raises(AnswerError, match=r"\(0.a: "):
        checked([{"a": "x"}] * 100_000, kind)
    with pytest.raises(ValidationError) as error:
        kind.validate_python([{"a": "x"}] * 100_000)
    assert error.value.error_count() == 1
