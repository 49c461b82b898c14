"""The command `turnwise view`: serve runs, or write one page."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from turnwise.core.aio import run_in_thread
from turnwise.observe.conversations import trajectory_file
from turnwise.viewer.demo import demo_runs
from turnwise.viewer.export import export
from turnwise.viewer.run_files import open_runs
from turnwise.viewer.server import serve


async def view(
    folders: Sequence[Path], port: int, announce: Callable[[str], None], *, demo: bool = False
) -> None:
    """Serve runs until cancelled.

    Args:
        port: 0 takes a free one.
        announce: Called with the address.
        demo: Whether to serve the recorded runs, too.

    Raises:
        InputError: when a folder has no run, or the port is in use.
    """
    with ExitStack() as stack:
        recorded = stack.enter_context(demo_runs()) if demo else []
        await serve(open_runs([*folders, *recorded]), port, announce)


async def write_page(
    folder: Path, target: Path, step: int | None, heldout: bool, trajectory: int | None
) -> None:
    """Write one page of a step of a run, or of one trajectory.

    Args:
        step: None is the last one.
        heldout: Whether the evaluation's trajectories are wanted.
        trajectory: Line of one trajectory, from 0; None writes all.

    Raises:
        InputError: when there is no such run, step or trajectory, or the page cannot be written.
    """
    [run] = open_runs([folder]).values()
    name = trajectory_file(run.path, step, heldout).stem
    await run_in_thread(lambda: export(run, name, trajectory, target))
