"""Episodes in processes of their own (`rollout.environment_process`): the driver's side.

A crash of the environment's process, or a call that nothing can interrupt, fails only one
trajectory; everything that the process started ends together with its process group. The process
may run code that the model wrote, and this code can write any answer. Therefore an answer can fail
only its own trajectory, with one of a few reasons. An `InputError`, which ends a run, is accepted
only from a process that was started for one question and has not run code of the model. The other
side is `environment_host`.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NotRequired, TypeVar

import cloudpickle  # type: ignore[import-untyped]
from pydantic import AfterValidator, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from turnwise.chat.images import parts_of, read_parts
from turnwise.config import RolloutConfig
from turnwise.core import fork_server
from turnwise.core.aio import run_in_thread
from turnwise.core.child import Requests, lacks_resources
from turnwise.core.deadlines import deadline
from turnwise.core.fork_server import ForkServer
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import (
    AnswerError,
    Number,
    checked,
    framed,
    read_answer,
    read_frame,
    receive,
)
from turnwise.errors import DeadlineError, InputError, TrajectoryError, describe_error
from turnwise.rollouts.environment import (
    REPLY,
    EnvironmentType,
    Rewards,
    name_of,
    read_rewards,
)
from turnwise.rollouts.episode import PREVIEW_CALLS, Episode, Report, ToolSource
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.row_images import holds_images
from turnwise.tools import Tool, ToolFunction
from turnwise.tools.toolbox import Toolbox, ToolOutcome, ToolResult, read_result
from turnwise.trajectory import Message, Trajectory

_T = TypeVar("_T")

GRACE_SECONDS = 10.0
"""Time from a call's deadline, which the process enforces, until the driver kills the process."""
_ENDING_SECONDS = 5.0  # time in which a process must end after its connection is closed
_OPENING_CALLS = 4  # maximum number of calls that open an episode; each has the deadline
_CUT_CHARS = 100
"""Maximum number of characters that a toolbox's note about cut text adds beyond the limit."""
CRASHED = "environment_crashed"  # reason of a trajectory whose environment's process ended
_REASONS = {"environment_error", "environment_timeout", "reward_error", "close_error"}
"""Reasons that a process may give. A different reason is counted as `environment_error`, because an
environment could invent any number of reasons, and some reasons of a run have more effect than to
fail one trajectory."""

_Name = Annotated[str, Field(max_length=200)]
_Text = Annotated[str, Field(max_length=100_000)]
_Numbers = Annotated[dict[_Name, Number], Field(max_length=1_000)]


_seen = partial(read_parts, what="a message", files=False)  # images come as data: URLs


@with_config(extra="allow")
class _Unseen(TypedDict):
    role: str


_Message = Annotated[_Unseen, AfterValidator(_seen)]
_Parts = Annotated[
    list[JsonObject], AfterValidator(lambda parts: _seen({"content": parts_of(parts)})["content"])
]


@with_config(extra="allow")
class _Function(TypedDict):
    name: _Name


@with_config(extra="allow")
class _Schema(TypedDict):
    type: Literal["function"]
    function: _Function


class Opened(TypedDict):
    """The attributes of the episode that the driver needs."""

    name: _Name
    problem: list[_Message]
    players: dict[_Name, list[_Message]]
    policies: dict[_Name, _Name]
    schemas: list[_Schema]
    steps: bool
    measures: bool
    rewards: bool


class _Called(TypedDict):
    text: str
    outcome: ToolOutcome
    error: _Text | None  # the tool's traceback
    parts: _Parts | None


class _Rewarded(TypedDict):
    final: Number
    turns: list[Number]
    parts: _Numbers
    players: _Numbers


class Failure(TypedDict):
    """An error that the process reports, with the traceback of the error's cause."""

    input: bool
    reason: _Name
    message: _Text
    cause: _Text


class _HostReply(TypedDict):
    id: int
    value: NotRequired[object]
    error: NotRequired[Failure]


# A `_Message` is a `Message` whose form was checked.
PROMPT: TypeAdapter[list[Message] | None] = TypeAdapter(list[_Message] | None)  # type: ignore[arg-type]
PREVIEW = TypeAdapter(Opened | None)
OPENED = TypeAdapter(Opened)
CALLED = TypeAdapter(_Called)
_Move = Annotated[dict[_Name, list[_Message]], Field(min_length=1, max_length=1)] | None
MOVED: TypeAdapter[dict[str, list[Message]] | None] = TypeAdapter(_Move)  # type: ignore[arg-type]
"""The next player's name ("" if it is not a game), and the messages that the model reads first."""
DONE = TypeAdapter(bool)
REWARDED = TypeAdapter(_Rewarded)
METRICS = TypeAdapter(_Numbers)
CLOSED = TypeAdapter(Annotated[list[Failure], Field(max_length=100)])
_REPLY = TypeAdapter(_HostReply)


class EnvironmentProcesses:
    """Starts a process for each episode. All are forked from one process that has imported the
    environment."""

    def __init__(self, factory: EnvironmentType, rollout: RolloutConfig) -> None:
        self.factory = factory
        self._rollout = rollout
        try:
            self._pickled = cloudpickle.dumps((factory, rollout))
        except Exception as error:
            raise InputError(
                f"the environment {name_of(factory)} cannot be sent to another process "
                f"(rollout.environment_process): {describe_error(error)}"
            ) from error
        self._server: ForkServer | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._starting = threading.Lock()

    def start(self) -> tuple[socket.socket, socket.socket]:
        """Start a process; call this in a thread. Return a connection for requests, and one that
        delivers the exit status. Closing the second kills the process and its process group."""
        seconds = self._rollout.environment_timeout
        try:
            with ExitStack() as opened:
                talk, its_end = map(opened.enter_context, socket.socketpair())
                control = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                with self._starting:
                    if self._server is None or self._server.process.poll() is not None:
                        self._folder = TemporaryDirectory(prefix="turnwise-environment-")
                        file = Path(self._folder.name) / "environment"
                        file.write_bytes(self._pickled)
                        self._server = ForkServer("turnwise.rollouts.environment_host", [str(file)])
                        weakref.finalize(self, self._server.close)
                    server = self._server
                control.connect(server.address)
                control.settimeout(seconds)
                fork_server.ask(control, {}, its_end.fileno())
                ends = time.monotonic() + seconds
                while receive(control, 1, ends) != b"\n":  # the line has the id of the new process
                    pass
                opened.pop_all()
                its_end.close()
        except (OSError, EOFError) as error:
            code = None
            if self._server is not None and not lacks_resources(error):
                # After a crash, the connection closes a moment before the process has ended.
                with suppress(subprocess.TimeoutExpired):
                    code = self._server.process.wait(_ENDING_SECONDS)
            if isinstance(error, TimeoutError):
                why = f"was not imported within {seconds:g} s (rollout.environment_timeout)"
            elif code is None:
                reason = getattr(error, "strerror", None) or "its process was not forked"
                why = f"did not start: {reason}"
            else:
                why = f"cannot be imported in a process of its own, which {_ended(code)}"
            raise TrajectoryError(CRASHED, f"the environment {why}") from error
        return talk, control


class RemoteEpisode(Episode):
    """An episode whose environment is in its own process: each use of it is a request."""

    def __init__(
        self,
        processes: EnvironmentProcesses,
        problem: Problem,
        rollout: RolloutConfig,
        tools: Sequence[ToolSource] = (),
    ) -> None:
        super().__init__(processes.factory, problem, rollout, tools)
        self._problem = _packed(problem)  # if this fails, no process was started yet
        self._processes = processes
        self.schemas: list[JsonObject] = []  # descriptions of the environment's tools
        self._turn = -1
        self._talk: asyncio.StreamWriter | None = None
        self._control: asyncio.StreamWriter | None = None
        """Connections: `_talk` carries requests, and closing `_control` kills the process; both are
        None until `connect`."""

    async def open(self) -> None:
        await self.connect(*await run_in_thread(self._processes.start))
        seconds = _OPENING_CALLS * self._rollout.environment_timeout
        opened = await self.ask(OPENED, "open", seconds=seconds)
        vars(self).update(opened)
        self.environment = _Elsewhere(self.name, self.problem)
        await self._call("the tools", self._offer, [])
        await self._open_toolsets()

    async def connect(self, talk: socket.socket, control: socket.socket) -> None:
        """Connect to a process that `EnvironmentProcesses` has started, and send the problem."""
        control.settimeout(None)
        (reader, asking), (status, life) = [
            await asyncio.open_connection(sock=each) for each in (talk, control)
        ]
        self._talk, self._control = asking, life
        self._requests = Requests[_HostReply]()
        """Includes requests whose caller no longer waits, because the answer may still come."""

        async def read_answers() -> None:
            """Pass each answer on once, until the process ends or sends an invalid one."""
            try:
                while True:
                    reply = read_answer(await read_frame(reader), _REPLY)
                    if not self._requests.resolve(number := reply["id"], reply):
                        raise AnswerError(f"answered the request {number}, which nobody waits for")
            except AnswerError as error:
                self._end(REPLY, str(error))
            except (asyncio.IncompleteReadError, OSError):
                how = "ended"
                with suppress(TimeoutError, OSError, ValueError):
                    code = await asyncio.wait_for(status.readline(), GRACE_SECONDS)
                    how = _ended(os.waitstatus_to_exitcode(int(code)))
                self._end(CRASHED, how)

        self._reading = asyncio.create_task(read_answers())
        asking.write(self._problem)

    async def ask(
        self,
        kind: TypeAdapter[_T],
        method: str,
        *arguments: object,
        seconds: float | None = None,
        alone: bool = False,
    ) -> _T:
        """Call a method in the process, and return its value, of type `kind`; raises as `value_of`.

        The process itself enforces the deadline `seconds` (None: `rollout.environment_timeout`). If
        it does not answer, or the value does not have the type, the process is killed.
        """
        assert self._talk is not None
        own = self._rollout.environment_timeout if seconds is None else seconds
        number, answer = self._requests.begin()
        self._talk.write(_packed((number, method, arguments, self._turn, trace_headers())))
        try:
            async with deadline(own + GRACE_SECONDS, f"{method} of {self.where} did not answer"):
                reply = await answer
        except DeadlineError as error:
            if alone:
                raise
            self.kill()
            message = f"{error}; its process was killed"
            raise TrajectoryError("environment_timeout", message) from None
        read = partial(value_of, reply, kind, alone=alone)
        try:  # reading the value decodes its images
            shows = holds_images(reply.get("value"))
            return await run_in_thread(read) if shows else read()
        except (AnswerError, RecursionError) as error:
            raise self._end(REPLY, str(error)) from None

    async def _ask_alone(
        self, kind: TypeAdapter[_T], method: str, *arguments: object, calls: int = 1
    ) -> _T:
        """Start a process for one request, which makes up to `calls` calls of the environment; then
        kill the process."""
        try:
            await self.connect(*await run_in_thread(self._processes.start))
            seconds = calls * self._rollout.environment_timeout
            return await self.ask(kind, method, *arguments, seconds=seconds, alone=True)
        finally:
            self.kill()

    def _end(self, reason: str, how: str) -> TrajectoryError:
        self.kill()
        message = f"{self.where}: the environment's process {how}"
        return self._requests.end(TrajectoryError(reason, message))

    def kill(self) -> None:
        """Kill the process and its process group, if they were started; safe to repeat."""
        for writer in (self._control, self._talk):
            if writer is not None:
                writer.close()

    def prompt(self) -> list[Message] | None:
        return asyncio.run(self._ask_alone(PROMPT, "prompt"))

    async def preview(self, *, set_up: bool) -> bool:
        try:
            known = await self._ask_alone(PREVIEW, "preview", set_up, calls=PREVIEW_CALLS)
        except DeadlineError as error:
            raise InputError(str(error)) from error
        except TrajectoryError as error:
            if error.reason in (CRASHED, REPLY):
                raise InputError(str(error)) from error
            raise
        if known is None:
            return False
        vars(self).update(known)
        await self._ask("the tools", self._named(lambda: self._offer([])))
        return not self._toolsets

    def _make_toolbox(self, tools: Sequence[ToolFunction | Tool]) -> Toolbox:
        return _RemoteToolbox(self, tools, self._rollout)

    def turn_ended(self, turn: int) -> None:
        self._turn = turn

    async def step(
        self, message: Message, *, game: bool = False
    ) -> tuple[str, list[Message]] | None:
        moved = await self.ask(MOVED, "step", message, game)
        if moved is None:
            return None
        ((player, said),) = moved.items()
        if player not in (self.players if game else {""}):
            raise TrajectoryError(REPLY, f"{self.where}: the environment's process named no player")
        return player, said

    async def done(self) -> bool:
        return await self.ask(DONE, "done")

    async def reward(self, trajectory: Trajectory) -> Rewards:
        given = await self.ask(REWARDED, "reward", trajectory)
        return read_rewards(Rewards(**given), "the environment", trajectory)

    async def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        return await self.ask(METRICS, "metrics", trajectory)

    async def close(self, report: Report) -> None:
        """Close the environment, then end its process and everything that the process started."""
        closing = asyncio.ensure_future(super().close(report))
        try:
            if self._talk is not None and self._requests.ended is None:
                for failure in await self.ask(CLOSED, "close"):
                    await report("close_error", error_of(failure))
        except TrajectoryError as error:
            await report("close_error", error)
        finally:
            self.kill()
            await closing


class _RemoteToolbox(Toolbox):
    """An environment's tools, which run in its process, and the tools of `rollout.tools`, which run
    in the driver."""

    def __init__(
        self,
        episode: RemoteEpisode,
        others: Sequence[ToolFunction | Tool],
        rollout: RolloutConfig,
    ) -> None:
        super().__init__(others, timeout=rollout.tool_timeout, max_chars=rollout.tool_max_chars)
        self._ask = episode.ask
        self._remote = {str(schema["function"]["name"]): schema for schema in episode.schemas}
        if twice := self._remote.keys() & set(super().names):
            raise InputError(f"two tools are named {min(twice)}")

    @property
    def names(self) -> list[str]:
        return [*self._remote, *super().names]

    @property
    def schemas(self) -> list[JsonObject]:
        return [*self._remote.values(), *super().schemas]

    async def call(self, name: str, arguments_json: str) -> ToolResult:
        if name not in self._remote:
            return await super().call(name, arguments_json)
        called = await self._ask(CALLED, "tool", name, arguments_json, seconds=self._timeout)
        limit = self._max_chars + _CUT_CHARS
        error = None if called["error"] is None else RuntimeError(called["error"])
        if called["parts"] is not None:
            made = read_result(called["parts"], limit)
            return replace(made, outcome=called["outcome"], error=error)
        return ToolResult(called["text"][:limit], called["outcome"], error)


class _Elsewhere:
    """Stand-in that agent loops get instead of the environment; it has only `problem`."""

    def __init__(self, name: str, problem: Sequence[Message]) -> None:
        self._name = name
        self.problem = problem

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"{self._name}.{name} is in a process of its own (rollout.environment_process): use "
            "the context's problem, toolbox and step"
        )


def _packed(what: object) -> bytes:
    return framed(pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL))


def value_of(reply: _HostReply, kind: TypeAdapter[_T], *, alone: bool = False) -> _T:
    """Return a reply's value, or raise the error that the reply reports. This can be an InputError
    only if the process was started for this one request (`alone`). Raise AnswerError if the value
    does not have the type `kind`."""
    if "error" in reply:
        failure = error_of(reply["error"], alone=alone)
        raise failure from failure.__cause__
    return checked(reply.get("value"), kind)


def error_of(failure: Failure, *, alone: bool = False) -> InputError | TrajectoryError:
    """Return the error that a process reports; its cause holds the reported traceback."""
    message, reason = failure["message"], failure["reason"]
    error: InputError | TrajectoryError
    if alone and failure["input"]:
        error = InputError(message)
    elif reason in _REASONS:
        error = TrajectoryError(reason, message)
    else:
        error = TrajectoryError("environment_error", f"{reason}: {message}")
    error.__cause__ = RuntimeError(failure["cause"]) if failure["cause"] else None
    return error


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
