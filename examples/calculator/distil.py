"""On-policy distillation: a trained model teaches the demo's warm-started one.

    python -m examples.calculator.distil [--seed N] [--teacher FOLDER] [KEY=VALUE ...]

Trains the teacher as the demo does (GRPO), unless `--teacher` names one. Then trains the same
initial model without a reward, only by the teacher's log-probs of the model's own tokens. Prints
the number of sampled tokens after which each of the two reached the same accuracy; exits with 1 if
the second needed more than half as many as the first.
"""

import argparse
import json
import sys
from pathlib import Path

from .demo import CONFIG, RUNS, free_name, run_turnwise

TARGET = 0.9
EVERY_STEP = ("eval.every=1", "training.lr_schedule=constant")
STUDENT = (
    "algorithm.advantage=none",
    "rollout.prompts_per_step=64",
    "sampling.n=1",
    f"eval.target={TARGET}",
)
"""Keys of a run that learns from a teacher alone: one trajectory of each problem is enough."""


def main() -> int:
    """Run the example; returns its exit code."""
    from .prepare import prepare  # imports torch, which this file's importers need not

    parser = argparse.ArgumentParser(prog="examples.calculator.distil", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", type=Path, help="a run of the demo's model; default: train it")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the second run")
    options = parser.parse_args()
    prepare(seed=options.seed)
    common = ["train", str(CONFIG), f"seed={options.seed}", *EVERY_STEP]

    teacher: Path | None = options.teacher
    if teacher is None:
        teacher = RUNS / free_name(f"teacher-seed{options.seed}", RUNS)
        print("1. The teacher learns from rewards (GRPO).", flush=True)
        if code := run_turnwise([*common, f"name={teacher.name}"]):
            return code
    name = free_name(f"distil-seed{options.seed}", RUNS)
    print("\n2. The same initial model learns from the teacher alone.", flush=True)
    taught = f"algorithm.teacher={{model: {newest_model(teacher)}}}"
    if code := run_turnwise([*common, f"name={name}", *STUDENT, taught, *options.keys]):
        return code

    by_reward, by_teacher = tokens_to(TARGET, teacher), tokens_to(TARGET, RUNS / name)
    print(f"\n3. Sampled tokens of training until the held-out accuracy was {TARGET:g}:")
    for label, tokens in (("by rewards", by_reward), ("by the teacher", by_teacher)):
        print(f"   {label:<15} {'not reached' if tokens is None else f'{tokens:,}'}")
    return int(by_reward is None or by_teacher is None or 2 * by_teacher > by_reward)


def newest_model(run: Path) -> Path:
    """Return the folder of a run's last checkpoint, which is a model in Hugging Face's format."""
    return max((run / "checkpoints").glob("step-*"))


def tokens_to(accuracy: float, run: Path) -> int | None:
    """Return the tokens that a run sampled in training until an evaluation had this accuracy; None
    if none had."""
    sampled = 0
    for line in (run / "metrics.jsonl").open():
        step = json.loads(line)
        sampled += step.get("sampled_tokens") or 0
        if (step["accuracy_heldout"] or 0.0) >= accuracy:
            return sampled
    return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
