"""Whatever shape a body has, it is refused, or answered, without a freeze and without much memory.

Shapes are drawn for every key of every route, of the OpenAI server and of Tinker's, from the routes
themselves: wide, deep, wrong in every entry, of all members of a union, and one body for many
answers.
"""

import asyncio
import gc
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from tests.serving.openai.test_http_limits import HELLO, QUICK
from tests.simulated import SimulatedEngine
from tests.tinker.local import LocalTrainer
from turnwise.config import Config
from turnwise.core.untrusted import JsonCount
from turnwise.serving.openai import bodies
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.openai.vllm_app import VLLM_ROUTES
from turnwise.tinker.requests import BaseRequest
from turnwise.tinker.routes import ROOT, VERBS, add_routes
from turnwise.tinker.service import TinkerService

KEY = {"authorization": "Bearer tml-secret", "content-type": "application/json"}
FREEZE = 1.0
"""Maximum of seconds of processor time in one turn of the event loop. The longest (1,000 prompts in
one request, in vLLM's handler) takes 0.4 alone, and took 0.7 next to programs that fill the
memory's bandwidth; it should be a tenth."""
TIMES = 20  # bytes of memory for each byte of a body
NOISE = 24 << 20  # bytes by which the process may grow for other reasons

ENTRIES: dict[str, Any] = {
    "numbers": 0,
    "objects": {},
    "texts": "a",
    "lists": [1, [2]],
    "messages": {"role": "user", "content": "a"},
    "calls": {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    "results": {"type": "function_call_output", "call_id": "a", "output": [{"type": "x"}]},
    "strange": {"type": "strange", "role": "strange"},
    "parts": {"role": "user", "content": [{"type": "text", "text": "a"}] * 8},
    "wrong parts": {"role": "user", "content": [{"type": "x"}] * 8},
    "tools": {"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}},
    "conversations": [{"role": "user", "content": "a"}],
}
LONG = {
    f"/v1/{path}"
    for path in (
        "chat/completions",
        "completions",
        "responses",
        "messages",
        "chat/completions/batch",
    )
}
"""Routes whose main keys get bodies up to the limits, too."""
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/chat/completions/batch": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": HELLO},
    "/v1/messages/count_tokens": {"model": "m", "messages": HELLO},
    "/invocations": {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
"""What else a body needs, so that a route looks at the key that is drawn."""
UNSHAPED = {"/forward_backward", "/auth/token", "/{path:path}"}
"""Tinker's routes that read no JSON."""


class Door(NamedTuple):
    """A route that reads a body, and the keys that it knows."""

    method: str
    path: str
    keys: list[str]


def keys_of(kind: Any) -> set[str]:
    """Return the keys of a type of bodies, or of all of a union."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return set(kind.model_fields)
    return set().union(*map(keys_of, get_args(kind))) if get_args(kind) else set()


def doors_of(app: FastAPI) -> Iterator[Door]:
    tinker = {route: kind for route, (kind, _) in VERBS.items()}
    every = set[str]().union(*(keys_of(kind) for kind in BaseRequest.__subclasses__()))
    for route in app.routes:
        for method in getattr(route, "methods", None) or ():
            path = route.path  # type: ignore[attr-defined]
            if not isinstance(route, APIRoute) or method not in ("POST", "PUT", "PATCH"):
                continue
            name = path.removeprefix(ROOT)
            if path.startswith(ROOT):
                if name not in UNSHAPED:
                    kind = tinker.get(f"{method} {name[1:]}")
                    yield Door(method, path, sorted(every if kind is None else keys_of(kind)))
            elif route.body_field is not None:
                yield Door(method, path, sorted(keys_of(route.body_field.field_info.annotation)))
            elif path in BASES:
                yield Door(method, path, sorted(BASES[path]))


def shapes(key: str, most: int) -> Iterator[tuple[str, Any]]:
    """Yield values of a key: of `most` entries, deep, and with many keys."""
    for name, entry in ENTRIES.items():
        yield f"{most} {name}", [entry] * most
    yield "deep lists", json.loads("[" * 100 + "]" * 100)
    yield "too deep", json.loads("[" * 300 + "]" * 300)
    yield f"{most} keys", {f"key {number}": number for number in range(most)}
    yield f"{most} keys of objects", {f"key {number}": {} for number in range(most)}
    yield "one object in a list", [{"type": "message", key: [0] * most}]
    yield "a flag", True


def peak_memory() -> int:
    """Return the peak of this process since the last `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> int:
    """Forget the peak, and return the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


async def arriving(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body as a socket does."""
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]
        await asyncio.sleep(0)


class Freezes:
    """Notes the longest turn of the event loop, in processor time of its thread: other programs on
    the machine change nothing."""

    worst = 0.0

    async def watch(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.worst, last = max(self.worst, now - last), now


@pytest.fixture(scope="module")
async def served(
    make_config: Callable[..., Config], model_path: str, tokenizer: Any, tmp_path_factory: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FastAPI]]:
    """Return a client of a server with the routes of all servers, and its application."""
    config = make_config(
        model={"path": model_path, "max_length": 512, "lora": {"rank": 8}},
        weights={"lora": "adapter"},
        training={"threads": 1},
        serving={"port": 0, "api_key": "tml-secret"},
        sampling={"max_tokens": 1},
    )
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)
    folder = tmp_path_factory.mktemp("tinker")
    trainer, apps = LocalTrainer(config, folder), list[FastAPI]()
    await trainer.begin_adapters()
    service = TinkerService(config, engine, trainer, len(tokenizer), folder)

    def extend(app: FastAPI) -> FastAPI:
        apps.append(add_routes(app, service))
        return app

    app = await OpenAIServer(config, engine, extend=extend).application()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=KEY, timeout=60
    ) as http:
        yield http, apps[0]


def test_every_route_with_a_body_is_among_the_doors(served: Any) -> None:
    doors = {door.path for door in doors_of(served[1])}
    assert {path for path in BASES if path in VLLM_ROUTES} <= doors
    assert {"/sessions", "/sessions/{session_id}/reward", f"{ROOT}/asample"} <= doors
    asked = {route.partition(" ")[2] for route in VERBS if not route.startswith(("GET", "DELETE"))}
    assert {f"{ROOT}/{path}" for path in asked} <= doors
    assert all(door.keys for door in doors_of(served[1]))


async def test_no_body_freezes_the_server_or_fills_its_memory(
    served: tuple[httpx.AsyncClient, FastAPI], capsys: pytest.CaptureFixture[str]
) -> None:
    http, app = served
    drawn, freezes, sent = random.Random(1), Freezes(), 0
    slow, fat = list[tuple[int, str]](), list[tuple[int, str]]()
    watching = asyncio.create_task(freezes.watch())
    try:
        for door in doors_of(app):
            path = re.sub(r"\{\w+\}", "a", door.path)
            base = BASES.get(door.path, {})
            for key in door.keys:
                small = [*shapes(key, 400)]
                values = small if key in base else drawn.sample(small, 2)
                if key in base and door.path in LONG:
                    values += [*shapes(key, 16_000)]
                    values.append(("ids at the limit", [*range(1_000_000)]))
                    values.append(("pairs of ids", [[1, 2]] * 1_000))
                for name, value in values:
                    body = json.dumps({**base, key: value}).encode()
                    gc.collect(0)
                    freezes.worst, before = 0.0, forget_peak()
                    answer = await http.request(door.method, path, content=arriving(body))
                    await asyncio.sleep(0.002)
                    what, grown = f"{path} {key}: {name}", peak_memory() - before
                    sent += 1
                    slow.append((round(freezes.worst * 1e3), what))
                    fat.append((grown >> 20, what))
                    assert answer.status_code < 500, (what, answer.text[:300])
                    assert freezes.worst < FREEZE, (what, freezes.worst)
                    assert grown < TIMES * len(body) + NOISE, (what, len(body), grown)
    finally:
        watching.cancel()
    with capsys.disabled():
        most = [", ".join(map(str, sorted(each)[-3:])) for each in (slow, fat)]
        said = f"longest freezes (ms): {most[0]}; most memory (MB): {most[1]}"
        sys.stdout.write(f"\n{sent} bodies; {said}\n")


async def test_the_keys_of_a_batch_are_not_copied_per_conversation(
    served: tuple[httpx.AsyncClient, FastAPI],
) -> None:
    http, _ = served
    for more in ({}, {"logprobs": True}):  # answered by the chat service, and by vLLM
        body = {"messages": [HELLO] * 1_000, "max_tokens": 1, "user": "x" * 3_000_000, **more}
        content = json.dumps(body).encode()
        before = forget_peak()
        answer = await http.post("/v1/chat/completions/batch", content=content)
        assert answer.status_code == 200, answer.text[:300]
        assert len(answer.json()["choices"]) == 1_000
        # Each answer takes some 50 kB; a copy of the key for each would take 3 GB.
        assert peak_memory() - before < TIMES * len(content) + NOISE


async def test_limits_of_a_body_are_told_with_their_key(
    served: tuple[httpx.AsyncClient, FastAPI],
) -> None:
    http, _ = served
    for value, status, said in (
        ([1] * 1_100_000, 413, "more than 1,048,576 values: 65,536 for each MB"),
        ([{}] * 17_000, 413, "more than 16,384 objects and lists: 1,024 for each MB"),
        (dict.fromkeys(map(str, range(70_000)), 1), 413, "more than 65,536 keys: 4,096 for"),
        (json.loads("[" * 200 + "]" * 200), 400, "nested more than 128 objects and lists deep"),
    ):
        answer = await http.post("/v1/completions", json={"prompt": value})
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]


def test_a_history_of_a_thousand_tool_turns_is_within_the_limits() -> None:
    """As Claude Code, an agent of chat completions and one of Responses send it."""
    text, ephemeral = {"type": "text", "text": "a"}, {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"path": "a", "limit": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text]}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    output = {"type": "message", "content": [{**text, "annotations": []}], "role": "assistant"}
    for turn in (
        [
            {"role": "assistant", "content": [text, use]},
            {"role": "user", "content": [result | ephemeral, text]},
        ],
        [
            {"role": "assistant", "content": [text], "tool_calls": [call] * 2},
            *[{"role": "tool", "tool_call_id": "a", "content": [text]}] * 2,
        ],
        [
            {"type": "reasoning", "summary": [text], "content": [text]},
            output,
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [text]},
        ],
    ):
        bodies.check(JsonCount(json.dumps({"messages": turn * 1_100}).encode()), megabytes=16)


async def test_a_foreign_item_among_messages_is_refused_early(
    served: tuple[httpx.AsyncClient, FastAPI],
) -> None:
    http, _ = served
    for path, key in (
        ("chat/completions", "messages"),
        ("messages", "messages"),
        ("responses", "input"),
    ):
        body = {**BASES[f"/v1/{path}"], key: [*HELLO, *range(1_000_000)]}
        answer = await http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400
        assert f"{key}[1]: should be a valid dictionary" in answer.text


async def test_a_value_that_a_validator_cannot_look_into_is_named(
    served: tuple[httpx.AsyncClient, FastAPI],
) -> None:
    http, _ = served
    for path in ("chat/completions", "completions"):
        for value in (True, 3, "x", [1]):
            base = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
            answer = await http.post(f"/v1/{path}", json={**base, "structured_outputs": value})
            assert answer.status_code == 400, (value, answer.text)
            assert "structured_outputs" in answer.json()["error"]["message"]


async def test_what_only_pythons_json_has_is_refused_or_answered(
    served: tuple[httpx.AsyncClient, FastAPI],
) -> None:
    http, _ = served
    for body in (
        '{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        '{"messages": [[{"role": "user", "content": "a"}]], "top_p": NaN}',
    ):
        for path in ("/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"):
            answer = await http.post(path, content=body)
            assert answer.status_code == 400, (path, body, answer.text)
    lone = '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    assert (await http.post("/v1/chat/completions", content=lone)).status_code < 500
