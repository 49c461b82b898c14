"""An MCP server that behaves, or misbehaves, as its argument says; started by tests.

python mcp_server.py          over standard input and output
python mcp_server.py MODE     the same, with a failure
python mcp_server.py http     streamable HTTP, on a free port that it prints
"""

import base64
import json
import os
import socket
import sys

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PNG = (  # 2 x 1 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAAAAADRSSBWAAAAC0lEQVR4nGNgYAAAAAMAAbitOmMAAAAASUVORK5CYII="
)
mode = sys.argv[1] if len(sys.argv) > 1 else ""
server = MCPServer("tests", log_level="ERROR")
numbers: dict[str, list[int]] = {}


def who(context: Context) -> str:  # type: ignore[type-arg]
    """The trajectory that calls."""
    if mode == "http":
        headers = context.request_context.request.headers  # type: ignore[union-attr]
        return str(headers.get("x-trajectory") or headers.get("mcp-session-id"))
    return str((context.request_context.meta or {}).get("turnwise/session", "own"))


@server.tool()
def remember(number: int, context: Context) -> str:  # type: ignore[type-arg]
    """Remember a number; returns all that this trajectory remembered."""
    numbers.setdefault(who(context), []).append(number)
    return json.dumps(numbers[who(context)])


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    if b == 0:
        raise ToolError("division by zero")
    return a / b


@server.tool()
def process() -> int:
    """Return the process's number."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "not set")


@server.tool(structured_output=False)
def picture() -> list[object]:
    """Return a text, a picture and a text."""
    return ["before", Image(data=base64.b64decode(PNG), format="png"), "after"]


@server.tool(structured_output=False)
def bomb() -> list[object]:
    """Return what is no picture."""
    return ["before", Image(data=b"<svg/>", format="svg+xml")]


@server.tool()
def die() -> str:
    """End the process without an answer."""
    sys.stderr.write("Traceback: out of memory\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def large(size: int) -> str:
    """Return a long text."""
    return "x" * size


if mode == "http":
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", int(sys.argv[2])))
        port = free.getsockname()[1]
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    server.run("streamable-http", host="127.0.0.1", port=port)
else:
    server.run()
