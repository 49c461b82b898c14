"""A server of OpenEnv's protocol in this process, with the environments of `openenv_servers`.

It has what a foreign server has not: a step that waits for a gate, and a count of sessions.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.rollouts.foreign.plain_png import png

INTEGER = {"type": "integer"}
TOOLS = [
    {
        "name": name,
        "description": description,
        "inputSchema": {
            "type": "object",
            "properties": dict.fromkeys(arguments, INTEGER),
            "required": arguments,
        },
    }
    for name, description, arguments in (
        ("add", "Add two numbers.", ["a", "b"]),
        ("calculate", "Calculate a + b, a - b or a * b.", ["a", "operation", "b"]),
        ("answer", "Give the answer.", ["value"]),
    )
]
ACTION = {
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}


PICTURES = (png(255, 0, 0), png(0, 0, 255))


class PlainServer:
    """Answers as OpenEnv 0.10 does; `kind` is calculator, echo or camera."""

    def __init__(self, kind: str, sessions: int) -> None:
        self.kind = kind
        self.sessions = sessions
        self.url = ""
        self.begun = self.open = 0
        self.traces: list[str | None] = []
        """The header traceparent of each request."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def schema(self, request: web.Request) -> web.Response:
        self.traces.append(request.headers.get("traceparent"))
        return web.json_response({"action": ACTION, "observation": {}, "state": {}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        self.traces.append(request.headers.get("traceparent"))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.sessions:
            await socket.send_json(failure("CAPACITY_REACHED", "Server at capacity"))
            await socket.close()
            return socket
        self.open, self.begun = self.open + 1, self.begun + 1
        state = {"step_count": 0, "expected": 0}
        try:
            async for message in socket:
                request_ = json.loads(message.data)
                if request_["type"] == "close":
                    break
                if request_["type"] == "step":
                    await self.gate.wait()
                answer = self.answer(request_, state)
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.open -= 1
            await socket.close()
        return socket

    def answer(self, request: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        data = request.get("data") or {}
        match request["type"], self.kind:
            case "reset", "calculator":
                state["expected"] = data.get("expected", 0)
                return seen({"metadata": {"seed": None}})
            case "reset", "echo":
                return seen({"echoed": "Say something.", "length": 0, "metadata": {}})
            case "reset", "camera":
                return seen({"text": "Look.", "screenshot": PICTURES[0]})
            case "step", "camera":
                return seen({"text": data["message"], "screenshot": PICTURES[1]}, 0.1)
            case "state", _:
                return {"type": "state", "data": state}
            case "mcp", "calculator":
                return {"type": "mcp", "data": {"result": {"tools": TOOLS}}}
            case "mcp", _:
                return {"type": "mcp", "data": {"error": {"message": "does not support MCP"}}}
            case "step", "calculator":
                state["step_count"] += 1
                return called(data["tool_name"], data["arguments"], state["expected"])
            case _:
                if "message" not in data:
                    errors = [{"loc": ["message"], "msg": "Field required"}]
                    return failure("VALIDATION_ERROR", "Invalid message", errors)
                state["step_count"] += 1
                text = data["message"]
                return seen({"echoed": text, "length": len(text)}, len(text) / 10, text == "bye")


def seen(
    observation: dict[str, Any], reward: float | None = None, done: bool = False
) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def called(tool: str, arguments: dict[str, int], expected: int) -> dict[str, Any]:
    right = arguments.get("value") == expected
    if tool == "add":
        text, reward, done = str(arguments["a"] + arguments["b"]), 0.25, False
    else:
        text, reward, done = ("right" if right else "wrong"), float(right), right
    result = {"content": [{"type": "text", "text": text}], "is_error": False}
    return seen({"tool_name": tool, "result": result, "error": None}, reward, done)


def failure(code: str, message: str, errors: Any = ()) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, "errors": errors}}


@asynccontextmanager
async def plain_server(kind: str, sessions: int = 8) -> AsyncIterator[PlainServer]:
    server = PlainServer(kind, sessions)
    app = web.Application()
    app.router.add_get("/ws", server.session)
    app.router.add_get("/schema", server.schema)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"ws://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
