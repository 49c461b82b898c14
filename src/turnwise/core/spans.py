"""OpenTelemetry spans of rollouts, with the names of its conventions for generative AI.

Nothing is recorded unless OpenTelemetry's own variable names a collector. A collector that does not
answer delays nothing: a thread sends the spans, and drops some when too many wait. A program that
has set no tracer provider gets ours, so that spans of user code reach the same collector.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from turnwise.core.optional import optional

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MODULES = (
    "opentelemetry.trace",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk.resources",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)
TRACE_HEADERS = ("traceparent", "tracestate", "baggage")
"""HTTP headers of a trace's context, as the W3C specifies them."""
Value = str | int | float | list[str]
SetAttribute = Callable[[str, Value], None]
"""Function that sets an attribute of a span; without a collector, it does nothing."""


def agent_span(agent: str, name: str, problem: str) -> AbstractContextManager[SetAttribute]:
    """Record a trajectory, with its loop, its unique name, and its problem's id."""
    about = {"gen_ai.agent.name": agent, "gen_ai.conversation.id": name}
    return _span("invoke_agent", agent, {**about, "turnwise.problem": problem})


def chat_span(
    turn: int, temperature: float, max_tokens: int
) -> AbstractContextManager[SetAttribute]:
    """Record a turn; see `record_answer`."""
    about = {"gen_ai.request.temperature": temperature, "gen_ai.request.max_tokens": max_tokens}
    return _span("chat", "", {**about, "turnwise.turn": turn})


def record_answer(span: SetAttribute, prompt: int, sampled: int, reason: str, version: int) -> None:
    """Add to a turn's span the numbers of prompt and sampled tokens, the finish reason, and the
    weight version."""
    span("gen_ai.usage.input_tokens", prompt)
    span("gen_ai.usage.output_tokens", sampled)
    span("gen_ai.response.finish_reasons", [reason])
    span("turnwise.weight_version", version)


def tool_span(tool: str) -> AbstractContextManager[SetAttribute]:
    """Record a call of a tool; the caller sets `error.type` to an outcome other than `ok`."""
    return _span("execute_tool", tool, {"gen_ai.tool.name": tool})


def trace_headers() -> dict[str, str]:
    """Return the HTTP headers that name the current span; no headers without a collector."""
    headers: dict[str, str] = {}
    if _tracer() is not None:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


@contextmanager
def within_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Make the span named by another process's `trace_headers` current for a `with` block."""
    if not headers or _tracer() is None:
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def flush() -> None:
    """Send the waiting spans; takes as long as the collector takes to accept them."""
    if _tracer() is not None:
        from opentelemetry import trace

        if hasattr(provider := trace.get_tracer_provider(), "force_flush"):
            provider.force_flush()


@contextmanager
def _span(operation: str, what: str, attributes: Mapping[str, Value]) -> Iterator[SetAttribute]:
    """Record a span as a child of the current one; an exception that escapes the block is recorded
    as the span's status."""
    tracer = _tracer()
    if tracer is None:
        yield lambda key, value: None
        return
    about = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "vllm", **attributes}
    with tracer.start_as_current_span(f"{operation} {what}".strip(), attributes=about) as span:
        yield span.set_attribute


@functools.cache
def import_opentelemetry() -> list[ModuleType]:
    """Import and return the modules that spans need; an empty list if no collector is named."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return []
    return [optional(name, "traces", f"{_ENDPOINTS[1]} is set, which") for name in _MODULES]


@functools.cache
def _tracer() -> "Tracer | None":
    """Return the tracer of this process; None if no collector is named."""
    if not (modules := import_opentelemetry()):
        return None
    trace, sdk, export, resources, otlp = modules
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # the program has set none
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "turnwise"}
        provider = sdk.TracerProvider(resource=resources.Resource.create(named))
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    tracer: Tracer = provider.get_tracer("turnwise")
    return tracer
