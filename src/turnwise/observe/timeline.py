"""Times of turns in a run folder, and their export for trace viewers (`turnwise trace timeline`).

The export consists of Chrome's trace events, in two processes of the trace. The first process has a
row for each trajectory, with the times of queue, wait for the first token, sampling, tools, and the
rest of the time between two turns. The second process shows the turns of each worker, in as many
rows as turns overlap.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import TurnTimes
from turnwise.errors import InputError
from turnwise.observe.conversations import read_trajectories, trajectory_file
from turnwise.trajectory import Trajectory

TIMELINE = "timeline"
"""Folder of the files of `write_times`; they have the same names as the files of trajectories."""
_TRAJECTORIES, _WORKERS = 1, 2  # ids of the two processes
_MICROSECONDS = 1e6


def write_timeline(run: Path, step: int | None, target: Path, heldout: bool = False) -> int:
    """Write the timeline of a step; return its number of turns."""
    source = trajectory_file(run, step, heldout)
    times = source.parent.parent / TIMELINE / source.name
    if not times.is_file():
        raise InputError(f"{run} has no {times.relative_to(run)}: times of its turns")
    calls = [
        [TurnTimes(*turn) for turn in json.loads(line)]
        for line in times.read_text(encoding="utf-8").splitlines()
    ]
    events = [*_events([*read_trajectories(source)], calls)]
    try:
        target.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error}") from error
    return sum(map(len, calls))


def _events(
    trajectories: Sequence[Trajectory], calls: Sequence[Sequence[TurnTimes]]
) -> Iterator[JsonObject]:
    began = min((turn.asked for turns in calls for turn in turns), default=0.0)

    def span(
        place: tuple[int, int], name: str, start: float, end: float, **shown: object
    ) -> JsonObject:
        times = {"ts": (start - began) * _MICROSECONDS, "dur": (end - start) * _MICROSECONDS}
        return {"ph": "X", "pid": place[0], "tid": place[1], "name": name, "args": shown, **times}

    yield _name("process_name", (_TRAJECTORIES, 0), "trajectories")
    yield _name("process_name", (_WORKERS, 0), "workers")
    by_worker: dict[str, list[tuple[float, float, str]]] = {}
    for row, (trajectory, turns) in enumerate(zip(trajectories, calls, strict=True), start=1):
        title, place = f"{trajectory.problem_id} #{trajectory.sample_index}", (_TRAJECTORIES, row)
        yield _name("thread_name", place, title)
        for times in turns:
            number, first, worker = times.turn, times.first_token, times.worker
            tokens: dict[str, int] = {}
            if number < len(trajectory.turns):
                own = trajectory.turns[number]
                tokens = {"prompt": own.prompt_length, "sampled": own.sampled_tokens}
            begun, shown = times.asked, {"turn": number, "worker": worker}
            if times.queued:
                begun += times.queued
                yield span(place, "queued", times.asked, begun, **shown)
            if first is not None:
                yield span(place, "until the first token", begun, max(begun, first), **shown)
                begun = max(begun, first)
            yield span(place, f"turn {number}", begun, times.ended, worker=worker, **tokens)
            if times.tools:
                yield span(place, "tools", times.ended, times.ended + times.tools, turn=number)
            served = (times.asked, times.ended, f"{title} turn {number}")
            by_worker.setdefault(worker, []).append(served)
        for before, after in pairwise(turns):
            ended = before.ended + (before.tools or 0.0)
            if after.asked > ended:
                yield span(place, "between turns", ended, after.asked)
    lane = 0
    for worker, calls_of_worker in sorted(by_worker.items()):
        free: list[tuple[int, float]] = []
        for asked, ended, name in sorted(calls_of_worker):
            at = next((i for i, (_, until) in enumerate(free) if until <= asked), len(free))
            if at == len(free):
                lane += 1
                yield _name("thread_name", (_WORKERS, lane), worker)
                free.append((lane, ended))
            free[at] = (free[at][0], ended)
            yield span((_WORKERS, free[at][0]), name, asked, ended)


def _name(kind: str, place: tuple[int, int], name: str) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": place[0], "tid": place[1], "args": {"name": name}}
