"""Sandboxes behind an HTTP server, on another machine or of a service: `sandbox: http://host:port`.

`POST /sessions` with the limits answers `{"id": ...}`; `POST /sessions/ID/run` with `{"code": ...}`
answers `{"output": ...}`; `POST /sessions/ID/end` ends the session. The server keeps the limits,
and ends sessions that nobody has used for long.
"""

import asyncio
import contextlib
import os
from collections import Counter
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
        self._server = Endpoint(
            limits.sandbox,
            None,
            who="the sandbox server",
            reason="sandbox",
            timeout=limits.timeout + _SECONDS,
            retries=0,  # the code may have run
            api_key_variable=KEY_VARIABLE if KEY_VARIABLE in os.environ else None,
        )

    def run(self, code: str) -> str:
        if not self._path:
            self._path = f"sessions/{quote(self._ask('sessions', self._asked, 'id'), safe='')}"
            if self._closed:  # meanwhile
                self.close()
        return self._ask(f"{self._path}/run", {"code": code}, "output")

    def close(self) -> None:
        self._closed = True
        if self._path:
            with contextlib.suppress(TrajectoryError):  # the server ends it by itself
                self._ask(f"{self._path}/end", {}, "")

    def _ask(self, path: str, body: JsonObject, wanted: str) -> str:
        async def read(answer: bytes) -> str:
            values = read_answer(answer, _ANSWER)
            if wanted and wanted not in values:
                raise AnswerError(f"sent no {wanted}")
            return values.get(wanted, "")

        return asyncio.run(self._server.post(path, body, read, Counter()))
