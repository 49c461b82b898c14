"""A client of the soak test, in a process of its own, which is killed in the middle of its streams.

    python -m benchmarks.soak.client URL PROBLEMS LANES

Each lane has one conversation after another, streamed and with the calculator: half of them in a
session, whose trajectory is audited at its end, and half without one. Every event is a line of JSON
on standard output; SIGTERM ends it after the conversations in progress.
"""

import asyncio
import itertools
import json
import random
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from examples.calculator.tool import TOOL_SCHEMA, calculate
from turnwise.trajectory import Trajectory, audit

TURNS = 3
SECONDS = 240.0
"""Deadline of a request, in seconds."""
Message = dict[str, Any]


class RequestError(Exception):
    """The end of a request without an answer."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome
        """reported: the server said why; lost: it did not."""


def say(event: str, **fields: object) -> None:
    """Write an event, at once."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def ask(http: aiohttp.ClientSession, url: str, messages: list[Message]) -> Message:
    """Stream one answer; returns its message.

    Raises:
        RequestError: when there is none.
    """
    name = uuid.uuid4().hex
    body = {"model": "policy", "messages": messages, "tools": [TOOL_SCHEMA], "max_tokens": 64}
    say("begin", request=name)
    try:
        async with http.post(f"{url}/chat/completions", json={**body, "stream": True}) as response:
            if response.status != 200:
                raise RequestError("reported", f"{response.status} {await response.text()}")
            message = await _read(response, name)
    except RequestError as error:
        say("end", request=name, outcome=error.outcome, why=str(error))
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        why = f"{type(error).__name__}: {error}"
        say("end", request=name, outcome="lost", why=why)
        raise RequestError("lost", why) from error
    say("end", request=name, outcome="answered")
    return message


async def _read(response: aiohttp.ClientResponse, name: str) -> Message:
    """Return the message of a stream; report its first token."""
    text, calls, finish, streaming = "", dict[int, Message](), None, False
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RequestError("reported", json.dumps(chunk["error"]))
        for choice in chunk["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"] or finish
            if not streaming and (delta.get("content") or delta.get("tool_calls")):
                streaming = True
                say("streaming", request=name)
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                empty = {"type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], {"id": part.get("id"), **empty})
                for key, value in part["function"].items():
                    call["function"][key] += value or ""
    if finish is None:
        raise RequestError("lost", "the stream ended without a finish_reason")
    message: Message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls.values())} if calls else message


async def converse(http: aiohttp.ClientSession, root: str, question: str, session: bool) -> None:
    """Have one conversation, and audit its session."""
    name = f"soak-{uuid.uuid4().hex}"
    url = f"{root}/sessions/{name}/v1" if session else f"{root}/v1"
    messages: list[Message] = [{"role": "user", "content": question}]
    answered = 0
    try:
        for _ in range(TURNS):
            message = await ask(http, url, messages)
            answered += 1
            if not message.get("tool_calls"):
                break
            messages.append(message)
            for call in message["tool_calls"]:
                try:
                    result = str(calculate(**json.loads(call["function"]["arguments"])))
                except Exception as error:  # the model's mistake, for the model to read
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    except RequestError:
        if not answered:
            return
    if session:
        async with http.delete(f"{root}/sessions/{name}") as response:
            reply = await response.json()
        if response.status != 200:
            say("session", exact=False, why=f"{response.status} {reply}")
            return
        trajectory = Trajectory.from_json(json.dumps(reply["trajectory"]))
        found, turns = audit(trajectory), len(trajectory.turns)
        why = found.first_violation or (turns < answered and f"{turns} of {answered} turns")
        say("session", exact=not why, why=str(why or ""))


async def main(root: str, questions: Iterator[str], lanes: int) -> None:
    """Hold `lanes` conversations at a time until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    limits = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(timeout=limits) as http:

        async def lane() -> None:
            for session in itertools.cycle((True, False)):
                if ended.is_set():
                    return
                await converse(http, root, next(questions), session)

        await asyncio.gather(*(lane() for _ in range(lanes)))


if __name__ == "__main__":
    url, problems, count = sys.argv[1:]
    rows = [json.loads(line)["question"] for line in Path(problems).read_text().splitlines()]
    random.shuffle(rows)
    asyncio.run(main(url, itertools.cycle(rows), int(count)))
