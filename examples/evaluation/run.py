"""Evaluations between steps and in parallel with training, on two named held-out sets.

    python -m examples.evaluation.run [--build DIR] [key.sub=value ...]

Writes the model and the rows, and trains twice. For each run it prints the seconds of its steps,
the seconds that its trainer waited for evaluations, and accuracy and pass@4 of each set. Overrides
work as in `turnwise train`. The runs differ by chance, because they are not deterministic.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turnwise
from examples.calculator.demo import free_name
from examples.calculator.prepare import prepare

CONFIG = Path(__file__).parent / "config.yaml"
BUILD = Path(__file__).parent / "build"
SETS = {"two": 2, "three": 3}
"""Number of calculator calls that a problem of each set takes."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.evaluation.run", description=__doc__)
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of the model and rows")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    prepare(options.build)
    sets = write_sets(options.build)
    files = [f"data.eval_sets.{name}={path}" for name, path in sets.items()]
    files.append(f"data.path={options.build / 'train.jsonl'}")
    for background in (False, True):
        value = f"eval.background={str(background).lower()}"
        config = turnwise.load_config(CONFIG, [*files, *options.overrides, value])
        name = free_name("beside" if background else "between", Path(config.output_dir))
        result = turnwise.train(options.build / "model", config=config, name=name)
        print("\n".join([f"\n{name}", *(f"   {line}" for line in table(result.metrics))]))


def write_sets(build: Path) -> dict[str, Path]:
    """Write the held-out rows of each set to a file of its own; return the files by name."""
    lines = (build / "heldout.jsonl").read_text().splitlines()
    found = {name: build / f"{name}.jsonl" for name in SETS}
    for name, path in found.items():
        own = [line for line in lines if len(json.loads(line)["steps"]) == SETS[name]]
        path.write_text("".join(f"{line}\n" for line in own))
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each evaluation of a run, and a line with the run's seconds."""
    lines = [
        f"step {row['step']:3d}   "
        + "   ".join(
            f"{name}: accuracy {each['accuracy']:.3f} pass@4 {each['pass@4']:.3f}"
            for name, each in row["heldout_sets"].items()
        )
        for row in rows
        if row.get("heldout_sets")
    ]
    trained = [row for row in rows if row["step"]]
    total = sum(row["step_seconds"] for row in trained)
    waited = sum(row["phase_seconds"].get("evaluate", 0.0) for row in trained)
    return [
        *lines,
        f"{total:.1f} s in {len(trained)} steps, {waited:.1f} s of them for evaluations",
    ]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
