"""An episode: the use of one environment, from build to close, outside the run's event loop.

    build -> setup -> problem and tools -> step ... -> reward -> metrics -> close

All plain methods of one environment run in the same thread, which only this episode uses. Each call
has the deadline `rollout.environment_timeout`, except that `reward` has `rollout.stall_timeout`. A
failed call fails the trajectory with a `TrajectoryError` that names the row. Its reason is
`environment_error` or `environment_timeout`, or `reward_error` for the reward. A failed `close` is
only counted.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar, cast

from turnwise.config import RolloutConfig
from turnwise.core.aio import is_cancelled, together
from turnwise.core.deadlines import StallClock
from turnwise.core.optional import Foreign
from turnwise.core.user_code import (
    UserThread,
    call_user_code,
    describe_user_error,
    user_errors,
)
from turnwise.core.watchdog import waiting
from turnwise.errors import (
    DeadlineError,
    InputError,
    TrajectoryError,
    TurnwiseError,
    defined_at,
)
from turnwise.rollouts.environment import (
    Environment,
    EnvironmentType,
    Rewards,
    name_of,
    naming_row,
    own_method,
    read_messages,
    read_metrics,
    read_move,
    read_policies,
    read_problem,
    read_reward,
    read_rewards,
    read_tools,
    type_of,
)
from turnwise.rollouts.problems import Problem
from turnwise.tools import Tool, ToolFunction, Toolset
from turnwise.tools.tool import is_toolset
from turnwise.tools.toolbox import Toolbox, make_toolbox
from turnwise.trajectory import Message, Trajectory

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

PREVIEW_CALLS = 3
"""Number of calls in a preview, each with its own deadline: one call builds the environment and
sets it up, one call reads its attributes, and one call closes it."""
STALL_KEY = "rollout.stall_timeout"  # configuration key of the deadline for a reward
ToolSource = Callable[[], ToolFunction | Tool | Toolset]
"""Function that returns the tool or toolset of one entry of `rollout.tools` for one episode. It may
be user code. The episode opens and closes a toolset, or never opens it."""
Report = Callable[[str, Exception], Awaitable[None]]
"""Function that gets the reason and the error of a failed call that does not end a trajectory."""


class Episode:
    """One environment in use, in threads of this process; `playing` opens and closes the episode.

    `RemoteEpisode` overrides the methods that use the environment; the tools of `rollout.tools`
    run in this process in both cases.
    """

    def __init__(
        self,
        factory: EnvironmentType,
        problem: Problem,
        rollout: RolloutConfig,
        tools: Sequence[ToolSource] = (),
    ) -> None:
        self.where = problem.id  # name of the row, for messages
        self.name = "the environment"  # name of the environment's class, once it is open
        self.environment: Foreign = None
        """The environment that agent loops get; None until it is built."""
        self.problem: list[Message] = []
        self.players: dict[str, list[Message]] = {}
        """Opening messages for each player of a game; the first player's messages also serve as the
        problem."""
        self.policies: dict[str, str] = {}
        """Name of the policy that the environment gives each player, by player."""
        self.toolbox = make_toolbox([], rollout)
        """The environment's tools, and the tools of `rollout.tools`."""
        self.rewards = True  # whether the environment has its own reward; True until known
        self.steps = False  # whether the environment answers turns that call no tool
        self.measures = False  # whether the environment has its own metrics
        self._factory = factory
        self._row = problem.row
        self._rollout = rollout
        self._sources = tools
        self._thread = UserThread()  # runs the environment's plain methods
        self._own: Sequence[ToolFunction | Tool] = ()  # the environment's own tools
        self._tools: list[ToolFunction | Tool] = []
        self._toolsets: list[Toolset] = []
        self._closes: Callable[..., object] | None = None

    async def open(self) -> None:
        """Build the environment, set it up, and read its problem and tools."""
        async with self._failing("the environment"):
            await self._begin()
        await self._open_toolsets()

    async def preview(self, *, set_up: bool) -> bool:
        """Open the environment without toolsets, and close it; return whether its problem and all
        its tools are now known. If not `set_up`, an environment with a `setup` is only built.

        Raises:
            InputError: when the environment cannot be used, or misses a deadline; names the row.
            TrajectoryError: when the environment itself raises this error, for example because a
                server cannot be reached.
        """

        async def report(_: str, error: Exception) -> None:
            logger.warning("%s", error)

        try:
            async with user_errors(None, f"{self.where}: the environment failed: "):
                known = await self._begin(set_up=set_up)
        except DeadlineError as error:
            raise InputError(str(error)) from error
        finally:
            self._toolsets, unopened = [], self._toolsets
            await self.close(report)
        return known and not unopened

    async def _begin(self, *, set_up: bool = True) -> bool:
        """Build the environment, set it up, and read its problem and tools; return whether problem
        and tools were read. If not `set_up`, an environment with a `setup` is only built."""

        def begin() -> Awaitable[object] | None:
            """Build the environment. If its `setup` is async, return the awaitable, otherwise read
            problem and tools."""
            self.environment = self._factory(self._row)
            self._find_methods()  # so that `close` runs even if `setup` fails
            setup = own_method(self.environment, "setup")
            if setup is not None and not set_up:
                self._closes = None  # `close` expects what `setup` opens
                return None
            opening = None if setup is None else setup()
            if inspect.isawaitable(opening):
                return opening
            self._learn()
            return None

        await self._ask("the environment", self._named(begin))
        if set_up and not self.problem:  # its `setup` is async
            await self._ask("the environment", self._named(self._learn))
        return bool(self.problem)

    def prompt(self) -> list[Message] | None:
        """Return the messages that the class makes from the row alone, or None if it cannot. Call
        this in a thread."""
        if (prompt := own_method(type_of(self._factory), "prompt")) is None:
            return None
        with naming_row(self.where, self._row):
            reply = prompt(self._row)
            what = f"{name_of(self._factory)}.prompt"
            return None if reply is None else read_messages(reply, what)

    def _learn(self) -> None:
        self._find_methods()  # again, because `setup` may have set some
        try:
            problem, self.players = read_problem(self.environment)
            self.policies = read_policies(self.environment)
            tools = read_tools(self.environment)
        except InputError as error:
            where = defined_at(type(self.environment))
            raise InputError(f"{error} ({where})" if where else str(error)) from error
        self._offer(*tools)
        self.problem = problem

    def _find_methods(self) -> None:
        """Find the environment's own methods; looking up a method may run user code."""
        self.name = type(self.environment).__name__
        self.steps = own_method(self.environment, "step") is not None
        self.measures = own_method(self.environment, "metrics") is not None
        self.rewards = own_method(self.environment, "reward") is not None
        self._closes = own_method(self.environment, "close")

    def _offer(
        self, tools: Sequence[ToolFunction | Tool], toolsets: Sequence[Toolset] = ()
    ) -> None:
        """Offer an environment's tools and the tools of `rollout.tools`; toolsets are opened
        later."""
        self._own, self._tools, self._toolsets = tools, [*tools], [*toolsets]
        for source in self._sources:
            if is_toolset(tool := source()):
                self._toolsets.append(tool)
            else:
                self._tools.append(cast(ToolFunction | Tool, tool))
        if not self._toolsets:
            self.toolbox = self._make_toolbox(self._tools)

    def _make_toolbox(self, tools: Sequence[ToolFunction | Tool]) -> Toolbox:
        return make_toolbox(tools, self._rollout, self._thread, self._own)

    async def _open_toolsets(self) -> None:
        if not self._toolsets:
            return
        opened = await together(
            self._call(f"{type(toolset).__name__}.open", toolset.open, own=False)
            for toolset in self._toolsets
        )
        tools = [*self._tools, *(tool for some in opened for tool in some)]
        self.toolbox = await self._read("the environment", lambda: self._make_toolbox(tools))

    def turn_ended(self, turn: int) -> None:
        """Set `current_turn`, for the turn's tool calls and `step`."""
        if isinstance(self.environment, Environment):
            self.environment.current_turn = turn

    async def step(
        self, message: Message, *, game: bool = False
    ) -> tuple[str, list[Message]] | None:
        """Return the player who moves next ("" if it is not a game), and the messages that the
        model reads next; None ends the trajectory. In a game, `message` has the player's `name`."""
        reply = await self._call("step", self.environment.step, message) if self.steps else None
        if reply is None:
            return None
        what = f"{self.name}.step"
        if game:
            return await self._read("step", lambda: read_move(reply, self.players, what))
        if isinstance(reply, str):
            return "", read_messages(reply, what)  # not in a thread: this runs no user code
        return "", await self._read("step", lambda: read_messages(reply, what))

    async def done(self) -> bool:
        known = inspect.getattr_static(self.environment, "done", None)  # without user code
        if isinstance(known, bool):
            return known
        return bool(
            await self._call("done", lambda: bool(getattr(self.environment, "done", False)))
        )

    async def reward(self, trajectory: Trajectory) -> Rewards:
        """Return the environment's reward of a finished trajectory; raise TrajectoryError
        `reward_error` if it fails."""
        seconds, name = self._rollout.stall_timeout, "the environment's reward"
        who, where = "the environment", ""
        if self.name != who:  # the environment was built
            who = f"{who} {self.name}"
            where = defined_at(inspect.getattr_static(self.environment, "reward", None))
        async with user_errors("reward_error", f"{who} gave no reward: ", (TrajectoryError,)):
            value = await call_user_code(
                lambda: self.environment.reward(trajectory),
                name=name,
                seconds=seconds,
                key=STALL_KEY,
                thread=self._thread,
            )
        who += f" ({where})" if where else ""
        return await rewards_of(value, who, trajectory, seconds)

    async def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        if not self.measures:
            return {}
        values = await self._call("metrics", self.environment.metrics, trajectory)
        return await self._read("metrics", lambda: read_metrics(values, f"{self.name}.metrics"))

    def read(self, trajectory: Trajectory) -> Sequence[Message] | str:
        """Return the messages of a trajectory, or its whole text if it is not a chat; reward models
        and judges read this."""
        environment = self.environment
        own = isinstance(environment, Environment) and environment._plain_text(trajectory)
        return own or trajectory.messages

    def release(self) -> None:
        """Release what the environment shares with its group; call this when the whole group has
        been rewarded."""
        if isinstance(self.environment, Environment):
            self.environment._group_ended()

    async def close(self, report: Report) -> None:
        """Close the environment and its toolsets together; failures are only reported."""

        async def one(close: Callable[..., object], own: bool) -> None:
            try:
                await self._call("close", close, own=own)
            except TrajectoryError as error:
                await report("close_error", error)

        closes = [] if self._closes is None else [one(self._closes, True)]
        closes += [one(toolset.close, False) for toolset in self._toolsets]
        try:
            await asyncio.gather(*closes)
        finally:
            self._thread.release()

    async def _call(
        self, what: str, function: Callable[..., Foreign], *arguments: object, own: bool = True
    ) -> Foreign:
        """Call a function as `_ask` does; any error that it raises fails the trajectory."""
        async with self._failing(what):
            value = await self._ask(what, function, *arguments, own=own)
        return value

    async def _ask(
        self, what: str, function: Callable[..., Foreign], *arguments: object, own: bool = True
    ) -> Foreign:
        """Call a function of the environment (`own`; in its thread if plain), or of a toolset."""
        return await call_user_code(
            function,
            *arguments,
            name=f"{what} of {self.where}",
            seconds=self._rollout.environment_timeout,
            key="rollout.environment_timeout",
            thread=self._thread if own else None,
        )

    @asynccontextmanager
    async def _failing(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except TrajectoryError:
            raise
        except DeadlineError as error:
            raise TrajectoryError("environment_timeout", str(error)) from None
        except TurnwiseError as error:
            raise TrajectoryError("environment_error", str(error)) from error.__cause__ or error
        except Exception as error:
            message = f"{self.where}: {what} failed: {await describe_user_error(error)}"
            raise TrajectoryError("environment_error", message) from error

    async def _read(self, what: str, read: Callable[[], _T]) -> _T:
        """Read a value that the environment gave, which may run its code; errors name the row."""
        value: _T = await self._call(what, self._named(read))
        return value

    def _named(self, read: Callable[[], _T]) -> Callable[[], _T]:
        def named() -> _T:
            with naming_row(self.where, self._row, (TrajectoryError,)):
                return read()

        return named


async def rewards_of(value: object, who: str, trajectory: Trajectory, seconds: float) -> Rewards:
    """Return a reward of any type as `Rewards` with plain numbers. Unless its type is one of
    Python's numbers, reading it may run user code, for at most `seconds`."""
    if type(value) in (bool, int, float):
        return Rewards(read_reward(value, who))
    try:
        name, read = f"{who}'s reward", partial(read_rewards, value, who, trajectory)
        rewards: Rewards = await call_user_code(read, name=name, seconds=seconds, key=STALL_KEY)
    except DeadlineError as error:
        raise TrajectoryError("reward_error", str(error)) from None
    return rewards


@asynccontextmanager
async def playing(episode: Episode, clock: StallClock, report: Report) -> AsyncIterator[Episode]:
    """Open an episode for an `async with` block, and always close it at the end."""
    try:
        with waiting(episode.where, "environment"), clock.held():
            await episode.open()
        yield episode
    finally:
        with clock.held():
            closing, cancelled = asyncio.ensure_future(episode.close(report)), False
            while not closing.done():  # cancelling this task must not stop it
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    cancelled = True
            if cancelled and is_cancelled():
                raise asyncio.CancelledError
            closing.result()
