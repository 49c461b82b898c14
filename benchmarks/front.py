"""The server's processor time of a request: `python -m benchmarks.front [--quick]`.

`turnwise serve` and vLLM's own API server hold the demo's model in engines with the same arguments,
each in processes of its own. Both get the same chat requests in turn, 64 at a time: a question with
the calculator's tool, and an answer of 24 tokens. All processes except the engines count: HTTP,
chat template, tokenizer and tool parser in both; sessions, scheduler, the worker's actor and Ray in
Turnwise's, which keeps the exact trajectory of each session. A second row gives both servers the
same requests with a JSON schema, and counts the time until all are answered.

Then both get a seeded agentic load in turn (`benchmarks.agentic`): sessions of several turns with
tools that take a while, streamed and not, by one client with the same seeds. The engines sample
greedily, so that histories are mostly equal. The note has the share of sessions in which all
messages were equal.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agentic import LONGEST, Measured, figures, play
from benchmarks.models import as_in_a_worker, cpu_seconds, demo_files
from benchmarks.report import Claim, parser, quotients, report
from benchmarks.servers import both_servers
from examples.calculator.tool import TOOL_SCHEMA

CONCURRENCY = 64
NEW_TOKENS = 24
CALLING: dict[str, Any] = {"tools": [TOOL_SCHEMA], "ignore_eos": True}
_SCHEMA = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "integer"}, "minItems": 12}},
    "required": ["steps"],
}
STRUCTURED: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": _SCHEMA}},
    "temperature": 0.0,  # both servers answer alike, and so have the same work
}


async def ask(
    base_url: str, model: Path, questions: list[str], tag: str, shape: dict[str, Any]
) -> None:
    """Send one request for each question; every session has one, and no two prompts are equal."""
    waiting = iter(enumerate(questions))

    async def lane(http: aiohttp.ClientSession) -> None:
        for number, question in waiting:
            body: dict[str, Any] = {
                "model": str(model),
                "messages": [{"role": "user", "content": f"{question} This is {tag}-{number}."}],
                "max_tokens": NEW_TOKENS,
                **shape,
            }
            headers = {"x-session-id": f"{tag}-{number}"}
            url = f"{base_url}/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                answer = json.loads(await response.read())
                assert answer["usage"]["completion_tokens"] == NEW_TOKENS, answer

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(lane(http) for _ in range(CONCURRENCY)))


def spent(base_url: str, pid: int, model: Path, questions: list[str], tag: str) -> float:
    """Return the processor time of a request in milliseconds, without the engine process."""
    before = cpu_seconds(pid)["others"]
    asyncio.run(ask(base_url, model, questions, tag, CALLING))
    return (cpu_seconds(pid)["others"] - before) / len(questions) * 1e3


def waited(base_url: str, pid: int, model: Path, questions: list[str], tag: str) -> float:
    """Return the wall time of many concurrent requests with a JSON schema, in ms per request."""
    begun = time.perf_counter()
    asyncio.run(ask(base_url, model, questions, tag, STRUCTURED))
    return (time.perf_counter() - begun) / len(questions) * 1e3


Runs = dict[bool, tuple[list[Measured], list[Measured]]]
"""Runs of the load on Turnwise's server and on vLLM's, round by round, by whether streamed."""


def agentic(servers: Sequence[tuple[str, int]], model: Path, rounds: int, sessions: int) -> Runs:
    """Send the agentic load to both servers in turn; earlier requests have warmed them up."""
    runs: Runs = {False: ([], []), True: ([], [])}
    seed = time.time_ns() % 1_000_000
    for number in range(rounds):
        for stream, sides in runs.items():
            tag = f"agentic-{number}-{stream}"
            order = [*zip(servers, sides, strict=True)]
            for (base_url, _), into in order[:: 1 if number % 2 else -1]:
                load = play(
                    *(base_url, str(model), seed + number, tag),
                    sessions=sessions,
                    lanes=max(1, sessions // 2),
                    stream=stream,
                )
                into.append(asyncio.run(load))
    return runs


def agentic_claims(runs: Runs) -> list[Claim]:
    claims = []
    for stream, (ours, theirs) in runs.items():
        how = ", streamed" if stream else ""
        pairs = [
            (one.histories[name], other.histories[name])
            for one, other in zip(ours, theirs, strict=True)
            for name in one.histories
        ]
        equal = sum(one == other for one, other in pairs) / len(pairs)
        goals = {"turns/s": 1.0, "p99 of a first token": 1.0}
        mine, other = ([figures(one) for one in side] for side in (ours, theirs))
        for name in mine[0]:
            rate = name == "turns/s"
            values = [[each[name] for each in side] for side in (mine, other)]
            claims.append(
                Claim(
                    f"agentic load{how}: {'turns' if rate else name}",
                    "1/s" if rate else "ms",
                    values[0],
                    "vLLM's API server",
                    values[1],
                    quotients(*values),
                    at_least=goals.get(name) if rate else None,
                    at_most=None if rate else goals.get(name),
                    note=f"{equal:.0%} of the sessions had equal messages" if rate else "",
                )
            )
    return claims


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("front", __doc__).parse_args()
    as_in_a_worker()
    rounds, requests = (1, 32) if options.quick else (3, 256)
    load = (1, 8) if options.quick else (3, 64)
    build = demo_files()
    model = build / "model"
    rows = [json.loads(line) for line in (build / "train.jsonl").read_text().splitlines()]
    questions = [rows[number % len(rows)]["question"] for number in range(requests)]
    taken_by: dict[Any, tuple[list[float], list[float]]] = {spent: ([], []), waited: ([], [])}
    with (
        tempfile.TemporaryDirectory() as name,
        both_servers(model, Path(name), LONGEST) as (ours, theirs),
    ):
        for number in range(rounds + 1):  # the first warms up
            for measure, lists in taken_by.items():
                for server, taken in zip((ours, theirs), lists, strict=True):
                    tag = f"{measure.__name__}{number}"
                    taken.append(measure(*server, model, questions, tag))
        runs = agentic((ours, theirs), model, *load)
    claims = [
        claim("processor time of a chat request before the engine", *taken_by[spent], at_most=0.5),
        claim("time of a chat request with a JSON schema", *taken_by[waited], at_most=1.0),
        *agentic_claims(runs),
    ]
    report(claims, options)


def claim(name: str, ours: list[float], theirs: list[float], at_most: float) -> Claim:
    """Return the claim of all rounds except the first, which warms up."""
    ours, theirs = ours[1:], theirs[1:]
    ratios = quotients(ours, theirs)
    return Claim(name, "ms", ours, "vLLM's API server", theirs, ratios, at_most=at_most)


if __name__ == "__main__":
    main()
