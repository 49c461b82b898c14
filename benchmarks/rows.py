"""Memory of many rows: `python -m benchmarks.rows [--quick]`.

`eval`, `rollout` and `train` of a thousand and of a million rows (JSON Lines of 200 bytes), each
in a process of its own, whose peak memory is measured. As in a run of one epoch, the rows are read,
groups of two are begun and judged, and then written to their file or given to the trainer. Only
sampling is left out: a group is answered at once, with one token for each trajectory. `train` has a
curriculum, which in the end has seen every row. Two processes run at a time; the note has the time
of a row.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import Claim, parser, report
from turnwise.config import Config, parse_config
from turnwise.observe.conversations import Overview
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.data import load_training
from turnwise.rollouts.evaluation import GroupLog, evaluate, groups_at_once, run_groups
from turnwise.rollouts.problems import make_stream
from turnwise.rollouts.producer import GroupProducer
from turnwise.trajectory import Outcome, Trajectory

COMMANDS = ("eval", "rollout", "train")
N = 2
PER_STEP = 64
MOST = 300e6
"""Maximum of the bytes that a million rows take in addition to the bytes of a thousand."""


async def answer(problem: Problem, tag: str) -> Group:
    group = Group.of(problem)
    for index in range(N):
        trajectory = Trajectory(
            problem.id,
            index,
            outcome=Outcome(float(index), metrics={"steps": 1.0}),
        )
        trajectory.add_turn([5, 6, 7], [8], [-1.0], [0], "stop")
        group.trajectories.append(trajectory)
    return group


async def train(config: Config) -> None:
    """Take the batches of one epoch."""

    async def has_signal(group: Group) -> bool:
        return group.problem_id[-1] in "02468"

    stream = make_stream(
        load_training(config), config.data, config.seed, config.environment_weights
    )
    producer = GroupProducer(config, answer, stream, has_signal)
    running = asyncio.create_task(producer.run())
    for step in range(1, config.training.steps + 1):
        batch = await producer.next_batch()
        assert len(batch.groups) == PER_STEP
        await producer.advance(step)
    running.cancel()
    await asyncio.wait([running])


async def play(command: str, folder: Path, rows: int) -> None:
    """Play all rows of a folder with a command."""
    sampling = {"sampling": {"n": N}}
    tree: dict[str, Any] = {
        "environment": "package:Class",
        "model": {"path": "model"},
        "data": {"path": str(folder / "rows.jsonl"), "curriculum": True},
        "rollout": {"prompts_per_step": PER_STEP},
        "training": {"steps": max(1, rows // PER_STEP - 1)},
        "eval": sampling,
    }
    config, output = parse_config({**tree, **sampling}), folder / f"{command}.jsonl"
    if command == "train":
        await train(config)
        return
    kept = GroupLog(output, folder / "timeline" / output.name)
    problems, overview, at_once = load_training(config), Overview(), groups_at_once(config, N)

    def on_group(group: Group) -> None:
        overview.add(group.trajectories)

    if command == "eval":
        evaluation = await evaluate(
            *(answer, problems, config.eval, config.rollout, at_once), "eval", on_group, kept
        )
        assert evaluation.finished == N * rows
    else:
        tag = "rollout"
        outcomes = await run_groups(answer, problems, tag, kept.keep, on_group, at_once=at_once)
        assert outcomes.finished == N * rows
    assert overview.lines()
    found = kept.trajectories
    assert (len(found), found[-1].sample_index) == (N * rows, N - 1)
    output.unlink()


def peak(command: str, folder: Path, rows: int) -> tuple[float, float]:
    """Return the peak memory of a process that plays all rows, in bytes, and its seconds."""
    own = folder / f"{command}-{rows}"
    own.mkdir()
    with (own / "rows.jsonl").open("w") as file:
        for number in range(rows):
            row = {"question": f"{number} plus 1?", "answer": str(number + 1), "text": "a" * 130}
            file.write(f"{json.dumps(row)}\n")
    play = [sys.executable, "-m", "benchmarks.rows", "--play", command, str(own), str(rows)]
    started = time.perf_counter()
    done = subprocess.run(play, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} of {rows} rows failed: {done.stderr[-2000:]}")
    return float(done.stdout), time.perf_counter() - started


def measure(folder: Path, few: int, many: int) -> list[Claim]:
    claims = []
    with ThreadPoolExecutor(2) as pool:  # memory does not depend on other processes
        runs = {
            (command, rows): pool.submit(peak, command, folder, rows)
            for command in COMMANDS
            for rows in (few, many)
        }
    for command in COMMANDS:
        (less, _), (more, seconds) = (runs[command, rows].result() for rows in (few, many))
        claims.append(
            Claim(
                f"memory of {command}, {many:,} rows above {few:,}",
                "MB",
                [(more - less) / 1e6],
                at_most=MOST / 1e6,
                note=(
                    f"{more / 1e6:,.0f} MB with {many:,} rows, {less / 1e6:,.0f} with {few:,}; "
                    f"{(more - less) / (many - few):,.0f} bytes and {seconds / many * 1e6:,.0f} us "
                    "a row"
                ),
            )
        )
    return claims


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("rows", __doc__)
    made.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    made.add_argument("--rows", type=int, default=1_000_000)
    options = made.parse_args()
    if options.play is not None:
        command, name, rows = options.play
        asyncio.run(play(command, Path(name), int(rows)))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    many = 10_000 if options.quick else options.rows
    with tempfile.TemporaryDirectory() as folder:
        report(measure(Path(folder), 1_000, many), options)


if __name__ == "__main__":
    main()
