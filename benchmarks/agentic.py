"""A seeded agentic load over Chat Completions, as `benchmarks.front` sends it to two servers.

    python -m benchmarks.agentic --base-url http://127.0.0.1:8000/v1 --model NAME [--stream]

Sessions of several turns, some at a time: a first message, an answer of a given number of tokens,
a tool that takes a while, its result, the next answer. A seed decides on every message, number of
tokens and delay, whatever the server answers. Histories grow by the server's answers, including
tool calls. The client runs no tool: it answers each call, or an answer without a call, with a
result that the seed gives. Sessions begin one after another over `SPREAD` seconds.

The first token is the first piece of an answer that a stream brings. The rate covers the first nine
tenths of the turns: after them ever fewer sessions are left.
"""

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.models import PAUSES
from examples.calculator.tool import TOOL_SCHEMA

LONGEST = 2048
"""Context length in tokens that every session fits in, with the demo's tokenizer."""
SPREAD = 0.5
TURNS = (3, 10)
TOKENS = (16, 48)
"""Bounds for the tokens of an answer."""
NUMBERS = (3, 18)
"""Bounds for the numbers in a tool's result."""
FIRST = (10, 50)
"""Bounds for the numbers in the first message."""


@dataclass(frozen=True)
class Step:
    """One turn: the message before an answer, and the length of the answer."""

    seconds: float
    """Seconds that the tool takes before this message."""
    text: str
    tokens: int


@dataclass
class Measured:
    """One run of a load."""

    seconds: float = 0.0
    ended: list[float] = field(default_factory=list)
    """Seconds from the beginning to the end of each turn."""
    turns: list[float] = field(default_factory=list)
    """Seconds of each turn."""
    first: list[float] = field(default_factory=list)
    """Seconds to the first token of each turn; empty without streams."""
    histories: dict[str, str] = field(default_factory=dict)
    """Digest of each session's messages, by its name."""

    @property
    def rate(self) -> float:
        """Turns/s until nine tenths of the turns have ended."""
        most = max(1, len(self.ended) * 9 // 10)
        return most / sorted(self.ended)[most - 1]


class Answer:
    """A message that is put together from the pieces of a stream."""

    def __init__(self) -> None:
        self._content = ""
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, delta: dict[str, Any]) -> bool:
        """Add a piece, and return whether it has any text or call."""
        text, calls = delta.get("content") or "", delta.get("tool_calls") or ()
        self._content += text
        for piece in calls:
            new = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            call = self._calls.setdefault(piece["index"], new)
            call["id"] = piece.get("id") or call["id"]
            for name, part in (piece.get("function") or {}).items():
                call["function"][name] += part or ""
        return bool(text or calls)

    def message(self) -> dict[str, Any]:
        return message_of(self._content, [self._calls[index] for index in sorted(self._calls)])


def message_of(content: str | None, calls: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    """Return an answer as a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]} for call in calls
        ]
    elif not content:
        message["content"] = ""
    return message


def plan(seed: int, number: int) -> list[Step]:
    """Return the messages that one session sends, with delays and answer lengths."""
    chance = random.Random(f"{seed}-{number}")
    shares, seconds = zip(*PAUSES["long-tailed"], strict=True)

    def numbers(most: tuple[int, int]) -> str:
        return " ".join(str(chance.randrange(1000)) for _ in range(chance.randint(*most)))

    first = f"{seed}-{number}: what is {chance.randrange(1000)} plus {chance.randrange(1000)}?"
    steps = [Step(0.0, f"{first} {numbers(FIRST)}", chance.randint(*TOKENS))]
    for turn in range(1, chance.randint(*TURNS)):
        waits = chance.choices(seconds, shares)[0]
        steps.append(Step(waits, f"{turn}: {numbers(NUMBERS)}", chance.randint(*TOKENS)))
    return steps


def replies(answer: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Return the messages after an answer: the results of its calls, or the user's reply."""
    calls = answer.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
    return results or [{"role": "user", "content": text}]


async def ask(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], session: str, into: Measured
) -> dict[str, Any]:
    """Ask for one answer, and note its times; returns the message."""
    began, answer, first = time.perf_counter(), Answer(), 0.0
    used: dict[str, Any] | None = None
    headers = {"x-session-id": session}
    async with http.post(url, json=body, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
        if not body.get("stream"):
            whole = json.loads(await response.read())
            message, used = whole["choices"][0]["message"], whole["usage"]
        else:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[len(b"data: ") :])
                used = piece.get("usage") or used
                for choice in piece["choices"]:
                    if answer.add(choice["delta"]) and not first:
                        first = time.perf_counter() - began
            message = answer.message()
    assert used is not None
    assert used["completion_tokens"] == body["max_tokens"], used
    into.turns.append(time.perf_counter() - began)
    if body.get("stream"):
        into.first.append(first or into.turns[-1])  # an answer may have no text at all
    return message_of(message.get("content"), message.get("tool_calls"))


async def play(
    base_url: str,
    model: str,
    seed: int,
    tag: str,
    *,
    sessions: int,
    lanes: int,
    stream: bool,
) -> Measured:
    """Play all sessions, `lanes` at a time; their names begin with the tag."""
    measured, numbers = Measured(), iter(range(sessions))
    shape: dict[str, Any] = {"model": model, "tools": [TOOL_SCHEMA], "temperature": 0.0}
    if stream:
        shape |= {"stream": True, "stream_options": {"include_usage": True}}
    url, began = f"{base_url}/chat/completions", time.perf_counter()

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        messages: list[dict[str, Any]] = []
        name = f"{tag}-{number}"
        for step in plan(seed, number):
            await asyncio.sleep(step.seconds)
            messages += replies(messages[-1] if messages else {}, step.text)
            limits = {"max_tokens": step.tokens, "min_tokens": step.tokens}
            body = {**shape, **limits, "messages": messages}
            messages.append(await ask(http, url, body, name, measured))
            measured.ended.append(time.perf_counter() - began)
        said = [str(message["content"]) for message in messages]
        measured.histories[name] = hashlib.sha256("\n".join(said).encode()).hexdigest()

    async def lane(http: aiohttp.ClientSession, place: int, left: Iterator[int]) -> None:
        await asyncio.sleep(SPREAD * place / lanes)
        for number in left:
            await one(http, number)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(lane(http, place, numbers) for place in range(lanes)))
    measured.seconds = time.perf_counter() - began
    return measured


def percentile(seconds: Sequence[float], p: int) -> float:
    """Return a percentile in milliseconds."""
    return statistics.quantiles(seconds, n=100)[p - 1] * 1e3


def figures(measured: Measured) -> dict[str, float]:
    """Return the results of a run by name: turns/s, and milliseconds."""
    found = {"turns/s": measured.rate}
    for name, seconds in (("first token", measured.first), ("turn", measured.turns)):
        for p in (50, 99) if seconds else ():
            found[f"p{p} of a {name}"] = percentile(seconds, p)
    return found


def main() -> None:
    """Send the load to a server, and print the figures as JSON."""
    made = argparse.ArgumentParser(prog="benchmarks.agentic")
    made.add_argument("--base-url", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--sessions", type=int, default=64)
    made.add_argument("--lanes", type=int, default=48, help="sessions at a time")
    made.add_argument("--stream", action="store_true")
    options = made.parse_args()
    measured = asyncio.run(
        play(
            options.base_url,
            options.model,
            options.seed,
            f"agentic-{random.getrandbits(40):x}",
            sessions=options.sessions,
            lanes=options.lanes,
            stream=options.stream,
        )
    )
    print(json.dumps({"turns": len(measured.turns), **figures(measured)}))


if __name__ == "__main__":
    main()
