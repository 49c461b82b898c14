"""A server of Chat Completions that follows the example's rubric by a rule, not by a model.

It stands in for a judge where there is no large model: it reads the document in the prompt, and
answers as a judge does.

python -m examples.judge.rule 8765
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ANSWER = re.compile(r"\banswer is (-?\d+)\.")


def verdict(prompt: str) -> dict[str, Any]:
    """Return the verdict on the document in a judge's prompt."""
    document, _ = json.JSONDecoder().raw_decode(prompt)
    row, said = document["row"], document["conversation"]
    right = row["a"] - row["b"] + row["c"]
    stated = _ANSWER.findall(said[-1]["content"])
    if stated == [str(right)]:
        return {"why": "It states the right number.", "score": 1.0}
    calculated = {message["content"] for message in said if message["role"] == "tool"}
    if stated and stated[-1] in calculated:
        return {"why": "It states a number of the calculator, not the right one.", "score": 0.25}
    return {"why": f"It does not state {right}.", "score": 0.0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = json.dumps(verdict(asked["messages"][-1]["content"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Rule(ThreadingHTTPServer):
    """The server; `url` is its base URL."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


if __name__ == "__main__":
    with Rule(int(sys.argv[1])) as server:
        server.serve_forever()
