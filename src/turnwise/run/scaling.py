"""Changes of the number of engines: `turnwise scale`, and a range of `serving.workers`.

Another process writes its request to a file in the run folder, so everyone who may write there may
scale the run. The run replaces the request by its answer at once; engines join and leave while the
run continues.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import Config
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.deadlines import deadline_error
from turnwise.core.files import write_file
from turnwise.errors import InputError, translate_unwritable

if TYPE_CHECKING:
    from turnwise.serving.manager import AsyncLLMServerManager

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # interval at which a run looks for a request
_ANSWER_SECONDS = 15.0  # deadline for a run's answer
_PAUSE_SECONDS = 0.05
_MAX_WORKERS = 2**16
_REFUSED = "refuses"  # the beginning of an answer
_wanted: dict[Path, int] = {}
"""Requested numbers of engines, by run folder; they also apply after a restart of the trainer."""


def request_file(run: Path) -> Path:
    """Return the file in which another process requests a number of engines; the run replaces the
    request by its answer."""
    return run / "logs" / "scale.txt"


def ask(run: Path, workers: int, seconds: float = _ANSWER_SECONDS) -> str:
    """Ask a run in progress for a number of engines, and return its answer; blocks.

    Raises:
        InputError: when no process of the run is running here, or the run refuses.
        DeadlineError: when the run does not answer within `seconds`.
    """
    from turnwise.core import stacks  # needs Linux; other systems only read runs

    if not stacks.may_be_running(run):
        raise InputError(f"no process of a run in {run} is running here")
    request, due = request_file(run), time.monotonic() + seconds
    with translate_unwritable(request):
        write_file(request, str(workers))
        while (said := request.read_text(encoding="utf-8")).isdecimal():
            if time.monotonic() > due:
                request.unlink()
                raise deadline_error(seconds, f"{run}, which may still be starting, did not answer")
            time.sleep(_PAUSE_SECONDS)
    if said.startswith(_REFUSED):
        raise InputError(f"{run} {said}")
    return said


@asynccontextmanager
async def scaling(config: Config, manager: "AsyncLLMServerManager") -> AsyncIterator[None]:
    """During an `async with` block, add engines up to the second number of a range in
    `serving.workers`, and follow the requests of `ask`."""
    run = config.run_folder

    async def follow() -> None:
        workers: int | None = _wanted.get(run, config.serving.max_workers)
        while True:
            if workers is not None:
                try:
                    await manager.scale(workers)
                except Exception:  # the run goes on with the engines that it has
                    logger.exception("the number of engines could not be changed")
            await asyncio.sleep(_LOOK_SECONDS)
            workers = await run_in_thread(_take_request, run, config, len(manager.engines))

    async with task_group() as tasks:
        following = tasks.create_task(follow())
        yield
        following.cancel()
    _wanted.pop(run, None)  # the run is over, and did not fail


def _take_request(run: Path, config: Config, up: int) -> int | None:
    """Answer a request for a number of engines, and return the number; return None if there is no
    request, or if it is refused. `up` is the number of engines that serve now."""
    request = request_file(run)
    workers: int | None = None
    try:
        if not (text := request.read_text(encoding="utf-8")).isdecimal():  # an earlier answer
            return None
        if config.training.colocated:
            said = f"{_REFUSED}: its engines run in the trainer's processes (training.colocated)"
        elif not 0 < int(text) < _MAX_WORKERS:
            said = f"{_REFUSED}: a number of engines is from 1 to {_MAX_WORKERS - 1:,}"
        else:
            workers = int(text)
            said = (
                f"engines: {up} now, {workers} wanted; they join once the cluster has room for "
                "them, and leave once their turns have ended, or continue on others"
            )
        write_file(request, said)
    except FileNotFoundError:  # nobody has asked
        return None
    except (OSError, ValueError) as error:
        logger.warning("a request to scale is not followed: %s", error)
        return None
    logger.info("turnwise scale: %s", said)
    if workers is not None:
        _wanted[run] = workers
    return workers
