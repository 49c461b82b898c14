"""Finished groups in files, appended as they come: trajectories, and the times of their turns."""

import asyncio
from pathlib import Path

from turnwise.core.aio import run_in_thread
from turnwise.observe.timeline import write_times
from turnwise.rollouts.group import Group, turn_times
from turnwise.trajectory.trajectory import TrajectoryLog


class GroupLog:
    """Keeps the groups of an evaluation or of rollouts, so that an early end loses none of them.

    Files that exist are replaced when the first group is kept.

    Args:
        path: File of the trajectories.
        times: File of their turns' times; None writes none.

    Example:
        log = GroupLog(run / "eval.jsonl", run / TIMELINE / "eval.jsonl")
        evaluation = await evaluate(run_group, problems, config, kept=log)
    """

    def __init__(self, path: Path, times: Path | None = None) -> None:
        self.trajectories = TrajectoryLog(path)
        self._times = times
        self._lock = asyncio.Lock()
        self._begun = False

    async def keep(self, place: int, group: Group) -> None:
        """Append a finished group, also if the caller is cancelled meanwhile.

        Raises:
            TurnwiseError: when it cannot be written.
        """
        writing = asyncio.ensure_future(self._write(place, group))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await writing
            raise

    async def _write(self, place: int, group: Group) -> None:
        async with self._lock:  # both files have the same order
            await run_in_thread(self._append, place, group)

    def _append(self, place: int, group: Group) -> None:
        self.trajectories.append(place, group.trajectories)
        if self._times is not None:
            write_times(self._times, turn_times([group]), new=not self._begun)
        self._begun = True
