"""Learning with rollouts ahead against learning in step: `python -m benchmarks.learning [--quick]`.

The demo's model and problems, the same number of training steps, the same seed in each round:
held-out accuracy at the end, and the run's seconds from its first step on, with rollouts up to two
steps ahead of the trainer and with rollouts that wait for it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Claim, parser, quotients, report
from examples.calculator.prepare import prepare

CONFIG = Path("examples/calculator/config.yaml")
AHEAD = 2
DEADLINE = 300.0


def train(data: Path, output: Path, seed: int, steps: int, ahead: int) -> tuple[float, float]:
    """Run once; returns the last accuracy on held-out problems, and the seconds of all steps."""
    name = f"seed{seed}-ahead{ahead}"
    command = [
        *(sys.executable, "-m", "turnwise.cli", "train", str(CONFIG), f"seed={seed}"),
        *(f"model.path={data / 'model'}", f"data.path={data / 'train.jsonl'}"),
        *(f"data.eval_path={data / 'heldout.jsonl'}", f"output_dir={output}", f"name={name}"),
        *(f"training.steps={steps}", f"training.max_staleness={ahead}"),
        *(f"eval.every={steps}", "eval.target=null"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    lines = (output / name / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return rows[-1]["accuracy_heldout"], sum(r["step_seconds"] for r in rows if r["step"])


def run(rounds: int, steps: int, folder: Path) -> list[Claim]:
    measured: dict[int, list[tuple[float, float]]] = {AHEAD: [], 0: []}
    for seed in range(rounds):
        prepare(folder, seed=seed)
        for ahead, into in measured.items():
            into.append(train(folder, folder / "runs", seed, steps, ahead))
    accuracy, seconds = (
        ([one[i] for one in measured[AHEAD]], [one[i] for one in measured[0]]) for i in range(2)
    )
    return [
        Claim(
            f"held-out accuracy after {steps} steps, {AHEAD} steps ahead", "", accuracy[0],
            "in step", accuracy[1], quotients(*accuracy), at_least=0.95,
        ),
        Claim(
            f"time for {steps} steps, {AHEAD} steps ahead", "s", seconds[0],
            "in step", seconds[1], quotients(*seconds), at_most=1.05,
        ),
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("learning", __doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(run(*((1, 2) if options.quick else (2, 12)), Path(folder)), options)


if __name__ == "__main__":
    main()
