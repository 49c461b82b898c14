"""Short runs of every algorithm on the demo's problems: does the reward rise?

    python -m examples.calculator.algorithms [--steps N] [--only NAME ...]

Builds the demo's model if it is missing, runs `turnwise train` for each algorithm, and prints the
mean reward on the same held-out problems before and after, sampled as in training. Exits with 1 if
the reward did not rise in every run.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .demo import CONFIG
from .prepare import BUILD
from .prepare import main as prepare

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm.reduction=sequence_mean", "algorithm.kl={coef: 0.001, estimator: k3}"),
    "dr_grpo": (
        "algorithm.advantage.name=dr_grpo",
        "algorithm.reduction=constant",
        "training.updates_per_step=2",
    ),
    "rloo": (
        "algorithm.advantage.name=rloo",
        "algorithm.correction.name=token_tis",
        "training.max_staleness=1",
        "training.updates_per_step=2",
    ),
    "reinforce_pp": (
        "algorithm.advantage={name: reinforce_pp, baseline: none}",
        "algorithm.kl={coef: 0.001, estimator: k1, where: reward}",
    ),
    "ppo": (
        "algorithm.advantage={name: gae, learning_rate: 0.001, warmup_steps: 1}",
        "algorithm.loss.dual_clip=3",
        "training.updates_per_step=2",
    ),
    "gspo": (
        "algorithm.loss={name: gspo, clip_low: 0.02, clip_high: 0.03}",
        "algorithm.reduction=sequence_mean",
        "algorithm.correction.name=sequence_tis",
    ),
    "cispo": (  # smaller steps, because nothing stops a token from becoming ever less likely
        "algorithm.loss.name=cispo",
        "algorithm.correction.name=mask",
        "training.updates_per_step=2",
        "training.learning_rate=0.00015",
    ),
    "dapo": ("algorithm.dynamic_sampling=true", "algorithm.overlong_tokens=64"),
    "luspo": (
        "algorithm.loss={name: gspo, clip_low: 0.02, clip_high: 0.03}",
        "algorithm.reduction=sequence_sum",
    ),
    "sapo": (
        "algorithm.advantage={name: grpo, scale: batch}",
        "algorithm.loss.name=sapo",
        "algorithm.reduction=sequence_mean",
        "algorithm.entropy.coef=0.001",
    ),
    "vespo": (
        "algorithm.loss.name=vespo",
        "algorithm.off_policy_mask_threshold=0.5",
        "training.updates_per_step=2",
        "training.epochs_per_step=2",
    ),
    "dppo": ("algorithm.loss.name=dppo", "training.max_staleness=2"),
    "icepop": ("algorithm.correction.name=icepop", "training.max_staleness=2"),
    "geometric_mask": (
        "algorithm.correction={name: geometric_mask, low: 0.9, high: 1.1}",
        "training.max_staleness=2",
    ),
    "muon": ("training.optimizer=muon", "training.lr_schedule=cosine", "training.warmup_steps=4"),
    "gdpo": ("algorithm.advantage.name=gdpo", "algorithm.entropy.top_quantile=0.5"),
    "dpo": (  # smaller steps for the same reason, in both trajectories of a pair
        "algorithm.loss={name: dpo, beta: 0.3}",
        "algorithm.kl={coef: 0.01, estimator: k2}",
        "training.updates_per_step=2",
        "training.learning_rate=0.00005",
    ),
}
"""Runs that together cover every advantage, loss, reduction, KL estimator and optimizer of torch's,
and each kind of correction."""
COMMON = (
    "training.updates_per_step=4",
    "training.lr_schedule=constant",
    "eval.every=1000",  # only before the first step and after the last
    "eval.target=null",
    "eval.sampling={n: 4, temperature: 1, max_tokens: 64}",
)
RUNS = Path("runs") / "algorithms"


def main() -> int:
    """Run the command line; returns 0 if the reward rose in every run."""
    parser = argparse.ArgumentParser(prog="examples.calculator.algorithms", description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", nargs="*", choices=ALGORITHMS, default=[*ALGORITHMS])
    options = parser.parse_args()
    if not (BUILD / "model").exists():
        prepare([])
    fell = []
    print(f"{'algorithm':14} {'reward before':>14} {'after':>7} {'rise':>7} {'seconds':>8}")
    for name in options.only:
        started = time.monotonic()
        first, last = run(name, options.steps)
        seconds = time.monotonic() - started
        print(
            f"{name:14} {first:14.3f} {last:7.3f} {last - first:+7.3f} {seconds:8.0f}", flush=True
        )
        if last <= first:
            fell.append(name)
    if fell:
        print(f"the reward did not rise: {', '.join(fell)}")
    return 1 if fell else 0


def run(name: str, steps: int) -> tuple[float, float]:
    """Train; returns the mean rewards before the first step and after the last."""
    shutil.rmtree(RUNS / name, ignore_errors=True)
    turnwise = str(Path(sys.executable).with_name("turnwise"))
    command = [turnwise, "train", str(CONFIG), *COMMON]
    command += [*ALGORITHMS[name], f"training.steps={steps}", f"output_dir={RUNS}", f"name={name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").open()]
    return rows[0]["accuracy_heldout"], rows[-1]["accuracy_heldout"]


if __name__ == "__main__":
    sys.exit(main())
