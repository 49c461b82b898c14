"""Environments of NeMo-Gym's resource servers, over HTTP; NeMo-Gym itself is not imported.

A row of NeMo-Gym's data has `responses_create_params` (input and tools in the format of OpenAI's
Responses API) and the fields that the server's verifier needs. The server recognises a session by a
cookie. The server receives POST /seed_session with the row, POST /TOOL with the arguments of a call
of TOOL, and POST /verify with the row and the conversation as a response.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import ClassVar

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from turnwise.core.http_client import HttpClient, HttpError
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import AnswerError, Number, read_answer
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.environment import REPLY, Environment, EnvironmentType, finite_number
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool
from turnwise.trajectory import Message, Trajectory

CONNECT_SECONDS = 10.0
"""Deadline for opening a connection; calls have the deadlines of environments and tools."""
_ERROR_CHARS = 500
_TEXTS = ("input_text", "output_text", "text")
_METRICS = 100  # maximum number of a verifier's metrics; further metrics are dropped
_NAME_CHARS = 100


@with_config(extra="allow")
class _Verified(TypedDict):
    """The answer to `verify`; all numbers in it except the reward are metrics."""

    reward: Number


_SEEDED: TypeAdapter[object] = TypeAdapter(object)
_VERIFIED = TypeAdapter(_Verified)


class NemoGymError(Exception):
    """A failed request; the message quotes the server's answer if the server gave one."""


class NemoGym(Environment):
    """A session of a NeMo-Gym resource server.

    Attributes:
        url: The server's address, `http://host:port`.

    Example:
        class Counter(NemoGym):
            url = "http://localhost:8001"
    """

    url: ClassVar[str] = ""

    def __init__(self, row: Row, url: str = "") -> None:
        parameters = row.get("responses_create_params")
        if not isinstance(parameters, dict):
            raise InputError("a row of NeMo-Gym's data has responses_create_params")

        def tool(described: JsonObject) -> Tool:
            name = described.get("name")
            if described.get("type") != "function" or not isinstance(name, str):
                raise InputError(
                    f"only tools of type function are supported, not {described!r:.80}"
                )

            async def call(arguments: JsonObject) -> str:
                return (await self._post(name, arguments)).decode(errors="replace")

            schema = described.get("parameters") or {"type": "object", "properties": {}}
            return Tool(name, str(described.get("description") or ""), schema, call)

        self.problem = read_input(parameters)
        self.tools = [tool(described) for described in parameters.get("tools") or ()]
        self._row, self._parameters = row, parameters
        self._url = (url or self.url).rstrip("/")
        self._http: HttpClient | None = None
        self._seen: dict[str, float] = {}

    async def setup(self) -> None:
        self._http = HttpClient(connect_seconds=CONNECT_SECONDS, cookies=True)
        seeded = await self._post("seed_session", self._row)
        with self._reading():
            answer = read_answer(seeded, _SEEDED) if seeded else None
        if isinstance(answer, dict) and answer.get("mcp"):
            raise InputError(f"{self._url} offers its tools over MCP only, which is not supported")

    async def reward(self, trajectory: Trajectory) -> float:
        messages = trajectory.messages[len(self.problem) :]
        response = to_response(messages, self._parameters)
        body = await self._post("verify", {**self._row, "response": response})
        with self._reading():
            answer = read_answer(body, _VERIFIED)
        numbers = {
            key: number
            for key, value in answer.items()
            if key not in self._row and key != "reward" and len(key) <= _NAME_CHARS
            if isinstance(value, int | float) and (number := finite_number(value)) is not None
        }
        self._seen = dict(islice(numbers.items(), _METRICS))
        return answer["reward"]

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return self._seen

    async def close(self) -> None:
        if self._http is not None:  # the server forgets sessions by itself
            await self._http.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except AnswerError as error:
            said = f"the NeMo-Gym server at {self._url} {error}"
            raise TrajectoryError(REPLY, said) from None

    async def _post(self, path: str, body: JsonObject) -> bytes:
        if self._http is None:
            raise NemoGymError("the session is not open")
        url = f"{self._url}/{path}"
        try:
            with self._reading():
                answer = await self._http.request("POST", url, json=body)
        except HttpError as error:
            raise NemoGymError(f"{url}: {error}") from error
        if not answer.ok:
            text = answer.body[: 4 * _ERROR_CHARS].decode(errors="replace")[:_ERROR_CHARS]
            raise NemoGymError(f"{path} answered {answer.status}: {text}")
        return answer.body


def at(url: str) -> EnvironmentType:
    """Return the environment of a server: `environment: nemo_gym:http://host:port`."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"a NeMo-Gym server's address must be like http://host:port, not {url!r}")
    return partial(NemoGym, url=url)


def read_input(parameters: Mapping[str, object]) -> list[Message]:
    """Return the input of a Responses request as messages; only text input is supported."""
    given = parameters.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise InputError("responses_create_params.input must be a text or a list of messages")
    messages: list[Message] = []
    if instructions := parameters.get("instructions"):
        messages.append({"role": "system", "content": str(instructions)})
    for item in items:
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise InputError(f"responses_create_params.input has more than messages: {item!r:.80}")
        content = item.get("content")
        if not isinstance(content, str):
            parts = content if isinstance(content, list) else [content]
            texts = [p["text"] for p in parts if isinstance(p, dict) and p.get("type") in _TEXTS]
            if len(texts) < len(parts):
                raise InputError(
                    f"responses_create_params.input has more than text: {content!r:.80}"
                )
            content = "".join(map(str, texts))
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": content})
    return messages


def to_response(messages: Sequence[Message], parameters: Mapping[str, object]) -> JsonObject:
    """Return the model's turns and the tool results as a response object of the Responses API."""
    output: list[JsonObject] = []
    for number, message in enumerate(messages):
        text = str(message.get("content") or "")
        if message["role"] == "tool":
            answered = {"type": "function_call_output", "call_id": message.get("tool_call_id")}
            output.append({**answered, "output": text})
        elif message["role"] == "assistant":
            if text:
                content = [{"type": "output_text", "text": text, "annotations": []}]
                said = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
                output.append({**said, "status": "completed", "content": content})
            for call in message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                called = {"type": "function_call", "call_id": call["id"]}
                output.append({**called, "name": name, "arguments": arguments})
    return {
        "id": "resp_turnwise",
        "created_at": time.time(),
        "model": str(parameters.get("model") or "turnwise"),
        "object": "response",
        "output": output,
        "parallel_tool_calls": parameters.get("parallel_tool_calls", True),
        "tool_choice": parameters.get("tool_choice", "auto"),
        "tools": parameters.get("tools") or [],
        "status": "completed",
    }
