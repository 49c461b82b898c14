"""The reader of untrusted JSON, from clients, agents, environments and servers.

The size, depth and number of values are limited, and only the expected type is accepted. Anything
else is an `AnswerError`, which the caller turns into a trajectory's failure.
"""

import asyncio
import re
import socket
import time
from itertools import accumulate
from typing import Annotated, TypeVar

import pydantic_core
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from turnwise.errors import InputError
from turnwise.internals.pydantic import bound

_T = TypeVar("_T")

MAX_BYTES = 8 << 20  # maximum size of an answer
MAX_VALUES = 500_000
"""Maximum number of values in an answer: a value of two bytes may take a hundred bytes in
memory."""
MAX_DEPTH = 128
"""Maximum number of objects and lists around a value of a request; JSON parsers fail at two hundred
or more."""
HEADER = 4  # number of bytes of the length before a frame, big-endian
IDENTITY = {"accept-encoding": "identity"}
"""Header of HTTP requests whose answer must not be compressed: its size could not be limited."""
_COUNTED = 1 << 16  # number of bytes that are counted at once
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TEXT = re.compile(rb'"[^"\r\n]*["\r\n]')
_NO_BRACKETS = bytes(each for each in range(256) if each not in _STEP)
_VALUE_BYTES, _KEY_BYTES, _NESTED_BYTES = 40, 100, 200
"""Estimated memory of a value and of a key, and the additional memory of an object or a list."""
_SHOWN = 80  # maximum number of characters that a message quotes of an answer or of a place in it


class AnswerError(Exception):
    """An answer that cannot be used; the message continues a sentence that names the sender."""


Number = Annotated[
    float,
    BeforeValidator(lambda value: float(value) if isinstance(value, bool) else value),
    Field(strict=True, allow_inf_nan=False),
]
"""A finite number, or true and false as 1 and 0, but not a text."""


def read_answer(body: bytes, kind: TypeAdapter[_T], max_values: int = MAX_VALUES) -> _T:
    """Return the value of untrusted JSON, which must be of the type `kind` without conversion.

    Raise AnswerError when it is not JSON (or has a lone surrogate, an integer of thousands of
    digits, or two hundred levels), has too many values, or is of a different type.
    """
    if JsonCount(body).values > max_values:
        raise AnswerError(f"sent more than {max_values:,} values")
    try:
        value: object = pydantic_core.from_json(body)  # `Number` refuses NaN where it matters
    except ValueError as error:
        begin = body[:_SHOWN].decode(errors="replace")
        why = str(error)[:_SHOWN]
        raise AnswerError(f"sent {begin!r}, which is not readable JSON ({why})") from None
    return checked(value, kind)


class JsonCount:
    """Counts the values of JSON while its bytes arrive, in a small part of the time and memory that
    parsing takes. Lines that are not JSON may come between lines of JSON, and are counted, too."""

    def __init__(self, data: bytes = b"") -> None:
        self.values = 0  # an upper bound; keys are not counted
        self.keys = 0
        self.nested = 0  # number of objects and lists
        self.depth = 0  # number of objects and lists around the innermost value
        self._open = 0
        self._in_text = False
        self._rest = b""  # a backslash whose escaped character has not arrived
        self.add(data)

    @property
    def memory(self) -> int:
        """Estimate of the memory of the values in bytes, without the characters of texts."""
        return _VALUE_BYTES * self.values + _KEY_BYTES * self.keys + _NESTED_BYTES * self.nested

    def add(self, data: bytes) -> None:
        """Count the next bytes."""
        view = memoryview(data)
        for start in range(0, len(data), _COUNTED):
            self._add(view[start : start + _COUNTED].tobytes())

    def _add(self, data: bytes) -> None:
        data = (self._rest + data).replace(b"\\\\", b"")
        self._rest = b"\\" if data.endswith(b"\\") else b""
        data = data.replace(b'\\"', b"")
        parts = data.split(b'"')  # texts and what is between them, in turn
        texts, structure = (b"".join(parts[self._in_text ^ text :: 2]) for text in (True, False))
        if b"\n" in texts or b"\r" in texts:  # the line is not JSON; the next one may be
            data = b'"' + data if self._in_text else data
            structure, begun, _ = _TEXT.sub(b"", data).partition(b'"')
            self._in_text = bool(begun)
        else:
            self._in_text ^= len(parts) % 2 == 0
        brackets = structure.translate(None, _NO_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        self.nested += opened
        self.keys += structure.count(b":")
        self.values += opened + structure.count(b",")
        if self.depth <= MAX_DEPTH and brackets:
            levels = [*accumulate(map(_STEP.__getitem__, brackets), initial=self._open)]
            self.depth, self._open = max(self.depth, *levels), levels[-1]


def checked(value: object, kind: TypeAdapter[_T]) -> _T:
    """Return a part of an answer as the type `kind`, or raise an AnswerError that names the first
    value of a different type, or has the message of an InputError that a validator raised."""
    bound(kind)
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:_SHOWN]
        why = f"{place}: {first['msg']}" if place else first["msg"]
        raise AnswerError(f"sent a wrong answer ({why})") from None
    except InputError as error:
        raise AnswerError(f"sent a wrong answer ({error})") from None


def admit(size: int, largest: int = MAX_BYTES) -> None:
    """Refuse an answer of more than `largest` bytes with an AnswerError."""
    if size > largest:
        raise AnswerError(f"sent an answer of more than {largest:,} bytes")


def framed(body: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(body).to_bytes(HEADER, "big") + body


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """Read an answer that begins with its length. If it is longer than `MAX_BYTES`, raise
    AnswerError, and leave its bytes after the length in the stream."""
    size = int.from_bytes(await stream.readexactly(HEADER), "big")
    admit(size)
    return await stream.readexactly(size)


def receive(connection: socket.socket, size: int, ends: float) -> bytes:
    """Receive `size` bytes until `ends`, a time of `time.monotonic`. Raise EOFError or
    ConnectionError if the connection ends, and TimeoutError if any byte is late."""
    parts = bytearray()
    while len(parts) < size:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (part := connection.recv(min(size - len(parts), 1 << 20))):
            raise EOFError
        parts += part
    return bytes(parts)


async def read_line(stream: asyncio.StreamReader) -> bytes:
    """Read a line of a stream that was opened with the limit `MAX_BYTES`; b"" at its end. Raise
    AnswerError for a longer line."""
    try:
        return await stream.readline()
    except ValueError:
        raise AnswerError(f"sent a line of more than {MAX_BYTES:,} bytes") from None
