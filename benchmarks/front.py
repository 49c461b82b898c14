"""The server's processor time of a request: `python -m benchmarks.front [--quick]`.

`turnwise serve` and vLLM's own API server hold the demo's model in engines with the same arguments,
each in processes of its own. Both get the same chat requests in turn, 64 at a time: a question with
the calculator's tool, which 24 tokens answer. Counted are all processes but the engines': HTTP,
chat template, tokenizer and tool parser in both; sessions, scheduler, the worker's actor and Ray in
Turnwise's, which keeps the exact trajectory of each session. A second row gives both servers the
same requests with a JSON schema, and counts the time until all are answered.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agents import serving
from benchmarks.models import as_in_a_worker, cpu_seconds, demo_files
from benchmarks.report import Claim, parser, quotients, report
from examples.calculator.tool import TOOL_SCHEMA
from turnwise.config import EngineConfig, ModelConfig
from turnwise.engine.vllm_start import engine_arguments

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
START_SECONDS = 120.0


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """Run vLLM's API server with the engine of `agents.serving`; its base URL and process id."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    config = ModelConfig(path=str(model), max_length=512)
    arguments = engine_arguments(config, EngineConfig(max_num_seqs=128), deterministic=False)
    flags = [f"--port={port}", "--host=127.0.0.1", "--disable-uvicorn-access-log"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value}")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    log = folder / "vllm.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while "Application startup complete" not in log.read_text():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"vLLM's server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1", process.pid
        finally:
            process.terminate()
            process.wait(30)


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
    """Return the processor time of a request in milliseconds, without the engine's."""
    before = cpu_seconds(pid)["others"]
    asyncio.run(ask(base_url, model, questions, tag, CALLING))
    return (cpu_seconds(pid)["others"] - before) / len(questions) * 1e3


def waited(base_url: str, pid: int, model: Path, questions: list[str], tag: str) -> float:
    """Return the time of a request with a JSON schema in milliseconds, of many at once."""
    begun = time.perf_counter()
    asyncio.run(ask(base_url, model, questions, tag, STRUCTURED))
    return (time.perf_counter() - begun) / len(questions) * 1e3


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("front", __doc__).parse_args()
    as_in_a_worker()
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # vLLM's server logs that it is ready
    rounds, requests = (1, 32) if options.quick else (5, 512)
    build = demo_files()
    model = build / "model"
    rows = [json.loads(line) for line in (build / "train.jsonl").read_text().splitlines()]
    questions = [rows[number % len(rows)]["question"] for number in range(requests)]
    figures: dict[Any, tuple[list[float], list[float]]] = {spent: ([], []), waited: ([], [])}
    with (
        tempfile.TemporaryDirectory() as name,
        serving(model, Path(name)) as ours,
        vllm_server(model, Path(name)) as theirs,
    ):
        for number in range(rounds + 1):  # the first warms up
            for measure, lists in figures.items():
                for server, taken in zip((ours, theirs), lists, strict=True):
                    tag = f"{measure.__name__}{number}"
                    taken.append(measure(*server, model, questions, tag))
    claims = [
        claim("processor time of a chat request before the engine", *figures[spent], at_most=0.5),
        claim("time of a chat request with a JSON schema", *figures[waited], at_most=1.0),
    ]
    report(claims, options)


def claim(name: str, ours: list[float], theirs: list[float], at_most: float) -> Claim:
    """Return the claim of all rounds but the first, which warms up."""
    ours, theirs = ours[1:], theirs[1:]
    ratios = quotients(ours, theirs)
    return Claim(name, "ms", ours, "vLLM's API server", theirs, ratios, at_most=at_most)


if __name__ == "__main__":
    main()
