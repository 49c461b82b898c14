"""A server of Chat Completions for tests, which answers with the lines of a script."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DROP = "drop"
HANG = "hang"


class Scripted(ThreadingHTTPServer):
    """A server of Chat Completions that answers each request with the next line of a script.

    A line is the text of a completion, a status with which to fail, DROP (no answer) or HANG (none
    until the test ends either). At the end of the script, `answer` makes the lines from requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: 500
        self.pause = {"retry-after": "0.005"}
        """Header of each answer."""
        self.usage: dict[str, Any] = {"prompt_tokens": 90, "completion_tokens": 10}
        self.most = 0
        """Largest number of requests at the same time."""
        self.busy = 0
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append({"path": self.path, **body})
        self.server.keys.append(self.headers["authorization"])
        self.server.busy += 1
        self.server.most = max(self.server.most, self.server.busy)
        line = self.server.script.pop(0) if self.server.script else self.server.answer(body)
        self.server.busy -= 1
        if line == HANG:
            self.server.over.wait()
        if line in (DROP, HANG):
            self.close_connection = True
        elif isinstance(line, int):
            self._send(line, {"error": {"message": f"not today ({line})"}})
        else:
            choice = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": line},
            }
            made = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
            self._send(200, {**made, "choices": [choice], "usage": self.server.usage})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in self.server.pause.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
