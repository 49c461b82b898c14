"""A step of GRPO with tools against TRL's: `python -m benchmarks.grpo_step [--quick]`.

The demo's model, tool, problems and reward; 16 prompts of 8 rollouts a step, one optimizer step of
the same learning rate and loss (token mean, clipped 0.2 and 0.28, no KL); two threads. Turnwise is
`turnwise train`, TRL its `GRPOTrainer` with `tools=` (generation by Transformers: its vLLM mode
needs a GPU). Either has the machine to itself while it runs; the first step of each run warms up
and is not counted. TRL's step with the slow tool takes a minute: it is one, the last of its run.

The tool answers at once; or it has a long tail: 80 % of the calls take 10 ms, 15 % 200 ms, 5 % 2 s.
There Turnwise runs one step ahead (training.max_staleness 1), where a tool at once leaves it
nothing to win. Rewards are compared with the tool that answers at once, over as many steps of both:
means of all but the first, which neither has learned from.
"""

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from benchmarks.models import demo_files, pause
from benchmarks.report import Claim, parser, report
from examples.calculator.environment import Calculator
from examples.calculator.tool import calculate as calculate_at_once

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "calculator"
PROMPTS, GROUP = 16, 8
MAX_TOKENS, MAX_TURNS = 64, 6
SEQUENCE = 256
"""Tokens of a whole rollout for TRL, which has no bound of a single turn."""
LEARNING_RATE = 0.0003


class SlowCalculator(Calculator):
    """The demo's environment with a tool that takes its time."""

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


def turnwise(
    build: Path, tools: str, prompts: int, steps: int, seed: int
) -> dict[str, list[float]]:
    """A step's seconds and rewards, of a short run."""
    name = f"bench-{tools}-{seed}"
    folder = ROOT / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    changes = {
        "name": name,
        "seed": seed,
        "output_dir": ROOT / "runs",
        "model.path": build / "model",
        "data.path": build / "train.jsonl",
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
    }
    if tools != "instant":
        changes["environment"] = "benchmarks.grpo_step:SlowCalculator"
        changes["training.max_staleness"] = 1
    command = [Path(sys.executable).with_name("turnwise"), "train", EXAMPLE / "config.yaml"]
    run([*command, *(f"{key}={value}" for key, value in changes.items())])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    exact = json.loads((folder / "exactness.json").read_text())
    assert exact["violations"] == 0, exact
    shutil.rmtree(folder)
    rows = [row for row in rows if row["step"]]
    return {
        "seconds": [row["step_seconds"] for row in rows],
        "rewards": [row["reward_mean"] for row in rows],
    }


def trl(
    build: Path, prompts: int, steps: int, long_tailed: int, seed: int
) -> dict[str, list[float]]:
    """The same of TRL's trainer: steps with the tool that answers at once, then with the other."""
    command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", "--build", build]
    command += ["--prompts", prompts, "--seed", seed]
    told = run([*command, "--steps", steps, "--long-tailed-steps", long_tailed])
    answer: dict[str, list[float]] = json.loads(told.splitlines()[-1])
    return answer


def run(command: list[Any]) -> str:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))} failed: {done.stderr[-2000:]}")
    return done.stdout


def step_claim(
    tools: str, prompts: int, ours: list[float], theirs: list[float], goal: float
) -> Claim:
    """A step's seconds."""
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


def main() -> None:
    """Prints the claims."""
    options = parser("grpo_step", __doc__).parse_args()
    build, seed = demo_files(options.quick), random.randrange(10_000)
    prompts, steps, tailed = (2, 2, 0) if options.quick else (PROMPTS, 3, 1)
    ours = turnwise(build, "instant", prompts, steps, seed)
    theirs = trl(build, prompts, steps, tailed, seed)
    rewards = [statistics.mean(of_run["rewards"][1:steps]) for of_run in (ours, theirs)]
    claims = [
        step_claim("instant", prompts, ours["seconds"][1:], theirs["seconds"][1:steps], 2.0),
        Claim(
            "reward at equal samples, instant tools",
            f"mean of steps 2–{steps}",
            rewards[:1],
            "TRL",
            rewards[1:],
            [rewards[0] / max(1e-9, rewards[1])],
            at_least=1.0,
        ),
    ]
    if tailed:
        slow = turnwise(build, "long-tailed", prompts, 5, seed)
        claims.append(
            step_claim("long-tailed", prompts, slow["seconds"][1:], theirs["seconds"][steps:], 4.0)
        )
    report(claims, options)


if __name__ == "__main__":
    main()
