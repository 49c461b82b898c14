"""Spans of a trajectory, as a collector receives them over OTLP."""

import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.rollout.test_loops import END, attempt, call
from turnwise.core import spans

__all__ = ["attempt"]


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


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Spans that a collector got; the endpoint's variable names it."""
    Collector.received = []
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        spans._tracer.cache_clear()
        yield Collector.received
        processor().shutdown()
        spans._tracer.cache_clear()
        server.shutdown()
        thread.join()


def processor() -> Any:
    tracer: Any = spans._tracer()
    return tracer.span_processor


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
    processor().force_flush()
    named = {span.name: span for _, span in received}
    assert sorted(span.name for _, span in received) == [
        "chat",
        "chat",
        "execute_tool double",
        "execute_tool fail",
        "invoke_agent tool_calling",
    ]
    agent = named["invoke_agent tool_calling"]
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
    assert attributes(named["execute_tool fail"])["error.type"] == "error"
    assert "error.type" not in attributes(named["execute_tool double"])
    resource, _ = received[0]
    assert {"service.name": "turnwise"}.items() <= attributes(resource).items()


async def test_without_a_collector_nothing_is_recorded(attempt: Callable[..., Any]) -> None:
    spans._tracer.cache_clear()
    assert spans._tracer() is None
    (trajectory,) = (await attempt(["Fine." + END])).trajectories
    assert trajectory.status == "completed"
