"""Sandboxes behind an HTTP server, on another machine or of a service: `sandbox: http://host:port`.

`POST /run` with a `session` and `code` answers `{"output": ...}`. The first call of a session
begins the session, and also has its `limits` and `shell`. `POST /end` with the `session` ends it.
The server enforces the limits, refuses a call of an unknown session without `limits`, and ends
unused sessions.
"""

import asyncio
import contextlib
import os
import secrets
from collections import Counter

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.endpoint import Endpoint
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import read_answer
from turnwise.errors import TrajectoryError

KEY_VARIABLE = "TURNWISE_SANDBOX_KEY"
"""Environment variable with the key that is sent to the server, if it has one."""
_SECONDS = 60.0  # time for the server, in addition to the code's time limit


class _HttpAnswer(TypedDict):
    output: str


_ANSWER = TypeAdapter(_HttpAnswer)


class HttpSandbox:
    """A session of the server at the URL in `limits.sandbox`."""

    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self._session = secrets.token_hex(16)
        self._first: JsonObject = {"limits": limits.model_dump(exclude={"sandbox"}), "shell": shell}
        self._server = Endpoint(
            limits.sandbox,
            None,
            who="the sandbox server",
            reason="sandbox",
            timeout=limits.timeout + _SECONDS,
            retries=0,  # the code may have run already
            api_key_variable=KEY_VARIABLE if KEY_VARIABLE in os.environ else None,
        )

    def run(self, code: str) -> str:
        first, self._first = self._first, {}
        return self._ask("run", {**first, "code": code})

    def close(self) -> None:
        if not self._first:
            with contextlib.suppress(TrajectoryError):  # the server ends unused sessions anyway
                self._ask("end", {})

    def _ask(self, path: str, body: JsonObject) -> str:
        async def read(answer: bytes) -> str:
            return read_answer(answer, _ANSWER)["output"]

        body = {"session": self._session, **body}
        return asyncio.run(self._server.post(path, body, read, Counter()))
