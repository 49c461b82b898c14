"""Environments of OpenEnv servers, over their WebSocket; OpenEnv itself is not imported.

Each trajectory has a session with a separate environment on the server. In the protocol of OpenEnv
0.10, the server answers `{"type": "reset" | "step" | "state" | "mcp" | "close", "data": ...}` with
`{"type": "observation" | "state" | "mcp" | "error", "data": ...}`. When the socket closes, the
server ends the session and its environment.
"""

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, NotRequired

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from turnwise.core.aio import run_in_thread
from turnwise.core.http_client import HttpClient, HttpError, WebSocket
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import (
    AnswerError,
    Number,
    checked,
    read_answer,
)
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.environment import (
    REPLY,
    Environment,
    EnvironmentType,
    Reply,
    Rewards,
    read_messages,
)
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool
from turnwise.tools.json_schema import check_parameters
from turnwise.trajectory import Message, Trajectory

CONNECT_SECONDS = 10.0  # deadline for opening a socket
CAPACITY_SECONDS = 60.0  # maximum wait for a free session of a full server
CLOSE_SECONDS = 5.0  # deadline for the closing message
_FULL = "CAPACITY_REACHED"
_RETRY_SECONDS = 0.2
_ANSWERS = {"reset": "observation", "step": "observation"}
"""Types of requests whose answers have a different type, mapped to the type of the answer."""
_NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}
_FILES = ("data:image/", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""First characters of texts that are images: a data: URL, or a PNG, JPEG, GIF or WebP file in
base64."""
Shown = str | list[str | JsonObject]
"""An observation as the model reads it: a text, or the parts of a message with images."""


class OpenEnv(Environment):
    """An environment of an OpenEnv server.

    The problem is the row's field `prompt` (a text or messages), followed by the first observation.
    Subclasses may override `reset_arguments`, `problem_of`, `describe` and `action`.

    Attributes:
        url: The server's address, `ws://host:port`.

    Example:
        class Echo(OpenEnv):
            url = "ws://localhost:8000"

            def action(self, message):
                return {"message": message["content"]}
    """

    url: ClassVar[str] = ""

    def __init__(self, row: Row, url: str = "") -> None:
        self._row = row
        self._results: list[Result] = []
        self._session = OpenEnvSession(url or self.url, self._results)

    async def setup(self) -> None:
        def tool(described: JsonObject) -> Tool:
            name = str(described["name"])

            async def call(given: JsonObject) -> Shown:
                return await self.act({"type": "call_tool", "tool_name": name, "arguments": given})

            schema = described.get("input_schema") or described.get("inputSchema") or _NO_ARGUMENTS
            return Tool(name, str(described.get("description") or ""), schema, call)

        await self._session.open()
        await self._session.reset(self.reset_arguments(self._row))
        _, first = self._results[-1]
        described = await self._session.tools()
        if described is not None:
            tools = [tool(each) for each in described]
            self.tools = await run_in_thread(_offered, tools)
        elif type(self).action is OpenEnv.action:
            schema = await self._session.action_schema()
            fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
            more = {key: value for key, value in schema.items() if key in ("$defs", "required")}
            parameters = {"type": "object", "properties": fields, **more}
            what = str(schema.get("description") or "Act in the environment.")
            tools = [Tool("act", what, parameters, self.act)]
            self.tools = await run_in_thread(_offered, tools)
        self.problem = self.problem_of(self._row, self.describe(first.get("observation") or {}))

    def reset_arguments(self, row: Row) -> JsonObject:
        """Return the arguments of `reset`: the row without its prompt."""
        return {key: value for key, value in row.items() if key != "prompt"}

    def problem_of(self, row: Row, observation: Shown) -> Sequence[Message]:
        """Return the problem of a row, with the first observation at its end."""
        messages = read_messages(row["prompt"], "prompt") if row.get("prompt") else []
        if observation and messages and messages[-1].get("role") == "user":
            asked = messages[-1]["content"]
            if isinstance(asked, str) and isinstance(observation, str):
                messages[-1]["content"] = f"{asked}\n\n{observation}"
            else:
                both = [[each] if isinstance(each, str) else each for each in (asked, observation)]
                messages[-1]["content"] = [*both[0], "\n\n", *both[1]]
        elif observation:
            messages.append({"role": "user", "content": observation})
        if not messages:
            why = "the row has no prompt, and the environment's reset returned no observation"
            raise InputError(why)
        return messages

    def describe(self, observation: JsonObject) -> Shown:
        """Return an observation as the model reads it.

        The text is a tool's result, the observation's only text, or the observation's JSON without
        `metadata`; the images follow it. The images' base64 data are not checked here. If a tool
        failed, raise `OpenEnvError`, so that the model reads an error.
        """
        if "tool_name" in observation:
            if error := observation.get("error"):
                raise OpenEnvError(str(error.get("message") if isinstance(error, dict) else error))
            result = observation.get("result")
            blocks = result.get("content") if isinstance(result, dict) else None
            found = [b for b in blocks or () if isinstance(b, dict)]
            lines = [str(b["text"]) for b in found if "text" in b]
            images = [_image(str(b.get("data"))) for b in found if b.get("type") == "image"]
            text = "\n".join(lines) if lines or images else _plain(result)
            if isinstance(result, dict) and (result.get("is_error") or result.get("isError")):
                raise OpenEnvError(text)
            return [text, *images] if images else text
        rest = {key: value for key, value in observation.items() if key != "metadata"}
        seen = {key: found for key, value in rest.items() if (found := _images(value))}
        rest = {key: value for key, value in rest.items() if key not in seen}
        texts = [value for value in rest.values() if isinstance(value, str)]
        text = _plain(rest) if any(rest.values()) else ""
        text = texts[0] if len(texts) == 1 else text
        return [text, *chain(*seen.values())] if seen else text

    def action(self, message: Message) -> JsonObject | None:
        """Return the action of a turn that calls no tool; None, the default, ends the trajectory.

        If a subclass overrides this method, the model does not get the tool `act`.
        """
        return None

    async def act(self, action: JsonObject) -> Shown:
        """Send an action, and return its observation as the model reads it."""
        await self._session.ask("step", action, self.current_turn)
        _, result = self._results[-1]
        self.done = self.done or bool(result.get("done"))
        return self.describe(result.get("observation") or {})

    async def step(self, message: Message) -> Reply:
        action = self.action(message)
        if action is None:
            return None
        try:
            shown = await self.act(action)
        except OpenEnvError as error:  # the model may correct its action
            return f"Error: {error}"
        if self.done:
            return None
        return shown if isinstance(shown, str) else [{"role": "user", "content": shown}]

    async def state(self) -> JsonObject:
        """Return the environment's state, as the server reports it."""
        return await self._session.ask("state", None)

    def reward(self, trajectory: Trajectory) -> Rewards:
        earned = defaultdict[int, float](float)
        for turn, result in self._results:
            earned[turn] += result.get("reward") or 0.0
        return Rewards(earned[-1], [earned[turn] for turn in range(len(trajectory.turns))])

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return {"openenv_steps": sum(turn >= 0 for turn, _ in self._results)}

    async def close(self) -> None:
        await self._session.close()


def _offered(tools: list[Tool]) -> list[Tool]:
    """Check the schemas of a server's tools. Raise `TrajectoryError` for a bad schema, because this
    is the server's mistake and not the user's."""
    try:
        for tool in tools:
            check_parameters(tool.parameters, tool.name)
    except InputError as error:
        raise TrajectoryError(REPLY, f"the OpenEnv server lists a {error}") from None
    return tools


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _images(value: object) -> list[JsonObject]:
    """Return the images of a field that only holds images (data: URLs or files in base64); [] for
    any other field."""
    files = value if isinstance(value, list) else [value]
    found = [each for each in files if isinstance(each, str) and each.startswith(_FILES)]
    return [_image(each) for each in found] if len(found) == len(files) else []


def _image(file: str) -> JsonObject:
    url = file if file.startswith("data:") else f"data:;base64,{file}"
    return {"type": "image", "image": url}


def at(url: str) -> EnvironmentType:
    """Return the environment of a server: `environment: openenv:ws://host:port`."""
    OpenEnvSession(url, [])
    return partial(OpenEnv, url=url)


class OpenEnvError(Exception):
    """An error that the server reported; the session can still be used."""

    full = False
    """Whether all sessions of the server are taken."""


# Types of the server's answers: the whole message, then its data.
class _Reply(TypedDict):
    type: str
    data: JsonObject


class _Data(TypedDict, total=False):
    """Data of an observation, or of an error."""

    observation: JsonObject | None
    reward: Number | None
    done: bool | int | None
    message: object
    code: object
    errors: list[JsonObject] | None
    """Invalid parts of an action, each with its location `loc` and a message `msg`."""


@with_config(extra="allow")
class _Listed(TypedDict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]
    description: NotRequired[str | None]
    input_schema: NotRequired[JsonObject | None]
    inputSchema: NotRequired[JsonObject | None]


class _Tools(TypedDict, total=False):
    tools: Annotated[list[_Listed], Field(max_length=5_000)] | None


@with_config(extra="allow")
class _Action(TypedDict):
    properties: NotRequired[JsonObject]


class _Schemas(TypedDict):
    action: _Action
    """The schema of typed actions."""


_REPLY = TypeAdapter(_Reply)
_DATA = TypeAdapter(_Data)
_TOOLS = TypeAdapter(_Tools | None)
_SCHEMAS = TypeAdapter(_Schemas)
Result = tuple[int, _Data]
"""The index of the turn that sent a step (-1 for a reset), and the environment's answer."""


class OpenEnvSession:
    """A socket to an OpenEnv server (`ws://host:port` or http), with one environment on the server.

    Only one request runs at a time. If the wait for a reply is cancelled, the reply is read before
    the next request is sent, so that replies and requests stay matched. `results` receives every
    answer to a reset or step, even if the answer arrives after such a cancellation.
    """

    def __init__(self, url: str, results: list[Result]) -> None:
        scheme, separator, rest = url.rstrip("/").removesuffix("/ws").partition("://")
        if not separator or scheme not in ("ws", "wss", "http", "https"):
            raise InputError(
                f"an OpenEnv server's address must be like ws://host:port, not {url!r}"
            )
        self._http = f"{scheme.replace('ws', 'http')}://{rest}"
        self._results = results
        self._client: HttpClient | None = None
        self._socket: WebSocket | None = None
        self._turn = asyncio.Lock()
        self._owed: deque[tuple[str, int]] = deque()
        """Type and turn of each request whose reply has not been read."""
        self._gone: TrajectoryError | None = None
        """The error that ended the session (a lost connection or a wrong answer); None before
        that."""

    async def open(self) -> None:
        self._client = HttpClient(connect_seconds=CONNECT_SECONDS)
        await self._connect()

    async def _connect(self) -> None:
        assert self._client is not None
        self._owed.clear()
        try:
            self._socket = await self._client.web_socket(f"{self._http}/ws")
        except HttpError as error:
            raise TrajectoryError(
                "environment_error", f"no OpenEnv server answers at {self._http}: {error}"
            ) from error

    async def reset(self, arguments: JsonObject) -> None:
        """Begin an episode; if the server is full, wait up to `CAPACITY_SECONDS` for a free
        session."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + CAPACITY_SECONDS
        while True:
            try:
                await self.ask("reset", arguments)
                return
            except OpenEnvError as error:
                if not error.full:
                    raise
                if loop.time() > ends:
                    raise TrajectoryError(
                        "environment_error",
                        f"{self._http} had no free session within {CAPACITY_SECONDS:g} s: {error}; "
                        "raise max_concurrent_envs there, or lower rollout.concurrency",
                    ) from None
            await self._hang_up()
            await asyncio.sleep(_RETRY_SECONDS)
            await self._connect()

    async def tools(self) -> list[JsonObject] | None:
        """Return the descriptions of an MCP environment's tools; None if the environment lists no
        tools, and therefore has typed actions."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self.ask("mcp", request)
        try:
            listed = (checked(answer.get("result"), _TOOLS) or {}).get("tools")
        except AnswerError as error:
            raise self._lost(f"it {error}", REPLY) from None
        return [*map(dict, listed)] if listed else None

    async def action_schema(self) -> JsonObject:
        """Return the JSON schema of the environment's typed actions."""
        assert self._client is not None
        try:
            answer = await self._client.request("GET", f"{self._http}/schema")
            if not answer.ok:
                raise HttpError(f"it answered {answer.status}")
            return dict(read_answer(answer.body, _SCHEMAS)["action"])
        except AnswerError as error:
            raise TrajectoryError(REPLY, f"{self._http}/schema {error}") from None
        except HttpError as error:
            raise TrajectoryError(
                "environment_error", f"{self._http}/schema gives no action: {error}"
            ) from error

    async def close(self) -> None:
        """End the session. Has no effect if the session is already closed, or was never opened."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._hang_up()
        finally:
            if self._client is not None:
                await self._client.close()

    async def _hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        await socket.send('{"type": "close"}')
        await socket.close()

    async def ask(self, kind: str, data: JsonObject | None, turn: int = -1) -> JsonObject:
        """Send a request, and return the data of its reply; raise `OpenEnvError` for an error
        reply."""
        async with self._turn:
            while self._owed:
                with suppress(OpenEnvError):
                    await self._read()
            message = {"type": kind} if data is None else {"type": kind, "data": data}
            if self._gone is not None:
                raise self._gone
            if self._socket is None:
                raise TrajectoryError("environment_error", f"the session at {self._http} is closed")
            self._owed.append((kind, turn))
            await self._socket.send(json.dumps(message, default=str))
            return await self._read()

    async def _read(self) -> JsonObject:
        """Read the reply to the oldest request in `_owed`."""
        socket = self._socket
        if socket is None:
            raise self._lost("it was closed")
        try:
            text = await socket.receive()
        except HttpError as error:
            raise self._lost(str(error)) from None
        except AnswerError as wrong:
            raise self._lost(f"it {wrong}", REPLY) from None
        asked, turn = self._owed.popleft()
        try:
            reply = read_answer(text, _REPLY)
            kind, data = reply["type"], reply["data"]
            if kind == "error":
                failed = checked(data, _DATA)
                places = []
                for mistake in failed.get("errors") or ():
                    place = mistake["loc"] if isinstance(mistake.get("loc"), list) else []
                    places.append(f"{'.'.join(map(str, place))}: {mistake.get('msg')}")
                said = str(failed.get("message") or failed.get("code") or "unknown error")
                refused = OpenEnvError("; ".join([said, *places]))
                refused.full = failed.get("code") == _FULL
                raise refused
            if kind != _ANSWERS.get(asked, asked):
                raise AnswerError(f"sent {kind[:80]!r} as the answer to {asked}")
            if kind == "observation":
                self._results.append((turn, checked(data, _DATA)))
        except AnswerError as wrong:
            raise self._lost(f"it {wrong}", REPLY) from None
        return data

    def _lost(self, why: str, reason: str = "environment_error") -> TrajectoryError:
        self._gone = TrajectoryError(
            reason, f"the OpenEnv server at {self._http} left the session: {why}"
        )
        return self._gone
