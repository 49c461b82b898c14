"""A step of GRPO with tools against TRL's: `python -m benchmarks.grpo_step [--quick]`.

The demo's model, tool, problems and reward; 8 prompts of 8 rollouts a step, one optimizer step of
the same learning rate and loss (token mean, clipped 0.2 and 0.28, no KL); two threads. Turnwise is
`turnwise train`, TRL its `GRPOTrainer` with `tools=` (generation by Transformers: its vLLM mode
needs a GPU). They run one at a time; the first step of each run warms up and is not counted.
TRL's step with the slow tool takes a minute, so it has only one, the last of its run.

The tool answers at once, or has a long tail: 80 % of the calls take 10 ms, 15 % 200 ms, 5 % 2 s.
With the long tail Turnwise runs one step ahead (training.max_staleness 1); with the fast tool that
would gain nothing.

Rewards are compared with the tool that answers at once: both train on the same problems in as many
steps, each problem once. A problem's mean reward is one value, the ratio is that of the means over
all problems, and its standard error comes from the differences problem by problem. With so
few samples, the goal is that Turnwise is not worse by more than two of these errors.
"""

import asyncio
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.models import demo_files, pause
from benchmarks.report import Claim, digits, parser, report
from examples.calculator.environment import Calculator
from examples.calculator.tool import calculate as calculate_at_once
from turnwise.trajectory import read_jsonl

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "calculator"
PROMPTS, GROUP = 8, 8
MAX_TOKENS, MAX_TURNS = 64, 6
SEQUENCE = 256
"""Most tokens of a whole rollout for TRL, which has no limit for a single turn."""
LEARNING_RATE = 0.0003


class SlowCalculator(Calculator):
    """The demo's environment with a slow tool."""

    tools: list[Any]

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.tools = [self.calculate]

    async def calculate(self, a: int, operation: Literal["+", "-", "*"], b: int) -> int:
        """Calculates a + b, a - b or a * b.

        Args:
            a: The first number.
            operation: The operation.
            b: The second number.
        """
        await asyncio.sleep(pause("long-tailed"))
        return calculate_at_once(a, operation, b)


@dataclass
class Run:
    """Seconds by step of a short run, and mean reward by question."""

    seconds: list[float]
    rewards: dict[str, float]


def turnwise(build: Path, problems: Path, tools: str, prompts: int, steps: int, seed: int) -> Run:
    """Run `turnwise train`, in a folder that is removed afterwards."""
    name = f"bench-{tools}-{seed}"
    folder = ROOT / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    changes = {
        "name": name,
        "seed": seed,
        "output_dir": ROOT / "runs",
        "model.path": build / "model",
        "data.path": problems,
        "data.eval_path": build / "heldout.jsonl",
        "rollout.prompts_per_step": prompts,
        "rollout.max_turns": MAX_TURNS,
        "sampling.n": GROUP,
        "sampling.max_tokens": MAX_TOKENS,
        "training.steps": steps,
        "training.updates_per_step": 1,
        "training.learning_rate": LEARNING_RATE,
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "eval.every": 0,
        "eval.target": "null",
    }
    if tools != "instant":
        changes["environment"] = "benchmarks.grpo_step:SlowCalculator"
        changes["training.max_staleness"] = 1
    command = [Path(sys.executable).with_name("turnwise"), "train", EXAMPLE / "config.yaml"]
    run([*command, *(f"{key}={value}" for key, value in changes.items())])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    exact = json.loads((folder / "exactness.json").read_text())
    assert exact["violations"] == 0, exact
    rewards = defaultdict[str, list[float]](list)
    for path in folder.glob("trajectories/step-*.jsonl"):
        for trajectory in read_jsonl(path):
            assert trajectory.reward is not None
            rewards[trajectory.messages[0]["content"]].append(trajectory.reward)
    shutil.rmtree(folder)
    seconds = [row["step_seconds"] for row in rows if row["step"]]
    return Run(seconds, {question: statistics.mean(r) for question, r in rewards.items()})


def trl(build: Path, problems: Path, prompts: int, steps: int, long_tailed: int, seed: int) -> Run:
    """Run TRL's trainer: steps with the fast tool, then with the slow one.

    Rewards are those of all steps.
    """
    command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", "--model", build / "model"]
    command += ["--problems", problems, "--prompts", prompts, "--seed", seed]
    printed = run([*command, "--steps", steps, "--long-tailed-steps", long_tailed])
    printed_run = json.loads(printed.splitlines()[-1])
    return Run(printed_run["seconds"], printed_run["rewards"])


def run(command: list[Any]) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))} failed: {done.stderr[-2000:]}")
    return done.stdout


def step_claim(
    tools: str, prompts: int, ours: list[float], theirs: list[float], goal: float
) -> Claim:
    """Return the claims about a step's seconds."""
    return Claim(
        f"GRPO step of {prompts * GROUP}, {tools} tools",
        "s",
        ours,
        "TRL",
        theirs,
        [statistics.median(theirs) / statistics.median(ours)],
        "times faster",
        at_least=goal,
    )


def reward_claim(ours: dict[str, float], theirs: dict[str, float]) -> Claim:
    """Return the claims about the rewards of the problems that both trained on."""
    pairs = [(reward, theirs[question]) for question, reward in ours.items()]
    mine, other = (statistics.mean(side) for side in zip(*pairs, strict=True))
    base = max(other, 1e-9)
    differences = [a - b for a, b in pairs]
    error = statistics.stdev(differences) / math.sqrt(len(pairs)) / base
    return Claim(
        f"reward at equal samples, instant tools ({len(pairs)} problems, {GROUP} rollouts each)",
        "mean",
        [mine],
        "TRL",
        [other],
        [mine / base],
        at_least=round(1.0 - 2.0 * error, 3),
        note=f"the goal is 1 less two standard errors of the ratio, {digits(error)} each",
    )


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("grpo_step", __doc__).parse_args()
    build, seed = demo_files(), random.randrange(10_000)
    prompts, steps, tailed = (2, 2, 0) if options.quick else (PROMPTS, 3, 1)
    rows = (build / "train.jsonl").read_text().splitlines()
    unique = {json.loads(row)["question"]: row for row in random.sample(rows, len(rows))}
    fresh = list(unique.values())[: (steps + tailed) * prompts]
    with tempfile.TemporaryDirectory() as folder:
        problems, first = Path(folder) / "all.jsonl", Path(folder) / "first.jsonl"
        problems.write_text("".join(f"{row}\n" for row in fresh))
        first.write_text("".join(f"{row}\n" for row in fresh[: steps * prompts]))
        ours = turnwise(build, first, "instant", prompts, steps, seed)
        theirs = trl(build, problems, prompts, steps, tailed, seed)
        claims = [
            step_claim("instant", prompts, ours.seconds[1:], theirs.seconds[1:steps], 2.0),
            reward_claim(ours.rewards, theirs.rewards),
        ]
        if tailed:
            slow = turnwise(build, build / "train.jsonl", "long-tailed", prompts, 5, seed)
            claims.append(
                step_claim("long-tailed", prompts, slow.seconds[1:], theirs.seconds[steps:], 4.0)
            )
    report(claims, options)


if __name__ == "__main__":
    main()
