"""Agents: programs that get a base URL and a problem, and whose requests become the turns.

An agent needs no code of Turnwise. It cannot reach the trajectory of another agent, because each
URL contains a secret random name. An agent is one of:

- a function `package.module:name(base_url, problem)`;
- a command: one process for each trajectory;
- a worker: one long-lived process that runs any number of trajectories at once
  (`turnwise.agent_worker`), and is started again if it ends;
- an HTTP endpoint that gets one POST for each trajectory.
"""

import asyncio
import copy
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from turnwise.chat.images import with_urls
from turnwise.chat.session import Session
from turnwise.config import Config, RolloutConfig
from turnwise.core.admission import Admission
from turnwise.core.aio import call_within, run_in_thread
from turnwise.core.child import Child, ForeignLines, Requests, start_error
from turnwise.core.deadlines import StallClock
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import WORKER
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import (
    AnswerError,
    Number,
    checked,
    read_answer,
    read_line,
)
from turnwise.core.user_code import call_user_code, user_errors
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Generator
from turnwise.errors import DeadlineError, InputError, TrajectoryError
from turnwise.rollouts.agent_branches import leave_out_branches
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, load_object
from turnwise.rollouts.problems import Row
from turnwise.serving.openai.opening import make_server
from turnwise.trajectory import MAX_REWARD

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer

logger = logging.getLogger(__name__)

_ERROR_CHARS = 500  # maximum length of an agent's error or last output in an error message
_END_SECONDS = 5.0  # time for an agent's last output, and for a worker to end once input is closed
_MAX_ROW_BYTES = 65_536  # maximum size of a row in an environment variable; Linux allows 128 KiB
_TASKS_SECONDS = 600.0
_TASKS_BYTES = 256 << 20
_TASKS_VALUES = 20_000_000
_CONNECT_SECONDS = 30.0
_REPLY_BYTES = 4 << 20
_NAME_CHARS = 100
_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TMP|TEMP|XDG_\w+"
    r"|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+|NODE_PATH|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR"
)
"""Variables that an agent's process inherits; none is likely to be a secret."""
_FUNCTION = re.compile(r"[\w.]+:\w+")
_BEGINNING = re.compile(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*[,}]')
"""Matches the request's id at the beginning of an answer. It is used if the rest is unreadable,
because the request would otherwise wait forever."""
_NO_AGENT = (
    "rollout.loop agent needs rollout.agent: package.module:function, a command, worker: COMMAND, "
    "or the URL of an endpoint"
)
_started: set[str] = set()  # commands that this process has started

_Name = Annotated[str, Field(max_length=_NAME_CHARS)]


class AgentReport(TypedDict, total=False):
    """The report of an endpoint or a worker about one trajectory; unknown keys are ignored."""

    reward: Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | None
    metrics: Annotated[dict[_Name, Number], Field(max_length=100)] | None
    sessions: Annotated[list[str], Field(max_length=1_001)] | None
    """Names or ids of the sessions that the agent used: its own session, and sessions that it
    opened below that session."""
    error: object


class _AgentAnswer(TypedDict):
    id: int
    result: NotRequired[object]
    error: NotRequired[object]


class _Tasks(TypedDict):
    result: list[JsonObject]


_REPORT = TypeAdapter(AgentReport | None)
_ANSWER = TypeAdapter(_AgentAnswer)
_TASKS = TypeAdapter(_Tasks)
_ANYTHING: TypeAdapter[object] = TypeAdapter(object)


def read_report(value: object, who: str) -> AgentReport:
    """Read a report of an agent, which error messages call `who`; raise TrajectoryError
    `agent_reply` if the report has a wrong form."""
    try:
        report: AgentReport = checked(value, _REPORT) or {}
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None
    if wrong := report.get("error"):
        report["error"] = str(wrong)[:_ERROR_CHARS]
    return report


def apply_report(report: AgentReport, session: Session, who: str) -> None:
    """Add a report to the trajectory of a session; raise TrajectoryError if it reports an error."""
    if error := report.get("error"):
        raise TrajectoryError("agent_error", f"{who}: {error}")
    own = {session.id, *session.children, *(child.id for child in session.children.values())}
    for name in report.get("sessions") or ():
        if name not in own:
            what = f"{who} reported the session {name:.{_NAME_CHARS}}"
            raise TrajectoryError(
                "agent_reply",
                f"{what}, which it did not open under its base URL: the turns there are not part "
                "of this trajectory",
            )
    trajectory = session.trajectory
    trajectory.set_outcome(metrics={**trajectory.metrics, **(report.get("metrics") or {})})
    if (reward := report.get("reward")) is None:
        return
    if session.agent_rewards:
        trajectory.set_outcome(reward=reward)
    else:
        trajectory.events["agent_reward_ignored"] += 1


def clean_environment(more: Sequence[str], **own: str) -> dict[str, str]:
    """Return the environment variables for an agent's process: inherited variables, the variables
    named in `more` (`rollout.agent_env`), and `own`."""
    for name in more:
        if name not in os.environ:
            raise InputError(f"rollout.agent_env names {name}, which is not set: export it")
    inherited = {k: v for k, v in os.environ.items() if k in more or _INHERITED.fullmatch(k)}
    # The random name in the base URL serves as the API key.
    return inherited | {"OPENAI_API_KEY": "none"} | own


async def run_command(
    command: str, environment: dict[str, str], row: Row, clock: StallClock
) -> None:
    """Run a command to its end; it is killed if this call is cancelled."""
    problem = json.dumps(row).encode()
    if len(problem) <= _MAX_ROW_BYTES:
        environment = environment | {"TURNWISE_PROBLEM": problem.decode()}
    first = command not in _started
    child = await _start(command, environment, "agent_error", first, lambda _: clock.moved(), True)
    _started.add(command)
    try:
        child.stdin.write(problem)
        child.stdin.write_eof()
        await child.exited()
    finally:
        await child.end(_END_SECONDS)
    if child.status:
        said = _trouble(child)
        raise TrajectoryError("agent_error", f"{command} exited with {child.status}: {said}")


def _trouble(child: Child) -> str:
    """Return what a program wrote last. The last line comes first, because a traceback has its
    error there, and the log shows only the first line."""
    text = child.last_words[-_ERROR_CHARS:]
    lines = text.strip().splitlines()
    return f"{lines[-1].strip()}\n{text}" if len(lines) > 1 else text


async def _start(
    command: str,
    environment: dict[str, str],
    reason: str,
    first: bool,
    heard: Callable[[bytes], object],
    joined: bool = False,
) -> Child:
    """Start an agent's program; see `start_error` and `Child.start` for the arguments."""
    try:
        return await Child.start(shlex.split(command), environment, heard=heard, joined=joined)
    except (OSError, ValueError) as error:
        raise start_error(error, f"rollout.agent: {command}", reason, first) from error


class AgentWorker:
    def __init__(self, command: str, agent_env: Sequence[str] = ()) -> None:
        self._command, self._agent_env = command, agent_env
        self._life: _Life | None = None
        self._starting = asyncio.Lock()
        self.name = f"the agent worker {command}"

    async def run(self, request: JsonObject) -> AgentReport:
        """Let the worker run a task, and return its report; cancelling this cancels the task."""
        async with self._starting:
            if self._life is None or self._life.ended:
                lines = ForeignLines(logger, self.name)
                environment, first = clean_environment(self._agent_env), self._life is None
                child = await _start(self._command, environment, "agent_crashed", first, lines.add)
                self._life = _Life(child, lines, self.name)
        value = await self._life.ask({"method": "run", **request})
        return read_report(value, self.name)

    async def close(self) -> None:
        if self._life is not None:
            await self._life.close()


class _Life:
    def __init__(self, child: Child, lines: ForeignLines, name: str) -> None:
        self._child, self._lines, self._name = child, lines, name
        self._requests = Requests[object]()
        self.ended = False  # True once the process no longer answers
        self._reading = asyncio.create_task(self._read())

    async def ask(self, request: JsonObject) -> object:
        number, answer = self._requests.begin()

        def write(message: JsonObject) -> None:
            self._child.stdin.write(json.dumps({"id": number, **message}).encode() + b"\n")

        try:
            with suppress(ConnectionError):  # it has ended, and `_read` reports why
                write(request)
                await self._child.stdin.drain()
            return await answer
        except asyncio.CancelledError:
            if self._requests.resolve(number, None):  # False if it was answered or failed
                with suppress(ConnectionError):
                    write({"method": "cancel"})
            raise

    async def _read(self) -> None:
        """Pass answers on until the process ends; then fail the requests that still wait."""

        wrong_output = ""

        async def pass_on() -> None:
            nonlocal wrong_output
            others = ForeignLines(logger, f"{self._name} wrote a line that is no answer")
            try:
                while line := await read_line(self._child.stdout):
                    try:
                        answer = read_answer(line, _ANSWER)
                    except AnswerError as error:
                        number = _BEGINNING.match(line)
                        wrong = TrajectoryError("agent_reply", f"{self._name} {error}")
                        if number is None or not self._requests.resolve(int(number[1]), wrong):
                            others.add(line)
                        continue
                    result: object = answer.get("result")
                    if "error" in answer:
                        why = f"{self._name}: {str(answer['error'])[:_ERROR_CHARS]}"
                        result = TrajectoryError("agent_error", why)
                    self._requests.resolve(answer["id"], result)  # does nothing if nobody waits
            except (AnswerError, OSError) as error:
                wrong_output = str(error)
            finally:
                others.end()

        passing = asyncio.create_task(pass_on())
        exiting = asyncio.create_task(self._child.exited())
        try:
            # A descendant that left the process group may keep the output open.
            await asyncio.wait([passing, exiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([passing], timeout=_END_SECONDS)
            self.ended = True
            await self._child.end(_END_SECONDS)
        finally:
            self.ended = True
            passing.cancel()
            exiting.cancel()
            self._lines.end()
            how = wrong_output or f"ended with {self._child.status}"
            why = f"{self._name} {how}: {_trouble(self._child)}"
            self._requests.end(TrajectoryError("agent_crashed", why))

    async def close(self) -> None:
        await self._child.end(_END_SECONDS, leave=_END_SECONDS)
        await asyncio.wait([self._reading], timeout=_END_SECONDS)
        self._reading.cancel()


def worker_tasks(command: str, agent_env: Sequence[str] = ()) -> list[JsonObject]:
    where = f"data.path: the agent worker {command}"
    environment = clean_environment(agent_env)

    async def ask() -> tuple[bytes, Child]:
        child = await Child.start(shlex.split(command), environment)
        said = bytearray()
        try:
            child.stdin.write(b'{"id": 0, "method": "tasks"}\n')
            child.stdin.write_eof()
            while part := await child.stdout.read(1 << 20):
                said += part
                if len(said) > _TASKS_BYTES:
                    raise AnswerError(f"sent more than {_TASKS_BYTES:,} bytes")
            await child.exited(_END_SECONDS)
        finally:
            await child.end(_END_SECONDS)
        return bytes(said), child

    def listed() -> tuple[bytes, Child]:
        return asyncio.run(asyncio.wait_for(ask(), _TASKS_SECONDS))

    try:  # in a thread: the caller's thread may have an event loop
        said, child = call_within(listed, _TASKS_SECONDS + 3 * _END_SECONDS)
    except TimeoutError:
        raise InputError(f"{where} listed no tasks within {_TASKS_SECONDS:g} s") from None
    except AnswerError as error:
        raise InputError(f"{where} {error}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be started: {error}") from error
    try:
        return read_answer(said.strip().rpartition(b"\n")[2], _TASKS, _TASKS_VALUES)["result"]
    except AnswerError as error:
        text = child.last_words[-_ERROR_CHARS:] or error
        what = f"{where} listed no tasks, and ended with {child.status}"
        raise InputError(f"{what}: {text}") from None


async def run_endpoint(url: str, request: JsonObject) -> AgentReport:
    from turnwise.core.http_client import (  # late, as only endpoints need it
        HttpClient,
        HttpError,
        Unreachable,
    )

    who = f"the agent {url}"
    try:
        # The trajectory's own deadlines limit the time of the answer.
        async with HttpClient(connect_seconds=_CONNECT_SECONDS) as client:
            answer = await client.request("POST", url, json=request, largest=_REPLY_BYTES)
    except InputError as error:
        raise InputError(f"rollout.agent: {error}") from error
    except Unreachable as error:
        raise TrajectoryError("agent_unreachable", f"{who} cannot be reached: {error}") from error
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None
    except HttpError as error:
        raise TrajectoryError("agent_error", f"{who} closed the connection: {error}") from error
    text = answer.body[: 4 * _ERROR_CHARS].decode(errors="replace")[:_ERROR_CHARS]
    if not answer.ok:
        raise TrajectoryError("agent_error", f"{who} answered {answer.status}: {text}")
    try:
        return read_report(read_answer(answer.body, _ANYTHING) if answer.body else None, who)
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None


class HttpAgentLoop:
    """Passes the URL of a session to an agent, and waits until the agent is done."""

    by_requests = True
    front = "starting the OpenAI server"

    def __init__(self) -> None:
        self.server: OpenAIServer | None = None
        """The server of the sessions, while the loop is `opened`."""
        self._workers: dict[str, AgentWorker] = {}  # by command

    def load(self, rollout: RolloutConfig) -> None:
        """Import the user's function, or find the program of the command."""
        agent = rollout.agent
        if agent is None:
            raise InputError(_NO_AGENT)
        if _FUNCTION.fullmatch(agent):
            load_object(agent, "rollout.agent")
        elif not agent.startswith(("http://", "https://")):
            try:
                words = shlex.split(agent.removeprefix(WORKER))
            except ValueError as error:
                raise InputError(f"rollout.agent: {agent} cannot be started: {error}") from None
            if not words or shutil.which(words[0]) is None:
                missing = f"there is no program {words[0]}" if words else "it names no program"
                raise InputError(f"rollout.agent: {agent} cannot be started: {missing}")

    @asynccontextmanager
    async def opened(
        self, config: Config, generator: Generator, admission: Admission
    ) -> AsyncIterator[None]:
        """Run a server for the agents during an `async with` block."""
        self.server = server = await make_server(config, generator, port=0)
        try:
            await server.start()
            yield
        finally:
            await self.close()
            await server.stop()
            self.server = None

    async def close(self) -> None:
        """End the agents' workers."""
        for worker in self._workers.values():
            await worker.close()
        self._workers.clear()

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        server, rollout = self.server, context.rollout
        if rollout.agent is None:
            raise InputError(_NO_AGENT)
        if server is None:
            raise InputError("rollout.loop agent needs the OpenAI server, which is not running")
        session = server.sessions.open_private(
            context.trajectory,
            sampling=context.sampling,
            agent_sampling=rollout.agent_sampling,
            group=context.route.group,
            agent_rewards=rollout.agent_rewards,
            max_turns=rollout.max_turns,
            calls=context.calls,
        )
        session.clock, session.place = context.clock, context.place
        try:
            with context.timed("agent"), waiting(context.request_id, "agent"):
                base_url, model = server.session_url(session.id), server.model_name
                await self._run_agent(rollout.agent, context, session, base_url, model)
        except (DeadlineError, InputError):
            raise
        except Exception:
            if not session.out_of_room:
                raise
        finally:
            server.sessions.close(session.id)
        session.finish()
        if session.all_lost_turns:
            context.trajectory.events["lost_turn"] += session.all_lost_turns
        if not context.trajectory.turns:
            message = f"the agent of {context.request_id} sampled nothing"
            raise TrajectoryError("agent_silent", message)
        await leave_out_branches(
            context.trajectory, rollout.agent_branches, rollout.environment_timeout
        )

    async def _run_agent(
        self, agent: str, context: RolloutContext, session: Session, base_url: str, model: str
    ) -> None:
        row, name, rollout = context.row, context.request_id, context.rollout
        trace = trace_headers()
        if not (is_function := _FUNCTION.fullmatch(agent)):
            async with user_errors("agent_error", f"the row of {name}: ", ()):
                row = await run_in_thread(with_urls, row)
        if agent.startswith(WORKER):
            command = agent.removeprefix(WORKER).strip()
            if command not in self._workers:
                self._workers[command] = AgentWorker(command, rollout.agent_env)
            worker = self._workers[command]
            task = {"task": row, "base_url": base_url, "model": model, "name": name}
            report = await worker.run(task | ({"trace": trace} if trace else {}))
            apply_report(report, session, worker.name)
        elif agent.startswith(("http://", "https://")):
            request = {"row": row, "base_url": base_url, "model": model, "id": name}
            report = await run_endpoint(agent, request)
            apply_report(report, session, f"the agent {agent}")
        elif is_function:
            # A copy: the environment computes the reward from the original row.
            await call_user_code(
                lambda: load_object(agent, "rollout.agent")(base_url, copy.deepcopy(row)),
                name=f"the agent {agent}",
                seconds=rollout.trajectory_timeout,
                key="rollout.trajectory_timeout",
            )
        else:
            variables = {header.upper(): value for header, value in trace.items()}
            variables |= {"OPENAI_BASE_URL": base_url, "OPENAI_MODEL": model}
            environment = clean_environment(rollout.agent_env, **variables)
            await run_command(agent, environment, row, context.clock)
