"""The example from nothing to its result: the model, `turnwise train`, and the accuracy.

python -m examples.retool.run [key.sub=value ...]
"""

import subprocess
import sys
from pathlib import Path

from examples.calculator.demo import free_name
from examples.gsm8k.run import summary

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
    print(summary(RUNS / name, "held-out rows"))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
