"""Engines that come and go: `turnwise scale`, and a range of `serving.workers`.

Another process asks by a file in the run folder: whoever may write there may scale the run. The run
answers at once, by another file, and engines join and leave while it goes on.
"""

import asyncio
import json
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
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable

if TYPE_CHECKING:
    from turnwise.serving.manager import AsyncLLMServerManager

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # time after which a run notices a request
_ANSWER_SECONDS = 15.0  # time for a run to answer
_PAUSE_SECONDS = 0.05
_MOST_WORKERS = 2**16
_wanted: dict[Path, int] = {}
"""Numbers that were asked for, by run folder; they also hold after a restart of the trainer."""


def request_file(run: Path) -> Path:
    """Return the file by which another process asks a run for a number of engines."""
    return run / "logs" / "scale-wanted.json"


def _answer_file(run: Path) -> Path:
    return run / "logs" / "scale.json"


def ask(run: Path, workers: int, seconds: float = _ANSWER_SECONDS) -> str:
    """Ask a run in progress for a number of engines, and return what it says; blocks.

    Raises:
        InputError: when no process of the run is running here, or the run refuses.
        DeadlineError: when it does not answer within `seconds`.

    Example:
        print(ask(Path("runs/run"), 4))  # 1 engine serves now, 4 asked for: more join once ...
    """
    from turnwise.core import stacks  # for Linux; other systems read runs

    if not (run / "logs").is_dir():
        raise InputError(f"there is no run in {run} (a folder with logs)")
    if not stacks.may_be_running(run):
        raise InputError(f"no process of {run} is running here")
    request, answer = request_file(run), _answer_file(run)
    with translate_unwritable(request):
        answer.unlink(missing_ok=True)
        write_file(request, json.dumps({"workers": workers}))
    due = time.monotonic() + seconds
    while request.exists():  # the run removes it
        if time.monotonic() > due:
            request.unlink(missing_ok=True)
            raise deadline_error(seconds, f"{run}, which may still be starting, did not answer")
        time.sleep(_PAUSE_SECONDS)
    try:
        said: JsonObject = json.loads(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"another program asked {run} at the same moment; ask again") from error
    if "refused" in said:
        raise InputError(f"{run} refuses: {said['refused']}")
    return str(said["said"])


@asynccontextmanager
async def scaling(config: Config, manager: "AsyncLLMServerManager") -> AsyncIterator[None]:
    """Start the engines beyond those that a run begins with, and do what `ask` asks for, during an
    `async with` block."""
    run = Path(config.output_dir, config.name)

    async def scale(workers: int) -> None:
        try:
            await manager.scale(workers)
        except Exception:  # the run goes on with the engines that it has
            logger.exception("the number of engines could not be changed")

    async def follow() -> None:
        await scale(_wanted.get(run, config.serving.most_workers))
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            workers = await run_in_thread(_take_request, run, config, len(manager.engines))
            if workers is not None:
                _wanted[run] = workers
                await scale(workers)

    async with task_group() as tasks:
        following = tasks.create_task(follow())
        yield
        following.cancel()
    _wanted.pop(run, None)  # the run is over, and did not fail


def _take_request(run: Path, config: Config, up: int) -> int | None:
    """Answer the request for a number of engines, and return the number; None without one, or if it
    is refused. `up` engines serve now."""
    request = request_file(run)
    try:
        text = request.read_text(encoding="utf-8")
    except OSError:  # there is none
        return None
    workers = _number_in(text)
    if workers is None:
        said = {"refused": f"a number of engines is between 1 and {_MOST_WORKERS:,}"}
    elif config.training.colocated:
        said = {
            "refused": "with training.colocated its engines run in the trainer's processes, whose "
            "number is fixed"
        }
        workers = None
    else:
        said = {"said": _describe(workers, up, config.serving.fewest_workers)}
    try:
        write_file(_answer_file(run), json.dumps(said))
        request.unlink()
    except OSError as error:  # it would be found again, and again
        logger.warning("a request to scale is not followed: %s", error)
        return None
    logger.info("turnwise scale: %s", *said.values())
    return workers


def _number_in(text: str) -> int | None:
    """Return the number in a request, which any program may have written; None without one."""
    try:
        workers = json.loads(text)["workers"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if not isinstance(workers, int) or isinstance(workers, bool):
        return None
    return workers if 1 <= workers <= _MOST_WORKERS else None


def _describe(workers: int, up: int, first: int) -> str:
    """Return a sentence about the way from `up` engines to `workers`, of a run that began with
    `first`."""
    said = f"{up} {'engine serves' if up == 1 else 'engines serve'} now, {workers} asked for"
    if workers > up:
        return f"{said}: more join once they have started and the cluster has room for them"
    if workers < up:
        said += ": others leave once their turns have ended, or continue on the rest"
    if workers < first:
        said += (
            f"; GPUs of the {first} that the run began with (serving.workers) stay reserved until "
            "it ends"
        )
    return said
