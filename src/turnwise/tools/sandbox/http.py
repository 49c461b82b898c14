"""Sandboxes behind an HTTP server, on another machine or of a service: `sandbox: http://host:port`.

`POST /sessions` with the limits answers `{"id": ...}`; `POST /sessions/ID/run` with `{"code": ...}`
answers `{"output": ...}`; `DELETE /sessions/ID` ends the session. The server keeps the limits, and
ends sessions that nobody has used for long. What it answers is not trusted.
"""

import contextlib
import http.client
import json
import os
import urllib.request
from urllib.parse import quote

from pydantic import TypeAdapter

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import IDENTITY, MAX_BYTES, AnswerError, read_answer
from turnwise.errors import TrajectoryError, first_line

KEY_VARIABLE = "TURNWISE_SANDBOX_KEY"
"""Environment variable with the key that is sent to the server, if it has one."""
_ANSWER = TypeAdapter(dict[str, str])
_SECONDS = 60.0  # of the server, besides the time of the code


class HttpSandbox:
    """A session of the server at the URL in `limits.sandbox`."""

    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self._limits, self._url = limits, limits.sandbox.rstrip("/")
        self._asked = limits.model_dump(exclude={"sandbox"}) | {"shell": shell}
        self._path = ""

    def run(self, code: str) -> str:
        if not self._path:
            self._path = f"/{quote(self._ask('POST', '', self._asked, 'id'), safe='')}"
        return self._ask("POST", f"{self._path}/run", {"code": code}, "output")

    def close(self) -> None:
        if self._path:
            with contextlib.suppress(TrajectoryError):  # the server ends it by itself
                self._ask("DELETE", self._path, {}, "")

    def _ask(self, method: str, path: str, body: JsonObject, wanted: str) -> str:
        headers = IDENTITY | {"content-type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["authorization"] = f"Bearer {key}"
        data, url = json.dumps(body).encode(), f"{self._url}/sessions{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._limits.timeout + _SECONDS) as sent:
                answer = read_answer(sent.read(MAX_BYTES), _ANSWER)  # a longer one is no JSON
            if wanted and wanted not in answer:
                raise AnswerError(f"sent no {wanted}")
            return answer.get(wanted, "")
        except (AnswerError, OSError, http.client.HTTPException) as error:
            message = f"the sandbox server at {self._url}: {first_line(error)}"
            raise TrajectoryError("sandbox_error", message) from error
