"""The example from nothing to its result: the model, `turnwise train`, and the accuracy.

python -m examples.retool.run [key.sub=value ...]
"""

import json
import subprocess
import sys
from pathlib import Path

from examples.calculator.demo import free_name

from .prepare import BUILD

CONFIG = Path(__file__).parent / "config.yaml"
RUNS = Path("runs")


def main() -> int:
    """Run the command line; returns the exit code of the training."""
    prepare = [sys.executable, "-m", "examples.retool.prepare"]
    ready = (BUILD / "model" / "config.json").exists()
    if not ready and (code := subprocess.call(prepare)):
        return code
    name = free_name("retool", RUNS)
    turnwise = str(Path(sys.executable).with_name("turnwise"))
    command = [turnwise, "train", str(CONFIG), f"name={name}", *sys.argv[1:]]
    if code := subprocess.call(command):
        return code
    steps = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").open()]
    measured = [s["accuracy_heldout"] for s in steps if s["accuracy_heldout"] is not None]
    trained = [s for s in steps if s["step"]]
    lost = sum(sum(s["dropped"].values()) for s in trained)
    print(
        f"accuracy on held-out rows before {measured[0]:.3f}, after {measured[-1]:.3f}; "
        f"{len(trained)} steps, {sum(s['trajectories'] for s in trained):,} trajectories, "
        f"{lost} lost; {min(s['exact_percent'] for s in trained):g} % of the tokens exact"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
