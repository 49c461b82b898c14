"""An MCP server without the SDK: it starts at once, and misbehaves as its argument or a call says.

python raw_mcp_server.py [MODE]
"""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

mode = sys.argv[1] if len(sys.argv) > 1 else ""
numbers: dict[str, list[int]] = {}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def listed(tool: str = "tool", /, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    return {"name": tool, "description": f"Tool {tool}.", "inputSchema": schema}


TOOLS = {
    "silent": [],
    "thousand": [listed(f"tool_{i}") for i in range(1000)],
    "twice": [listed(), listed()],
    "name": [listed("rm -rf /\n")],
    "schema": [{"name": "tool", "inputSchema": {"type": "array"}}],
    "invalid": [listed(a="numbr")],
    "remote": [{"name": "tool", "inputSchema": {"type": "object", "$ref": "http://127.0.0.1:9/a"}}],
    "pages": [listed()],
}.get(
    mode,
    [
        *(listed(name) for name in ("process", "die", "hang", "slow", "endless", "child")),
        listed("remember", number="integer"),
        listed("variable", name="string"),
        listed("large", size="integer"),
        listed("chatter", lines="integer"),
    ],
)


def call(name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> str | None:
    """Return a result; None to give no answer."""
    match name:
        case "process":
            return str(os.getpid())
        case "remember":
            mine = numbers.setdefault(meta.get("turnwise/session", ""), [])
            mine.append(arguments["number"])
            return json.dumps(mine)
        case "variable":
            return os.environ.get(arguments["name"], "not set")
        case "large":
            return "x" * arguments["size"]
        case "chatter":
            say("not a message\n" * arguments["lines"])
            return "done"
        case "endless":
            while True:
                sys.stdout.write("x" * 65536)
        case "child":
            code = "import time; time.sleep(3600)"
            return str(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL).pid)
        case "die":
            sys.stderr.write("Traceback: out of memory\n")
            sys.stderr.flush()
            os._exit(3)
        case "hang":
            time.sleep(3600)
    return None


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        case "tools/list":
            return {"tools": TOOLS} | ({"nextCursor": "again"} if mode == "pages" else {})
        case "tools/call":
            params = request["params"]
            text = call(params["name"], params["arguments"], params.get("_meta") or {})
            return None if text is None else {"content": [{"type": "text", "text": text}]}
    return {}


if mode == "dies":
    sys.exit("no licence")
if mode == "silent":
    time.sleep(3600)
if mode == "noise":
    say("Welcome!\n" * 100)
if mode == "stubborn":  # ends neither with its input nor at SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for line in sys.stdin:
    if path := os.environ.get("REQUESTS"):
        with open(path, "a") as file:
            file.write(line)
    request = json.loads(line)
    if "id" in request and (result := answer(request)) is not None:
        say(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}))
if mode == "stubborn":
    time.sleep(3600)
