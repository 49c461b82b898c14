"""Continuations of a trajectory that the viewer's page asks for: `turnwise whatif` as a program.

Engines and the user's code run in a process of their own, which ends with the request. One request
runs at a time.
"""

import asyncio
import json
import sys
from pathlib import Path

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.trajectory import Trajectory

MAX_BODY = 2**16
"""Maximum size of a request in bytes."""
_MAX_N = 16
_SECONDS = 1800.0
_MAX_ERROR = 500  # characters of an error that are shown


class Continuations:
    """Runs `turnwise whatif`, one request at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def make(self, run: Path, file: str, trajectory: Trajectory, asked: object) -> JsonObject:
        """Return the result of `turnwise whatif --json` for a trajectory of a step's file.

        Args:
            asked: The request: `turn`, `edits` (texts by message), `n` and `weights`, all optional.

        Raises:
            InputError: when the request is not understood, another one is running, or the command
                fails; it has the command's own sentence.
        """
        options = _options(asked)
        if not file.startswith("step-"):
            raise InputError("only trajectories of a training step can be continued")
        if self._lock.locked():
            raise InputError("another request is sampling: wait until it has ended")
        command = ["whatif", str(run), trajectory.problem_id, "--json"]
        command += ["--step", file.removeprefix("step-"), "--sample", str(trajectory.sample_index)]
        async with self._lock:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "turnwise", *command, *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(_SECONDS):
                    said, errors = await process.communicate()
            except TimeoutError:
                raise InputError(f"no answer within {_SECONDS:g} s") from None
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            own = [line for line in lines if line.startswith("turnwise: ")] or lines[-1:]
            raise InputError((own or ["the command failed"])[-1][:_MAX_ERROR])
        made: JsonObject = json.loads(said)
        return made


def _options(asked: object) -> list[str]:
    """Return a request as options of the command; raise InputError if it is not understood."""
    if not isinstance(asked, dict):
        raise InputError("a request is a JSON object")
    if unknown := asked.keys() - {"turn", "edits", "n", "weights"}:
        raise InputError(f"a request has no {min(map(str, unknown))}")
    turn, edits = asked.get("turn"), asked.get("edits", {})
    n, weights = asked.get("n", 4), asked.get("weights", "then")
    if not isinstance(edits, dict) or not all(isinstance(each, str) for each in edits.values()):
        raise InputError("edits are texts by the numbers of messages")
    if not isinstance(n, int) or not 1 <= n <= _MAX_N:
        raise InputError(f"n is a number from 1 to {_MAX_N}")
    if weights not in ("then", "now"):
        raise InputError("weights are then or now")
    options = ["-n", str(n), "--weights", weights]
    if turn is not None:
        if not isinstance(turn, int):
            raise InputError("turn is a number")
        options += ["--turn", str(turn)]
    for number, text in edits.items():
        options += ["--edit", f"{number}={text}"]
    return options
