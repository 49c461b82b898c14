"""Time in which the demo's model learns: `python -m benchmarks.learning [--quick]`; and with
`--corrections [NAME ...]`, its accuracy if rollouts run ahead, for each correction.

The demo's model, problems and configuration, with a tool whose calls take 10 ms, 200 ms (15 %) or
2 s (5 %). Rollouts wait for the trainer (in step), or run up to 1 or 4 steps ahead of it. Each
round has a seed, and problems, of its own.

A step is 256 trajectories and two optimizer steps, each on one half of them; the engines get the
weights after the second optimizer step.

A run has learned once the mean reward of a step's 256 trajectories reaches 0.9. The step's problems
are new to the model, and sampled at temperature 1. The time is the sum of all steps until then,
without start and evaluation. Held-out accuracy is measured after the last step.

TRL's `GRPOTrainer` gets the same model, problems, samples per step and loss, with the same tool. It
is stopped after 4.5 times the time of Turnwise in step, which is enough to decide the goal; TRL's
time is then at least that long. One TRL step takes minutes, because its tools are called one after
the other.

With `--corrections`, each of `CORRECTIONS`, or each named correction, trains 2 and 4 steps ahead
(`--ahead`). It is compared with runs in step that have the same seeds; TRL does not run.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Claim, digits, parser, quotients, report
from examples.calculator.prepare import prepare

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "calculator" / "config.yaml"
AHEAD = (0, 1, 4)
"""Values of training.max_staleness that are compared."""
TARGET = 0.9
PROMPTS, UPDATES = 32, 2
"""Groups and optimizer steps of a step, as the demo has them."""
PATIENCE = 4.5
"""Multiple of Turnwise's time after which TRL is stopped."""
DEADLINE = 900.0
AHEAD_CORRECTED = (2, 4)
KEPT = 0.97
"""Goal for the accuracy ahead with the best correction, as a share of the accuracy in step."""
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{
        name: (f"algorithm.correction.name={name}",)
        for name in (
            *("token_tis", "sequence_tis", "geometric_tis", "mask", "icepop", "sequence_mask"),
        )
    },
    # Stale tokens' geometric mean leaves the default bounds, meant for the engine's rounding.
    "geometric_mask": ("algorithm.correction={name: geometric_mask, low: 0.9, high: 1.1}",),
    "dppo_tv": ("algorithm.loss={name: dppo, divergence: tv}",),
    "dppo_kl": ("algorithm.loss={name: dppo, divergence: kl}",),
    "dppo_tv_token_tis": (
        "algorithm.loss={name: dppo, divergence: tv}",
        "algorithm.correction.name=token_tis",
    ),
}
"""Keys of the configuration of each correction."""


@dataclass
class Run:
    """One training run."""

    seconds: list[float]
    """Seconds of each step."""
    rewards: list[float]
    """Mean reward of each step's trajectories."""
    accuracy: float = math.nan
    """Accuracy on held-out problems after the last step."""

    @property
    def learned(self) -> float:
        """Seconds until a step's mean reward reaches the target; infinite if none does."""
        spent = 0.0
        for seconds, reward in zip(self.seconds, self.rewards, strict=True):
            spent += seconds
            if reward >= TARGET:
                return spent
        return math.inf


def turnwise(
    data: Path,
    output: Path,
    seed: int,
    steps: int,
    ahead: int,
    correction: str = "none",
) -> Run:
    """Train for a number of steps, up to `ahead` steps ahead, with one of `CORRECTIONS`."""
    name = f"seed{seed}-ahead{ahead}-{correction}"
    command = [
        *(sys.executable, "-m", "turnwise.cli", "train", str(CONFIG), f"seed={seed}"),
        *(f"model.path={data / 'model'}", f"data.path={data / 'train.jsonl'}"),
        *(f"data.eval_path={data / 'heldout.jsonl'}", f"output_dir={output}", f"name={name}"),
        *(f"training.steps={steps}", f"training.max_staleness={ahead}"),
        *(f"rollout.prompts_per_step={PROMPTS}", f"training.updates_per_step={UPDATES}"),
        *("environment=benchmarks.grpo_step:SlowCalculator", "training.lr_schedule=constant"),
        *(f"eval.every={steps}", "eval.target=null"),
        *CORRECTIONS[correction],
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    lines = (output / name / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines][1:]
    seconds = [r["step_seconds"] - r["phase_seconds"].get("evaluate", 0.0) for r in rows]
    rewards = [r["reward_mean"] for r in rows]
    run = Run(seconds, rewards, rows[-1]["accuracy_heldout"])
    phases = (
        f"{phase} {digits(sum(r['phase_seconds'].get(phase, 0.0) for r in rows) / steps)}"
        for phase in ("idle", "train", "weights", "write")
    )
    stale = sum(r["stale_tokens"] for r in rows) / sum(r["sampled_tokens"] for r in rows)
    outside = [
        digits(max(values))
        for side in ("correction_below", "correction_above", "clip_fraction")
        if (values := [row[side] for row in rows if row.get(side) is not None])
    ]
    print(f"{name}: {digits(run.learned)} s, accuracy {run.accuracy:g}; largest shares below, "
          "above and clipped", *outside, "; seconds of a step", digits(sum(seconds) / steps),
          "of which", *phases, "; tokens too old", digits(stale), "; rewards",
          *map(digits, run.rewards), flush=True)  # fmt: skip
    return run


def trl(data: Path, limit: float, seed: int, prompts: int) -> Run:
    """Train with TRL until the target is reached or the time is over.

    The time of an unfinished step also counts, with a reward of 0.

    Raises:
        RuntimeError: when TRL ends by itself before.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.peers.trl_grpo", "--model", str(data / "model")),
        *("--problems", str(data / "train.jsonl"), "--prompts", str(prompts), "--steps", "0"),
        *("--long-tailed-steps", "40", "--micro-batch", "64", "--seed", str(seed)),
    ]
    run = Run([], [])
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            started = 0.0
            timer = threading.Timer(limit, process.kill)
            for line in process.stdout:
                if line.startswith("training"):
                    started = time.perf_counter()
                    timer.start()
                elif line.startswith("step "):
                    _, seconds, reward = line.split()
                    run.seconds.append(float(seconds))
                    run.rewards.append(float(reward))
                    if run.rewards[-1] >= TARGET:
                        break
            in_time = time.perf_counter() < started + limit
            timer.cancel()
            process.kill()
        if not started or (in_time and run.learned == math.inf):
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read()[-2000:]}")
    if run.learned == math.inf:
        run.seconds.append(max(0.0, time.perf_counter() - started - sum(run.seconds)))
        run.rewards.append(0.0)
    return run


def claims_of(runs: dict[int, list[Run]], steps: int, other: Run | None) -> list[Claim]:
    """Return the claims about all rounds of Turnwise, and about TRL's run of the first round."""
    tools = "long-tailed tools"
    in_step = [run.learned for run in runs[0]]
    claims = []
    for ahead, made in runs.items():
        if not ahead:
            continue
        steps_ahead = f"{ahead} step{'s' if ahead > 1 else ''} ahead"
        learned, accuracy = [run.learned for run in made], [run.accuracy for run in made]
        reference = [run.accuracy for run in runs[0]]
        claims += [
            Claim(
                f"time to a reward of {TARGET:g}, {tools}, {steps_ahead}", "s", learned,
                "in step", in_step, quotients(learned, in_step), at_most=0.75,
            ),
            Claim(
                f"held-out accuracy after {steps} steps, {steps_ahead}", "", accuracy,
                "in step", reference, quotients(accuracy, reference), at_least=0.95,
            ),
        ]  # fmt: skip
    if other is not None:
        theirs, ended = sum(other.seconds), other.learned < math.inf
        rewards = ", ".join(map(digits, other.rewards[: None if ended else -1])) or "no step ended"
        note = f"TRL's rewards: {rewards}" + ("" if ended else "; it was stopped, so at most this")
        best = [min(made[0].learned for made in runs.values())]
        claims.append(
            Claim(
                f"time to a reward of {TARGET:g}, {tools}", "s", best,
                "TRL", [theirs], quotients(best, [theirs]), at_most=0.25, note=note,
            )
        )  # fmt: skip
    return claims


def run(rounds: int, steps: int, compared: Sequence[int], quick: bool, folder: Path) -> list[Claim]:
    runs: dict[int, list[Run]] = {ahead: [] for ahead in compared}
    other = None
    for seed in range(rounds):
        prepare(folder, seed=seed)
        for ahead, into in runs.items():
            into.append(turnwise(folder, folder / "runs", seed, steps, ahead))
        if seed == 0 and not quick:
            first = runs[0][0]
            other = trl(folder, PATIENCE * min(first.learned, sum(first.seconds)), seed, PROMPTS)
    return claims_of(runs, steps, other)


def run_corrected(
    rounds: int, steps: int, compared: Sequence[int], names: Sequence[str], folder: Path
) -> list[Claim]:
    """Return claims about each correction, ahead of the trainer, against the runs in step."""
    in_step: list[float] = []
    found: dict[tuple[int, str], list[float]] = {}
    for seed in range(rounds):
        prepare(folder, seed=seed)
        in_step.append(turnwise(folder, folder / "runs", seed, steps, 0).accuracy)
        for ahead in compared:
            for name in names:
                made = turnwise(folder, folder / "runs", seed, steps, ahead, name)
                found.setdefault((ahead, name), []).append(made.accuracy)
    claims = [
        Claim(
            f"held-out accuracy after {steps} steps, {ahead} ahead, {name}", "", accuracy,
            "in step", in_step, quotients(accuracy, in_step),
        )
        for (ahead, name), accuracy in found.items()
    ]  # fmt: skip
    for ahead in compared:
        of_this = [claim for claim in claims if f" {ahead} ahead" in claim.name]
        corrected = (claim for claim in of_this if not claim.name.endswith("none"))
        if best := max(corrected, key=lambda claim: claim.judged, default=None):
            best.at_least = KEPT
    return claims


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("learning", __doc__)
    made.add_argument("--rounds", type=int, default=3, help="rounds of a full run")
    made.add_argument("--corrections", nargs="*", choices=CORRECTIONS, help="compare these, or all")
    made.add_argument("--ahead", nargs="+", type=int, default=AHEAD_CORRECTED, help="steps ahead")
    options = made.parse_args()
    rounds, steps, compared = (1, 2, (0, 1)) if options.quick else (options.rounds, 16, AHEAD)
    with tempfile.TemporaryDirectory() as folder:
        if options.corrections is None:
            claims = run(rounds, steps, compared, options.quick, Path(folder))
        else:
            names = options.corrections or [*CORRECTIONS]
            claims = run_corrected(rounds, steps, options.ahead, names, Path(folder))
        report(claims, options)


if __name__ == "__main__":
    main()
