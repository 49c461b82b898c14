"""One session of an OpenEnv server: requests and replies over its WebSocket, in order.

Protocol of OpenEnv 0.10: `{"type": "reset" | "step" | "state" | "mcp" | "close", "data": ...}` is
answered by `{"type": "observation" | "state" | "mcp" | "error", "data": ...}`. The server ends a
session, and its environment, when the socket closes.
"""

import asyncio
import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, NotRequired

import aiohttp
from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import (
    IDENTITY,
    MAX_BYTES,
    AnswerError,
    Number,
    checked,
    read_answer,
    read_body,
)
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts.environment_answers import REPLY

CONNECT_SECONDS = 10.0
"""Deadline for opening a socket."""
CAPACITY_SECONDS = 60.0
"""Time to wait for a place at a server whose sessions are all taken."""
CLOSE_SECONDS = 5.0
"""Deadline for saying goodbye; the socket is closed in any case."""
_FULL = "CAPACITY_REACHED"
_RETRY_SECONDS = 0.2
_ANSWERS = {"reset": "observation", "step": "observation"}
"""Types of answers that differ from their requests'."""


class OpenEnvError(Exception):
    """An error that the server reported; its environment goes on."""


class _Reply(TypedDict):
    """A message of the server."""

    type: str
    data: JsonObject


class _Observed(TypedDict, total=False):
    """The data of an observation."""

    observation: JsonObject | None
    reward: Number | None
    done: bool | int | None


class _Mistake(TypedDict, total=False):
    """A part of an action that the server refused."""

    loc: list[object]
    msg: object


class _Failed(TypedDict, total=False):
    """The data of an error."""

    message: object
    code: object
    errors: list[_Mistake] | None


@with_config(extra="allow")
class _Listed(TypedDict):
    """A tool of an MCP environment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]
    description: NotRequired[str | None]
    input_schema: NotRequired[JsonObject | None]
    inputSchema: NotRequired[JsonObject | None]


class _Tools(TypedDict, total=False):
    """The result of `tools/list`."""

    tools: Annotated[list[_Listed], Field(max_length=5_000)] | None


@with_config(extra="allow")
class _Action(TypedDict):
    """The schema of typed actions."""

    properties: NotRequired[JsonObject]


class _Schemas(TypedDict):
    """Answer to /schema."""

    action: _Action


_REPLY = TypeAdapter(_Reply)
_OBSERVED = TypeAdapter(_Observed)
_FAILED = TypeAdapter(_Failed)
_TOOLS = TypeAdapter(_Tools | None)
_SCHEMAS = TypeAdapter(_Schemas)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to a reset or a step."""

    turn: int
    """Index of the turn that asked; -1 for a reset."""
    observation: JsonObject
    reward: float
    done: bool


class OpenEnvSession:
    """A socket to an OpenEnv server, which is one environment there.

    Requests are answered one after the other. If the wait for a reply is cancelled, the reply is
    read before the next request is sent, so that no answer is taken for another's.

    Args:
        url: Address of the server: `ws://host:port`, or http.
        results: Receives every answer to a reset or a step, late ones too.
    """

    def __init__(self, url: str, results: list[StepResult]) -> None:
        scheme, separator, rest = url.rstrip("/").removesuffix("/ws").partition("://")
        if not separator or scheme not in ("ws", "wss", "http", "https"):
            raise InputError(
                f"an OpenEnv server's address must be like ws://host:port, not {url!r}"
            )
        self._http = f"{scheme.replace('ws', 'http')}://{rest}"
        self._results = results
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turn = asyncio.Lock()
        self._owed: deque[tuple[str, int]] = deque()
        """The requests whose replies have not been read, each with the turn that sent it."""
        self._gone: TrajectoryError | None = None
        """Error of a connection that is lost, or brought a wrong answer; None before."""

    async def open(self) -> None:
        """Connect.

        Raises:
            TrajectoryError: when nothing answers there.
        """
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        )
        await self._connect()

    async def _connect(self) -> None:
        assert self._client is not None
        self._owed.clear()
        try:
            self._socket = await self._client.ws_connect(
                f"{self._http}/ws", max_msg_size=MAX_BYTES, headers=trace_headers()
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TrajectoryError(
                "environment_error", f"no OpenEnv server answers at {self._http}: {error}"
            ) from error

    async def reset(self, arguments: JsonObject) -> StepResult:
        """Begin an episode, once the server has a place for it.

        Raises:
            TrajectoryError: when all of its sessions are taken for `CAPACITY_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        ends = loop.time() + CAPACITY_SECONDS
        while True:
            try:
                return await self._stepped("reset", arguments, -1)
            except _FullError as error:
                if loop.time() > ends:
                    raise TrajectoryError(
                        "environment_error",
                        f"{self._http} had no free session within {CAPACITY_SECONDS:g} s: {error}; "
                        "raise max_concurrent_envs there, or lower rollout.concurrency",
                    ) from None
            await self._hang_up()
            await asyncio.sleep(_RETRY_SECONDS)
            await self._connect()

    async def step(self, action: JsonObject, turn: int) -> StepResult:
        """Act, and return the observation.

        Raises:
            OpenEnvError: when the server refuses the action, or the environment fails.
            TrajectoryError: when the connection is lost.
        """
        return await self._stepped("step", action, turn)

    async def state(self) -> JsonObject:
        """Return the environment's state."""
        return await self._ask("state", None, -1)

    async def tools(self) -> list[JsonObject] | None:
        """Return the descriptions of an MCP environment's tools; None if it has typed actions."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self._ask("mcp", request, -1)
        try:
            listed = (checked(answer.get("result"), _TOOLS) or {}).get("tools")
        except AnswerError as error:
            raise self._lost(f"it {error}", REPLY) from None
        return [*map(dict, listed)] if listed else None

    async def action_schema(self) -> JsonObject:
        """Return the JSON schema of the environment's actions."""
        assert self._client is not None
        try:
            headers = IDENTITY | trace_headers()
            async with self._client.get(f"{self._http}/schema", headers=headers) as response:
                response.raise_for_status()
                return dict(read_answer(await read_body(response), _SCHEMAS)["action"])
        except AnswerError as error:
            raise TrajectoryError(REPLY, f"{self._http}/schema {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise TrajectoryError(
                "environment_error", f"{self._http}/schema gives no action: {error!r}"
            ) from error

    async def close(self) -> None:
        """End the session; it may be closed already, or have failed to open."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._hang_up()
        except TimeoutError:
            pass
        finally:
            if self._client is not None:
                await self._client.close()

    async def _hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(aiohttp.ClientError, OSError):  # the server may be gone
            await socket.send_json({"type": "close"})
        await socket.close()

    async def _stepped(self, kind: str, data: JsonObject, turn: int) -> StepResult:
        await self._ask(kind, data, turn)
        return self._results[-1]

    async def _ask(self, kind: str, data: JsonObject | None, turn: int) -> JsonObject:
        """Send a request, and return the data of its reply."""
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
            with suppress(aiohttp.ClientError, OSError):  # `_read` has the server's last words
                await self._socket.send_str(json.dumps(message, default=str))
            return await self._read()

    async def _read(self) -> JsonObject:
        """Read the oldest reply that is owed."""
        socket = self._socket
        if socket is None:
            raise self._lost("it was closed")
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.ERROR:
            raise self._lost(f"it sent what cannot be read: {message.data}", REPLY)
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._lost(f"{message.type.name.lower()} {message.extra or ''}".strip())
        asked, turn = self._owed.popleft()
        try:
            reply = read_answer(message.data.encode(errors="replace"), _REPLY)
            kind, data = reply["type"], reply["data"]
            if kind == "error":
                raise _failure(checked(data, _FAILED))
            if kind != _ANSWERS.get(asked, asked):
                raise AnswerError(f"sent {kind[:80]!r} as the answer to {asked}")
            if kind == "observation":
                self._results.append(_result(checked(data, _OBSERVED), turn))
        except AnswerError as error:
            raise self._lost(f"it {error}", REPLY) from None
        return data

    def _lost(self, why: str, reason: str = "environment_error") -> TrajectoryError:
        self._gone = TrajectoryError(
            reason, f"the OpenEnv server at {self._http} left the session: {why}"
        )
        return self._gone


class _FullError(OpenEnvError):
    """All sessions of the server are taken."""


def _failure(data: _Failed) -> OpenEnvError:
    """Return the error of a server's reply, with the places of a refused action."""
    text = str(data.get("message") or data.get("code") or "unknown error")
    places = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"
        for error in data.get("errors") or ()
    ]
    kind = _FullError if data.get("code") == _FULL else OpenEnvError
    return kind("; ".join([text, *places]))


def _result(data: _Observed, turn: int) -> StepResult:
    return StepResult(
        turn=turn,
        observation=dict(data.get("observation") or {}),
        reward=data.get("reward") or 0.0,
        done=bool(data.get("done")),
    )
