"""Spans of a trajectory, as a collector receives them over OTLP, and those of user code in them."""

import gzip
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests import traced_agents
from tests.rollouts.foreign.plain_openenv import plain_server
from tests.rollouts.test_agent_endpoint import serving
from tests.rollouts.test_agents import keyless, try_agent
from tests.rollouts.test_loops import END, attempt, call
from tests.tools.test_mcp import RAW
from turnwise.compat.nemo_gym import NemoGym
from turnwise.compat.openenv import OpenEnvSession
from turnwise.config import Config
from turnwise.core import spans
from turnwise.rollouts.agents import run_endpoint
from turnwise.serving.openai.server import OpenAIServer

__all__ = ["attempt", "keyless"]


class Collector(BaseHTTPRequestHandler):
    received: list[Any]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.received.extend((resource.resource, span) for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def collector() -> Iterator[str]:
    """The address of a collector; this process sends its spans there, as its first one."""
    Collector.received = []
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        provider: Any = trace.get_tracer_provider()
        provider.shutdown()  # or what is traced later would be sent to a closed port
        server.shutdown()
        thread.join()


@pytest.fixture
def received(collector: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Spans that the collector got; the endpoint's variable names it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
    forget()
    Collector.received.clear()
    yield Collector.received
    spans.flush()
    forget()


def forget() -> None:
    spans._tracer.cache_clear()
    spans.import_opentelemetry.cache_clear()


def named(received: list[Any]) -> dict[str, Any]:
    """The spans so far, by their names."""
    spans.flush()
    return {span.name: span for _, span in received}


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = (
            [one.string_value for one in value.values] if kind == "array_value" else value
        )
    return found


async def test_a_trajectory_is_an_agent_with_its_chats_and_tools(
    received: list[Any], attempt: Callable[..., Any]
) -> None:
    said = [call("double", x=21) + call("fail") + END, "The answer is 42." + END]
    (trajectory,) = (await attempt(said)).trajectories
    found = named(received)
    assert sorted(span.name for _, span in received) == [
        "chat",
        "chat",
        "execute_tool double",
        "execute_tool fail",
        "invoke_agent tool_calling",
    ]
    agent = found["invoke_agent tool_calling"]
    assert {span.trace_id for _, span in received} == {agent.trace_id}
    assert {span.parent_span_id for _, span in received if span is not agent} == {agent.span_id}
    of_agent = attributes(agent)
    assert of_agent["gen_ai.operation.name"] == "invoke_agent"
    assert of_agent["turnwise.problem"] == "desk:1"
    assert (of_agent["turnwise.status"], of_agent["turnwise.reward"]) == ("completed", 1.0)
    chats = sorted(
        (attributes(span) for _, span in received if span.name == "chat"),
        key=lambda chat: chat["turnwise.turn"],
    )
    assert [chat["gen_ai.usage.output_tokens"] for chat in chats] == [
        len(turn.completion_token_ids) for turn in trajectory.turns
    ]
    assert chats[1]["gen_ai.usage.input_tokens"] > chats[0]["gen_ai.usage.input_tokens"]
    assert chats[0]["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes(found["execute_tool fail"])["error.type"] == "error"
    assert "error.type" not in attributes(found["execute_tool double"])
    resource, _ = received[0]
    assert {"service.name": "turnwise"}.items() <= attributes(resource).items()


async def test_without_a_collector_nothing_is_recorded(attempt: Callable[..., Any]) -> None:
    forget()
    assert spans.trace_headers() == {}
    (trajectory,) = (await attempt(["Fine." + END])).trajectories
    assert trajectory.status == "completed"


@pytest.mark.parametrize(
    "environment_process",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["thread", "process"],
)
async def test_spans_of_tools_and_rewards_are_children_of_ours(
    environment_process: bool, received: list[Any], attempt: Callable[..., Any]
) -> None:
    said = [call("look") + call("buy") + END, "Done." + END]
    environment = "tests.traced_shop:Shop"
    group = await attempt(said, environment, environment_process=environment_process)
    assert group.causes == {}
    found = named(received)
    assert found["shelves"].parent_span_id == found["execute_tool look"].span_id
    assert found["till"].parent_span_id == found["execute_tool buy"].span_id
    assert found["judge"].parent_span_id == found["invoke_agent tool_calling"].span_id
    assert len({span.trace_id for span in found.values()}) == 1


async def test_an_mcp_server_is_told_the_span_of_each_call(
    tmp_path: Path, received: list[Any], attempt: Callable[..., Any]
) -> None:
    sent = tmp_path / "requests"
    command = {"command": sys.executable, "args": ["-S", RAW], "env": {"REQUESTS": str(sent)}}
    server = {**command, "tools": ["process"]}
    group = await attempt([call("process") + END, "Done." + END], tools=[{"mcp": server}])
    assert group.causes == {}
    requests = map(json.loads, sent.read_text().splitlines())
    (asked,) = (r["params"] for r in requests if r["method"] == "tools/call")
    found = named(received)
    _, trace, parent, _ = asked["_meta"]["traceparent"].split("-")
    request = found["MCP send tools/call process"]  # the SDK's own
    assert request.span_id.hex() == parent
    assert request.parent_span_id == found["execute_tool process"].span_id
    assert request.trace_id.hex() == trace


COMMAND = f"{sys.executable} {traced_agents.__file__}"


@pytest.mark.parametrize(
    ("agent", "parent"),
    [
        ("tests.traced_agents:plain", "invoke_agent agent"),
        ("tests.traced_agents:telling", "plan"),
        (COMMAND, ""),
        (f"worker: {COMMAND} worker", ""),
    ],
    ids=["function", "function that passes its span on", "command", "worker"],
)
async def test_an_agents_turns_are_children_of_its_span_or_a_named_one(
    agent: str,
    parent: str,
    received: list[Any],
    keyless: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    group = await try_agent(agent, keyless, make_config, tokenizer)
    assert group.causes == {}
    spans.flush()
    traces: dict[bytes, dict[str, Any]] = {}
    for _, span in received:
        traces.setdefault(span.trace_id, {})[span.name] = span
    assert len(traces) == 2
    for found in traces.values():
        known = found[parent].span_id if parent else bytes.fromhex("ab" * 8)
        assert found["chat"].parent_span_id == known
        if "plan" in found:
            assert found["plan"].parent_span_id == found["invoke_agent agent"].span_id
        assert attributes(found["chat"])["gen_ai.usage.output_tokens"] > 0


async def test_agent_and_environment_servers_get_the_span_as_headers(
    received: list[Any],
) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["traceparent"])
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with serving(app) as url, plain_server("calculator") as openenv:
        with spans.tool_span("shop"):
            expected = spans.trace_headers()["traceparent"]
            await run_endpoint(url, {})
            environment = NemoGym({"responses_create_params": {"input": "Hi."}}, url)
            await environment.setup()
            await environment.close()
            session = OpenEnvSession(openenv.url, [])
            await session.open()
            await session.action_schema()
            await session.close()
    assert seen == [expected] * 2
    assert openenv.traces == [expected] * 2
    assert expected.split("-")[2] == named(received)["execute_tool shop"].span_id.hex()
