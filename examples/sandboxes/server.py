"""A server of sandboxes: this machine runs the code of models that another machine trains.

SANDBOX_KEY=... python -m examples.sandboxes.server 0.0.0.0 8900

On the training machine, set TURNWISE_SANDBOX_KEY to the same key, and configure
`python: {sandbox: "http://HOST:8900"}`.
"""

import hmac
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from turnwise.tools.code import CodeTool
from turnwise.tools.sandbox import Sandbox

IDLE_SECONDS = 3600.0
MOST_BYTES = 4 << 20


class Server(ThreadingHTTPServer):
    """Sessions by their ids; each new session ends the sessions that were unused for an hour."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], key: str, sandbox: str = "auto") -> None:
        super().__init__(address, Handler)
        self.key, self.sandbox = f"Bearer {key}", sandbox
        self.sessions: dict[str, tuple[Sandbox, float]] = {}
        self.lock = threading.Lock()

    def begin(self, name: str, limits: dict[str, Any], shell: bool) -> None:
        tool = CodeTool("shell" if shell else "python", limits | {"sandbox": self.sandbox})
        session = tool.choose()(tool.limits, shell=shell)
        with self.lock:
            now = time.monotonic()
            old = [each for each, (_, used) in self.sessions.items() if now - used > IDLE_SECONDS]
            ended = [self.sessions.pop(each)[0] for each in old]
            self.sessions[name] = session, now
        for each in ended:
            each.close()

    def run(self, name: str, code: str) -> str:
        with self.lock:
            session = self.sessions[name][0]
            self.sessions[name] = session, time.monotonic()
        return session.run(code)

    def end(self, name: str) -> str:
        with self.lock:
            session, _ = self.sessions.pop(name)
        session.close()
        return ""

    def server_close(self) -> None:
        super().server_close()
        for name in list(self.sessions):
            self.end(name)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        if not hmac.compare_digest(self.headers.get("authorization", ""), self.server.key):
            return self.send_error(401)
        length = int(self.headers.get("content-length", 0))
        if length > MOST_BYTES:
            return self.send_error(413)
        try:
            asked = json.loads(self.rfile.read(length))
            if self.path == "/end":
                output = self.server.end(asked["session"])
            elif self.path == "/run":
                if "limits" in asked:
                    self.server.begin(asked["session"], asked["limits"], asked["shell"])
                output = self.server.run(asked["session"], asked["code"])
            else:
                return self.send_error(404)
        except (KeyError, ValueError, TypeError) as error:
            return self.send_error(400, str(error)[:200])
        body = json.dumps({"output": output}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with Server((sys.argv[1], int(sys.argv[2])), os.environ["SANDBOX_KEY"]) as server:
        server.serve_forever()
