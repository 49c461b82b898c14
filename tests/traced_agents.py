"""Agents that make OpenTelemetry spans of their own; as a program, a command or a worker.

Each passes the context that it was given to its one request.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from opentelemetry import propagate, trace

TRACER = trace.get_tracer("an agent's own")


def ask(base_url: str, headers: dict[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "12 plus 30?"}]}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()


def plain(base_url: str, row: dict[str, Any]) -> None:
    """Pass nothing on."""
    with TRACER.start_as_current_span("plan"):
        ask(base_url, {})


async def telling(base_url: str, row: dict[str, Any]) -> None:
    """Pass its own span on."""
    with TRACER.start_as_current_span("plan"):
        headers: dict[str, str] = {}
        propagate.inject(headers)
        await asyncio.to_thread(ask, base_url, headers)


def another(trace_parent: str) -> str:
    """Return the context of a span in the same trace, as another program would make it."""
    version, number, _, flags = trace_parent.split("-")
    return f"{version}-{number}-{'ab' * 8}-{flags}"


def work(task: dict[str, Any], base_url: str) -> None:
    headers: dict[str, str] = {}
    propagate.inject(headers)
    ask(base_url, {"traceparent": another(headers["traceparent"])})


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        sys.path.insert(0, str(Path(__file__).parent.parent / "src" / "turnwise"))
        from agent_worker import serve

        serve(work)
    else:
        context = {"traceparent": another(os.environ["TRACEPARENT"])}
        ask(os.environ["OPENAI_BASE_URL"], context)
