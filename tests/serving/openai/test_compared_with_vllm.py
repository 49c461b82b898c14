"""Our server and vLLM's application answer requests of every shape alike."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from examples.calculator.tool import TOOL_SCHEMA
from tests.serving.openai.answers import Difference, differences, read
from tests.serving.openai.shapes import CHAT, RESPONSES, SHAPES, USER, Shape
from turnwise.config import Config
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.internals.vllm_server import (
    FlexibleArgumentParser,
    build_app,
    init_app_state,
    make_arg_parser,
)
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate


@dataclass(frozen=True)
class Wanted:
    """A difference that we want."""

    shapes: str
    """Pattern of the names of shapes."""
    path: str
    """Pattern of the paths of fields."""
    why: str

    def explains(self, name: str, found: Difference) -> bool:
        return bool(re.search(self.shapes, name) and re.search(self.path, found[0]))


WANTED = (
    Wanted(
        "^no path|^GET of a chat",
        r"^\.body\.(detail|error)$",
        "every error has OpenAI's form, those of the framework too",
    ),
    Wanted(
        "return_token_ids$",
        r"\.message\.(generation_|prompt_token_ids|weight_versions)",
        "a message carries the ids that a client may send back",
    ),
    Wanted(
        ".",
        r"^\.body\.error\.(message|param)$",
        "a request that is not valid gets one sentence, by the member that was meant",
    ),
    Wanted(
        "^(chat|text): more than the context$",
        ".",
        "more tokens than the context has are as many as it has",
    ),
    Wanted(
        ": no limit$",
        ".",
        "without a limit the configuration's `sampling.max_tokens` counts",
    ),
)


@dataclass
class Pair:
    """Clients of two servers before engines of one model."""

    ours: httpx.AsyncClient
    theirs: httpx.AsyncClient

    async def differences(self, shape: Shape) -> list[Difference]:
        answers = [await answer(client, shape) for client in (self.ours, self.theirs)]
        return list(differences(*answers))


@pytest.fixture(scope="module")
async def pair(engine: WorkerHandle, make_config: Callable[..., Config]) -> AsyncIterator[Pair]:
    config = make_config(serving={"port": 0, "served_model_name": "model"})
    beside = VllmEngine(config.model, config.engine)
    clients = [
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://localhost",
            timeout=60,
        )
        for app in (
            await OpenAIServer(config, engine).application(),
            await vllm_application(config, beside),
        )
    ]
    yield Pair(*clients)
    for client in clients:
        await client.aclose()
    await beside.shutdown()


async def vllm_application(config: Config, engine: VllmEngine) -> FastAPI:
    """Build vLLM's own application around vLLM's own client of an engine."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [
            *("--model", config.model.path, "--served-model-name", "model"),
            *("--tool-call-parser", config.rollout.tool_parser, "--enable-auto-tool-choice"),
        ]
    )
    llm = engine._llm
    app: FastAPI = build_app(args, ("generate",), llm.model_config)
    await init_app_state(llm, app.state, args, ("generate",))
    app.state.server = None  # vLLM's error handler reads it
    return app


async def answer(client: httpx.AsyncClient, shape: Shape) -> object:
    way = "GET" if shape.body is None else "POST"
    return read(await client.request(way, shape.path, json=shape.body))


def unwanted(name: str, found: list[Difference]) -> list[str]:
    """Return the differences of a shape that no line of `WANTED` explains."""
    return [
        f"{name} {each[0]}: {each[1]!r} here, {each[2]!r} there"
        for each in found
        if not any(wanted.explains(name, each) for wanted in WANTED)
    ]


async def compare(pair: Pair, names: list[str]) -> tuple[list[str], set[Wanted]]:
    """Return the unwanted differences of shapes, and the lines of `WANTED` that were needed."""
    bad, needed = [], set()
    for name in names:
        found = await pair.differences(SHAPES[name])
        bad += unwanted(name, found)
        needed |= {wanted for wanted in WANTED for each in found if wanted.explains(name, each)}
    return bad, needed


async def test_some_shapes_get_vllms_answers(pair: Pair) -> None:
    bad, _ = await compare(pair, list(SHAPES)[::16])
    assert bad == []


CALLED = (
    '<tool_call>\n{"name": "calculate", "arguments": {"operation": "+", "a": 12, "b": 30}}\n'
    "</tool_call>"
)
WRITTEN = {
    "a call": f"{CALLED}<|im_end|>",
    "text and two calls": f"Let me see. {CALLED}\n{CALLED}<|im_end|>",
    "half a call": '<tool_call>\n{"name": "calc<|im_end|>',
    "not JSON": "<tool_call>\nplus\n</tool_call><|im_end|>",
    "white space": "  42 \n<|im_end|>",
    "a line break": "\n<|im_end|>",
    "a special token": "<|im_start|>4<|im_start|>2<|im_end|>",
    "no end": "42 and so on",
    "other letters": "zweiundvierzig ü € 😀<|im_end|>",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tools", [None, [TOOL_SCHEMA]], ids=["no tools", "tools"])
@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
async def test_what_a_model_writes_is_read_as_vllms_server_reads_it(
    pair: Pair, template: ChatTemplate, text: str, tools: list[Any] | None, stream: bool
) -> None:
    ids = template.encode(text)
    body = {"model": "model", "messages": [USER], "max_tokens": len(ids), "stream": stream}
    body |= {"vllm_xargs": {"script": [*ids, -1]}, **({"tools": tools} if tools else {})}
    assert unwanted(text, await pair.differences(Shape(CHAT, body))) == []


async def test_requests_at_once_get_what_each_gets_alone(pair: Pair) -> None:
    """Steps that several kinds of requests share have rows of log-probs of several widths."""
    kinds = (
        *("chat: long", "chat: top_logprobs", "text: logprobs of 5", "text: logprob_token_ids"),
        *("chat: logprob_token_ids", "text: scoring of two", "chat: a schema", "chat: long"),
        *("text, streamed: logprobs, warm", "text: prompt_logprobs of 4", "chat: top_logprobs, n"),
    )
    shapes = [SHAPES[name] for name in kinds * 2]
    alone = [await answer(pair.ours, shape) for shape in shapes]
    at_once = await asyncio.gather(*(answer(pair.ours, shape) for shape in shapes))
    assert list(differences(at_once, alone)) == []


async def test_usage_tells_what_was_added_to_the_cache(pair: Pair) -> None:
    asked = {"input": "11 times 12 " * 20, "max_output_tokens": 2, "temperature": 0}
    shape = Shape(RESPONSES, {"model": "model", **asked})
    answers: list[Any] = [await answer(client, shape) for client in (pair.ours, pair.theirs)]
    details = [each["body"]["usage"]["input_tokens_details"] for each in answers]
    assert details[0] == details[1]
    assert details[0]["cache_write_tokens"] >= 32


@pytest.mark.slow
async def test_all_shapes_get_vllms_answers(pair: Pair) -> None:
    assert len(SHAPES) > 450
    bad, needed = await compare(pair, list(SHAPES))
    assert bad == []
    assert needed == {*WANTED}
