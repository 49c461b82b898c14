"""Sandboxes behind an HTTP server, on another machine or of a service: `sandbox: http://host:port`.

`POST /sessions` with the limits answers `{"id": ...}`; `POST /sessions/ID/run` with `{"code": ...}`
answers `{"output": ...}`; `DELETE /sessions/ID` ends the session. The server keeps the limits, and
ends sessions that nobody has used for long.
"""

import asyncio
import contextlib
import os
from urllib.parse import quote

from pydantic import TypeAdapter

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.endpoint import Endpoint
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import AnswerError, read_answer
from turnwise.errors import TrajectoryError

KEY_VARIABLE = "TURNWISE_SANDBOX_KEY"
"""Environment variable with the key that is sent to the server, if it has one."""
_ANSWER = TypeAdapter(dict[str, str])
_SECONDS = 60.0  # of the server, besides the time of the code


class HttpSandbox:
    """A session of the server at the URL in `limits.sandbox`."""

    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self._asked = limits.model_dump(exclude={"sandbox"}) | {"shell": shell}
        self._path, self._closed = "", False
        key = os.environ.get(KEY_VARIABLE)
        self._server = Endpoint(
            limits.sandbox,
            who="the sandbox server",
            reason="sandbox",
            seconds=limits.timeout + _SECONDS,
            headers={"authorization": f"Bearer {key}"} if key else {},
        )

    def run(self, code: str) -> str:
        if not self._path:
            self._path = f"/{quote(self._ask('POST', '', self._asked, 'id'), safe='')}"
            if self._closed:  # meanwhile
                self.close()
        return self._ask("POST", f"{self._path}/run", {"code": code}, "output")

    def close(self) -> None:
        self._closed = True
        if self._path:
            with contextlib.suppress(TrajectoryError):  # the server ends it by itself
                self._ask("DELETE", self._path, {}, "")

    def _ask(self, method: str, path: str, body: JsonObject, wanted: str) -> str:
        def read(answer: bytes) -> str:
            values = read_answer(answer, _ANSWER)
            if wanted and wanted not in values:
                raise AnswerError(f"sent no {wanted}")
            return values.get(wanted, "")

        return asyncio.run(self._server.ask(f"/sessions{path}", body, read, method=method))
