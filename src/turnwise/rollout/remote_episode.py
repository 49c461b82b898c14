"""Episodes in processes of their own (`rollout.environment_process`): the driver's side.

A crash of the environment's process, or a call that nothing can interrupt, fails one trajectory;
whatever the environment leaves behind ends with its process group.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter

from turnwise.config import RolloutConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, InputError, TrajectoryError
from turnwise.rollout import environment_answers as answers
from turnwise.rollout.configured_tools import ToolSource
from turnwise.rollout.environment import Rewards
from turnwise.rollout.environment_processes import (
    GRACE_SECONDS,
    EnvironmentProcess,
    EnvironmentProcesses,
)
from turnwise.rollout.episode import Episode, Report
from turnwise.rollout.problems import Problem
from turnwise.rollout.reading import read_rewards
from turnwise.tools import Tool, ToolFunction
from turnwise.tools.toolbox import Toolbox, ToolResult
from turnwise.trajectory import Message, Trajectory

_T = TypeVar("_T")

_OPENING_CALLS = 4
"""Maximum number of calls, each with the deadline, that open an episode."""
_CUT_CHARS = 100
"""Number of characters by which a toolbox's note of what it left out exceeds its limit at most."""


class RemoteEpisode(Episode):
    """An episode whose environment lives in a process of its own."""

    def __init__(
        self,
        processes: EnvironmentProcesses,
        problem: Problem,
        rollout: RolloutConfig,
        tools: Sequence[ToolSource] = (),
    ) -> None:
        super().__init__(_no_factory, problem, rollout, tools)
        self._asked = problem
        self._processes = processes
        self._process: EnvironmentProcess | None = None
        self._known: answers.Opened | None = None

    @property
    def name(self) -> str:
        """Name of the environment's class."""
        return "the environment" if self._known is None else self._known["name"]

    async def open(self) -> None:
        """Start the process, and open the environment in it."""
        talk, control = await run_in_thread(self._processes.start)
        self._process = await EnvironmentProcess.connect(talk, control, self.where)
        seconds = _OPENING_CALLS * self._rollout.environment_timeout
        known = await self._ask(answers.OPENED, "open", self._asked, seconds=seconds)
        self._known = known
        self.problem = [*map(dict, known["problem"])]
        self.players = {name: [*map(dict, said)] for name, said in known["players"].items()}
        self.environment = _Elsewhere(self.name, self.problem)
        await self._call("the tools", self._offer, [])
        if self._toolsets:
            await self._open_toolsets()

    def _make_toolbox(self, tools: Sequence[ToolFunction | Tool]) -> Toolbox:
        schemas: list[JsonObject] = []
        if self._known is not None:
            schemas = [*map(dict, self._known["schemas"])]
        return _RemoteToolbox(self, schemas, tools, self._rollout)

    async def _ask(
        self,
        kind: TypeAdapter[_T],
        method: str,
        *arguments: object,
        seconds: float | None = None,
    ) -> _T:
        """Ask the process, which is killed when it does not answer, or not with this type.

        Args:
            seconds: The call's own deadline; None means `rollout.environment_timeout`.
        """
        assert self._process is not None
        own = self._rollout.environment_timeout if seconds is None else seconds
        try:
            return await self._process.ask(method, arguments, own + GRACE_SECONDS, kind)
        except DeadlineError as error:
            self._process.kill()
            raise TrajectoryError(
                "environment_timeout", f"{error}; its process was killed"
            ) from None

    async def call_tool(self, name: str, arguments_json: str) -> ToolResult:
        """Call one of the environment's tools.

        Raises:
            TrajectoryError: when the process has ended, or does not answer.
        """
        called = await self._ask(
            answers.CALLED,
            "tool",
            *(name, arguments_json, self._turn),
            seconds=self._rollout.tool_timeout,
        )
        error = called["error"]
        return ToolResult(
            called["text"][: self._rollout.tool_max_chars + _CUT_CHARS],
            called["outcome"],
            None if error is None else answers.RemoteError(error),
        )

    @property
    def steps(self) -> bool:
        """Whether the environment answers turns that call no tool."""
        return self._known is not None and self._known["steps"]

    async def step(self, message: Message) -> list[Message] | None:
        """Return the environment's answer to a turn of the model; None ends the trajectory."""
        said = await self._ask(answers.STEPPED, "step", message, self._turn)
        return None if said is None else [*map(dict, said)]

    async def move(self, message: Message) -> tuple[str, list[Message]] | None:
        """Return the player who moves next, and what this player reads before."""
        moved = await self._ask(answers.MOVED, "move", message, self._turn)
        if moved is None:
            return None
        if moved["player"] not in self.players:
            raise TrajectoryError(
                answers.REPLY, f"{self.where}: the environment's process named no player"
            )
        return moved["player"], [*map(dict, moved["messages"])]

    async def done(self) -> bool:
        """Return whether the environment has ended the trajectory."""
        return await self._ask(answers.DONE, "done")

    async def reward(self, trajectory: Trajectory) -> Rewards:
        """Return the environment's reward of a finished trajectory."""
        given = await self._ask(answers.REWARDED, "reward", trajectory)
        return read_rewards(Rewards(**given), "the environment", len(trajectory.turns))

    @property
    def measures(self) -> bool:
        """Whether the environment has metrics of its own."""
        return self._known is not None and self._known["measures"]

    async def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the environment's metrics of a finished trajectory."""
        return await self._ask(answers.METRICS, "metrics", trajectory)

    @property
    def closes(self) -> list[Any]:
        """The process, once it has been started."""
        return [*([] if self._process is None else [self._process.kill]), *super().closes]

    async def close(self, report: Report) -> None:
        """Close the environment, then end its process and all that it started."""
        closing = self._close_each(super().closes, report)
        if self._process is not None:
            await asyncio.gather(closing, self._close_process(self._process, report))
        else:
            await closing

    async def _close_process(self, process: EnvironmentProcess, report: Report) -> None:
        try:
            if process.ended is None:
                for failure in await self._ask(answers.CLOSED, "close"):
                    await report("close_error", answers.error_of(failure))
        except TrajectoryError as error:
            await report("close_error", error)
        finally:
            process.kill()


class _RemoteToolbox(Toolbox):
    """An environment's tools in its process, beside others that run here."""

    def __init__(
        self,
        episode: RemoteEpisode,
        schemas: Sequence[JsonObject],
        others: Sequence[ToolFunction | Tool],
        rollout: RolloutConfig,
    ) -> None:
        super().__init__(others, timeout=rollout.tool_timeout, max_chars=rollout.tool_max_chars)
        self._episode = episode
        self._remote = {str(schema["function"]["name"]): schema for schema in schemas}
        if twice := self._remote.keys() & set(super().names):
            raise InputError(f"two tools are named {min(twice)}")

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [*self._remote, *super().names]

    @property
    def schemas(self) -> list[JsonObject]:
        """Descriptions of the tools in OpenAI's format."""
        return [*self._remote.values(), *super().schemas]

    async def call(self, name: str, arguments_json: str) -> ToolResult:
        """Call a tool, in the environment's process if it is the environment's."""
        if name in self._remote:
            return await self._episode.call_tool(name, arguments_json)
        return await super().call(name, arguments_json)


class _Elsewhere:
    """Stand-in for the environment that agent loops get; only `problem` is known here."""

    def __init__(self, name: str, problem: Sequence[Message]) -> None:
        self._name = name
        self.problem = problem

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._name}.{name} is in a process of its own (rollout.environment_process): use "
            "the context's problem, toolbox and step"
        )


def _no_factory(row: object) -> Any:
    raise AssertionError("the environment is built in its own process")
