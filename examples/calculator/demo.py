"""The demo, from nothing to a trained tool user.

    python -m examples.calculator.demo [--seed N] [KEY=VALUE ...]

Generates the problems, runs `turnwise train` on them as a user would, and prints the results:
the accuracy on held-out problems, one of them in full before and after, and the picture.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from turnwise.trajectory import Trajectory, read_jsonl

CONFIG = Path(__file__).parent / "config.yaml"
RUNS = Path("runs")
TURNWISE = Path(sys.executable).with_name("turnwise")


def main() -> int:
    """Run the demo; returns the exit code of the training."""
    from .prepare import BUILD, prepare  # imports torch, which this file's importers need not

    parser = argparse.ArgumentParser(prog="examples.calculator.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration")
    options = parser.parse_args()
    seed = options.seed
    started = time.monotonic()

    print("1. The problems are for a small model that imitates a careless teacher.", flush=True)
    prepare(seed=seed)
    rows = [json.loads(line) for line in (BUILD / "heldout.jsonl").open()]

    name = free_name(f"calculator-seed{seed}", RUNS)
    command = ["train", str(CONFIG), f"seed={seed}", f"name={name}", *options.keys]
    print(f"\n2. It learns the rest by trying: turnwise {' '.join(command)}", flush=True)
    if code := run_turnwise(command):
        return code

    print_results(RUNS / name, rows)
    print(f"   picture      {RUNS / name / 'reward.png'}")
    print(f"   {time.monotonic() - started:.0f} s in all")
    print(f"\n5. Look at it: {how_to_view(RUNS / name)}")
    return 0


def how_to_view(run: Path) -> str:
    """Return the shell command that shows a run, by the path of the program: `turnwise` need not be
    on the shell's path."""
    program = Path(os.path.relpath(TURNWISE))
    activate = program.with_name("activate")
    return f"{program} view {run}   (`. {activate}` makes that `turnwise view {run}`)"


def run_turnwise(arguments: list[str]) -> int:
    """Run a command of turnwise as a user would; returns its exit code."""
    with subprocess.Popen([TURNWISE, *arguments]) as command:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command; wait for it
        return command.wait()


def print_results(run: Path, rows: list[dict[str, Any]]) -> None:
    """Print the model's results before and after, from the run's files."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    measured = [step for step in steps if step["accuracy_heldout"] is not None]
    evaluations = [evaluation(run, step["step"]) for step in measured]
    trained = sum(step.get("sampled_tokens", 0) for step in steps)
    evaluated = sum(t.sampled_tokens for e in evaluations for t in e)
    first, last = (step["accuracy_heldout"] for step in (measured[0], measured[-1]))

    for before, after in newly_solved(evaluations[0], evaluations[-1])[:1]:
        answer = rows[int(before.problem_id.rpartition(":")[2]) - 1]["answer"]
        print(f"\n3. A held-out problem, whose answer is {answer}, before:\n\n{as_text(before)}")
        print(f"\n   and after:\n\n{as_text(after)}")
    print(f"\n4. On {len(rows)} held-out problems (numbers never trained on, half in phrasings")
    print("   that the teacher never used):")
    print(f"   accuracy before RL {first:.3f}, after RL {last:.3f}")
    print(f"   after {len(steps) - 1} steps with {trained:,} sampled tokens; evaluations sampled")
    print(f"   {evaluated:,} more")
    print(f"   trajectories {run / 'trajectories'}")


def evaluation(run: Path, step: int) -> list[Trajectory]:
    """Return the trajectories of the evaluation after a step of a run."""
    return list(read_jsonl(run / "trajectories" / f"eval-{step:04d}.jsonl"))


def newly_solved(
    before: list[Trajectory], after: list[Trajectory]
) -> list[tuple[Trajectory, Trajectory]]:
    """Return both attempts at each problem that was missed before and is solved after."""
    solved = {t.problem_id: t for t in after if t.reward == 1}
    missed = (t for t in before if t.reward != 1)
    return [(t, solved[t.problem_id]) for t in missed if t.problem_id in solved]


def as_text(trajectory: Trajectory) -> str:
    """Return a conversation, a line for each message and each call."""
    lines = []
    for message in trajectory.messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = [message["content"]] if message["content"] else []
        for text in (*said, *(f"{c['name']}({_arguments(c['arguments'])})" for c in calls)):
            lines.append(f"   {message['role']:>12}  {text}")
    return "\n".join(lines)


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def free_name(name: str, runs: Path) -> str:
    """Return a name that no run has: `name`, or `name` with a number."""
    candidates = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(c for c in candidates if not (runs / c).exists())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
