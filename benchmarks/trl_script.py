"""A script for TRL, run by TRL and by Turnwise: `python -m benchmarks.trl_script [--quick]`.

Only the import differs (`benchmarks/peers/trl_script.py`). Each name that both log has its mean
over all steps side by side; the two sample different answers, so the values are similar, not equal.
The goals: from the first quarter of the steps to the last, the mean reward rises at least 0.8 times
as much as TRL's, and no names are missing in addition to those that the documentation lists.
"""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.models import demo_files
from benchmarks.report import Claim, parser, report

ROOT = Path(__file__).parent.parent
MISSING = {
    "num_tokens", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
    "clip_ratio/high_max",
}  # fmt: skip
"""Names that docs/how-to/trl.md says are not logged."""

Log = list[dict[str, Any]]


def run(module: str, model: Path, steps: int, seed: int) -> Log:
    """Run the script with a module; return the records of its steps."""
    command = [sys.executable, "-m", "benchmarks.peers.trl_script", module, "--model", str(model)]
    command += ["--steps", str(steps), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        sys.exit(f"{module}: {done.stderr[-2000:]}")
    log: Log = json.loads(done.stdout.splitlines()[-1])
    return log


def means(log: Log) -> dict[str, float]:
    """Return the mean of each number that is logged."""
    names = {
        name for entry in log for name, value in entry.items() if isinstance(value, int | float)
    }
    return {
        name: statistics.mean(
            entry[name] for entry in log if isinstance(entry.get(name), int | float)
        )
        for name in sorted(names)
    }


def rise(log: Log) -> float:
    """Return the mean reward of the last quarter of the steps, less the first quarter's."""
    rewards = [entry["reward"] for entry in log]
    part = max(1, len(rewards) // 4)
    return statistics.mean(rewards[-part:]) - statistics.mean(rewards[:part])


def main() -> None:
    """Run the script in both, and print the claims."""
    options = parser("trl_script", __doc__).parse_args()
    model, seed = demo_files() / "model", random.randrange(10_000)
    steps = 2 if options.quick else 24
    ours, theirs = (run(module, model, steps, seed) for module in ("turnwise.trl", "trl"))
    mine, other = means(ours), means(theirs)
    claims = [
        Claim(f"TRL's script: {name}", "mean", [mine[name]], "TRL", [other[name]])
        for name in other
        if name in mine and name not in ("step", "epoch")
    ]
    lacking = sorted(other.keys() - mine.keys() - MISSING)
    claims.append(
        Claim(
            *("TRL's script: missing names that the documentation does not list", "names"),
            [float(len(lacking))],
            at_most=0,
            note=", ".join(lacking),
        )
    )
    if not options.quick:
        ratio = rise(ours) / max(rise(theirs), 1e-9)
        claims.append(
            Claim(
                *("TRL's script: rise of the reward", "mean", [rise(ours)], "TRL", [rise(theirs)]),
                [ratio],
                at_least=0.8,
            )
        )
    report(claims, options)


if __name__ == "__main__":
    main()
