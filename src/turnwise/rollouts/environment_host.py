"""The process of one environment, forked for each episode (`rollout.environment_process`).

`python -m turnwise.rollouts.environment_host LISTENER ALIVE FILE` imports the environment's module
once, and is forked for each episode. The fork runs an `Episode` for a `RemoteEpisode` in the driver
process. The problem and the requests are pickles, which only the driver writes. Answers are JSON
and not pickles, because code of the model may run here; images in answers are data: URLs.
"""

import asyncio
import gc
import json
import os
import pickle
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import RolloutConfig
from turnwise.core import spans
from turnwise.core.fork_server import exit_code, serve
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.randomness import reseed_all
from turnwise.core.untrusted import HEADER, framed
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.errors import InputError, TrajectoryError, TurnwiseError, describe_error, message_of
from turnwise.rollouts.episode import Episode
from turnwise.tools.toolbox import encodable, make_toolbox
from turnwise.trajectory.images import data_url

if TYPE_CHECKING:
    from turnwise.rollouts.environment import EnvironmentType
    from turnwise.trajectory import Message, Trajectory

_FLUSH_SECONDS = 2.0  # time to send the trace spans of the environment's code at the end
_ERROR_CHARS = 20_000  # maximum number of characters sent of an error, and of its traceback


def main() -> None:
    """Import the environment, then fork for each episode until the driver ends."""
    listener, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    factory, rollout = pickle.loads(Path(sys.argv[3]).read_bytes())
    make_toolbox([main], rollout)  # its first use imports modules: once, for all forks
    spans.import_opentelemetry()
    gc.freeze()
    received = serve(listener, alive, end_groups=True)
    if received is not None:  # this process is a fork
        *standard, descriptor = received[1]
        for number in standard:
            os.close(number)
        connection = socket.socket(fileno=descriptor)
        os._exit(exit_code(lambda: asyncio.run(_answer_all(connection, factory, rollout))))


async def _answer_all(
    connection: socket.socket, factory: "EnvironmentType", rollout: RolloutConfig
) -> None:
    """Read the problem, then answer requests concurrently until the driver disconnects."""
    os.setsid()  # processes of the environment end with this one
    reseed_all()
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def received() -> Foreign:
        size = int.from_bytes(await reader.readexactly(HEADER), "big")
        return pickle.loads(await reader.readexactly(size))

    async def answer(
        number: int, method: str, arguments: tuple[object, ...], turn: int, trace: dict[str, str]
    ) -> None:
        with spans.within_trace(trace):
            reply = {"id": number} | await player.reply(method, arguments, turn)
        text = json.dumps(reply, ensure_ascii=False, default=data_url)
        writer.write(framed(encodable(text).encode()))

    with suppress(asyncio.IncompleteReadError, ConnectionError):
        player = _Player(Episode(factory, await received(), rollout), rollout)
        while True:
            request = await received()
            if request[1] == "close":  # no running call may see a closed environment
                for task in tasks:
                    task.cancel()
            tasks.add(task := asyncio.create_task(answer(*request)))
            task.add_done_callback(tasks.discard)


class _Player:
    """One episode, and the answers to requests about it: {"value": ...} or {"error": ...}."""

    def __init__(self, episode: Episode, rollout: RolloutConfig) -> None:
        self.episode, self._rollout = episode, rollout

    async def reply(self, method: str, arguments: tuple[object, ...], turn: int) -> JsonObject:
        """Return the value of a method of this class or of the episode, or its error, as JSON."""
        try:
            if method != "close":
                self.episode.turn_ended(turn)  # may run the environment's code
            own = getattr(self, method, None)
            value = await (own or getattr(self.episode, method))(*arguments)
            json.dumps(value, allow_nan=False, default=data_url)
        except TurnwiseError as error:
            return {"error": _error(error)}
        except Exception as error:
            described = await describe_user_error(error)
            failure = TrajectoryError("environment_error", f"{method} failed: {described}")
            failure.__cause__ = error
            return {"error": _error(failure)}
        return {"value": value}

    async def prompt(self) -> object:
        seconds = self._rollout.environment_timeout
        return await call_user_code(self.episode.prompt, name="the environment", seconds=seconds)

    async def preview(self, set_up: bool) -> object:
        return self._known() if await self.episode.preview(set_up=set_up) else None

    async def open(self) -> object:
        await self.episode.open()
        return self._known()

    def _known(self) -> JsonObject:
        """Return the attributes of the episode that the driver needs (`remote_episode.Opened`)."""
        names = "name", "problem", "players", "policies", "steps", "measures", "rewards"
        known = {name: getattr(self.episode, name) for name in names}
        return known | {"schemas": self.episode.toolbox.schemas}

    async def tool(self, name: str, arguments_json: str) -> object:
        result = await self.episode.toolbox.call(name, arguments_json)
        error = result.error
        described = error and _with_frames(error, await describe_user_error(error))
        called = {"text": result.text, "outcome": result.outcome, "error": described}
        return called | {"parts": result.parts}

    async def step(self, message: "Message", game: bool) -> object:
        move = await self.episode.step(message, game=game)
        return None if move is None else {move[0]: move[1]}

    async def reward(self, trajectory: "Trajectory") -> object:
        return asdict(await self.episode.reward(trajectory))

    async def close(self) -> object:
        failures: list[JsonObject] = []

        async def report(reason: str, error: Exception) -> None:
            failures.append(_error(error))

        await self.episode.close(report)
        with suppress(TurnwiseError):  # the collector may be slow
            await call_user_code(spans.flush, name="the collector", seconds=_FLUSH_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        return failures


def _error(error: Exception) -> JsonObject:
    cause = error.__cause__
    return {
        "input": isinstance(error, InputError),
        "reason": error.reason if isinstance(error, TrajectoryError) else "environment_error",
        "message": message_of(error, _ERROR_CHARS),
        "cause": "" if cause is None else _with_frames(cause, describe_error(cause)),
    }


def _with_frames(error: BaseException, described: str) -> str:
    return ("".join(traceback.format_tb(error.__traceback__)) + described)[-_ERROR_CHARS:]


if __name__ == "__main__":
    main()
