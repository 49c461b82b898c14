"""GSM8K end to end: a warm start if there is no model yet, `turnwise train`, and the results.

    python -m examples.gsm8k.run FOLDER [key.sub=value ...]

FOLDER holds `train.jsonl` and `test.jsonl`. Overrides work as in `turnwise train`;
with `model.path=Qwen/Qwen3-0.6B` there is no warm start.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.calculator.demo import free_name

from .warm_start import BUILD

CONFIG = Path(__file__).parent / "config.yaml"
RUNS = Path("runs")


def main() -> int:
    """Run the command line; returns the exit code of the training."""
    parser = argparse.ArgumentParser(prog="examples.gsm8k.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="with train.jsonl and test.jsonl")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    train, test = options.folder / "train.jsonl", options.folder / "test.jsonl"
    for path in (train, test):
        if not path.is_file():
            print(f"there is no {path}; give the folder of GSM8K's train.jsonl and test.jsonl")
            return 2
    given = {override.partition("=")[0] for override in options.overrides}
    if "model.path" not in given and not (BUILD / "model" / "config.json").exists():
        command = [sys.executable, "-m", "examples.gsm8k.warm_start", str(train)]
        if code := subprocess.call(command):
            return code
    name = free_name("gsm8k", RUNS)
    command = [
        *(str(Path(sys.executable).with_name("turnwise")), "train", str(CONFIG)),
        *(f"data.path={train}", f"data.eval_path={test}", f"name={name}", *options.overrides),
    ]
    if code := subprocess.call(command):
        return code
    print(summary(RUNS / name, "test rows"))
    return 0


def summary(run: Path, rows: str) -> str:
    """Return a run's accuracy on held-out `rows` before and after, and its lost trajectories."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    measured = [s["accuracy_heldout"] for s in steps if s["accuracy_heldout"] is not None]
    trained = [s for s in steps if s["step"]]
    lost = sum(sum(s["dropped"].values()) for s in trained)
    return (
        f"accuracy on {rows} before {measured[0]:.3f}, after {measured[-1]:.3f}; "
        f"{len(trained)} steps, {sum(s['trajectories'] for s in trained):,} trajectories, "
        f"{lost} lost; {min(s['exact_percent'] for s in trained):g} % of the tokens exact"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
