"""A step of GRPO with tools against TRL's: `python -m benchmarks.grpo_step [--quick]`.

The demo's model, tool, problems and reward; 8 prompts of 8 rollouts a step, one optimizer step of
the same learning rate and loss (token mean, clipped 0.2 and 0.28, no KL); turns of at most 64
tokens; two threads. Turnwise is `turnwise train`, TRL its `GRPOTrainer` with `tools=` (generation
by Transformers: its vLLM mode needs a GPU). They run one at a time; the first step of each run
warms up and is not counted. TRL's step with the slow tool takes a minute, so it has only one, the
last of its run. `benchmarks.real` compares a step of a larger model in the same way.

The tool answers at once, or has a long tail: 80 % of the calls take 10 ms, 15 % 200 ms, 5 % 2 s.
With the long tail Turnwise runs one step ahead (training.max_staleness 1); with the fast tool that
would gain nothing.

Rewards are compared with the tool that answers at once: both train on the same problems in as many
steps, each problem once. Each problem gives one value, its mean reward. The ratio compares the
means over all problems, and its standard error comes from the differences problem by problem. With
so few samples, the goal is that Turnwise is not worse by more than two standard errors.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
"""Maximum tokens of a whole rollout for TRL, after its prompt."""
LEARNING_RATE = 0.0003
PHASES = {"idle": "rollouts", "train": "training", "weights": "weights"}
"""Phases that a step of Turnwise waits for, by their names in the metrics."""
DEADLINE = 1200.0
"""Deadline of one run, in seconds."""


class Size(NamedTuple):
    """Size of a run: the prompts of a step, the steps, and the seed."""

    prompts: int
    steps: int
    seed: int


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
    """A short run: seconds by step, mean reward by question, and mean length of the rollouts."""

    seconds: list[float]
    rewards: dict[str, float]
    tokens: float
    """Mean number of a rollout's tokens after its prompt."""
    phases: dict[str, float] = field(default_factory=dict)
    """Median seconds of each phase that Turnwise's steps wait for, without the first step."""

    def note(self, other: "Run") -> str:
        """Return the parts of a step's time, and the tokens and rewards of both sides."""
        rest = statistics.median(self.seconds[1:]) - sum(self.phases.values())
        parts = {**self.phases, "the rest": rest}
        tokens, theirs = digits(self.tokens), digits(other.tokens)
        rewards = [statistics.mean(run.rewards.values()) for run in (self, other)]
        return (
            ", ".join(f"{name} {digits(seconds)} s" for name, seconds in parts.items())
            + f"; {tokens} tokens of a rollout against {theirs}; rewards {digits(rewards[0])} "
            f"against {digits(rewards[1])}"
        )


def turnwise(config: Path, name: str, problems: Path, size: Size, **more: object) -> Run:
    """Run `turnwise train`, in a folder that is removed afterwards.

    Args:
        problems: File of the problems, in any order.
        more: Further keys of the configuration, with two underscores for a dot.
    """
    folder = ROOT / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    changes = {
        "name": name,
        "output_dir": ROOT / "runs",
        "seed": size.seed,
        "data.path": problems,
        "rollout.prompts_per_step": size.prompts,
        "sampling.n": GROUP,
        "training.steps": size.steps,
        "training.updates_per_step": 1,
        "training.warmup_steps": 0,
        "training.lr_schedule": "constant",
        "eval.every": 0,
        "eval.target": "null",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    command = [Path(sys.executable).with_name("turnwise"), "train", config]
    run([*command, *(f"{key}={value}" for key, value in changes.items())])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    rows = [row for row in rows if row["step"]]
    exact = json.loads((folder / "exactness.json").read_text())
    assert exact["violations"] == 0, exact
    rewards, tokens = defaultdict[str, list[float]](list), list[int]()
    for path in folder.glob("trajectories/step-*.jsonl"):
        for trajectory in read_jsonl(path):
            assert trajectory.reward is not None
            asked = trajectory.prompt_token_ids(0)
            tokens += [len(each.token_ids) - len(asked) for each in trajectory.samples()]
            users = [each for each in trajectory.messages if each["role"] == "user"]
            rewards[users[-1]["content"]].append(trajectory.reward)
    shutil.rmtree(folder)
    phases = {
        said: statistics.median(row["phase_seconds"].get(phase, 0.0) for row in rows[1:])
        for phase, said in PHASES.items()
    }
    return Run(
        [row["step_seconds"] for row in rows],
        {question: statistics.mean(each) for question, each in rewards.items()},
        statistics.mean(tokens),
        phases,
    )


def demo(build: Path, tools: str, problems: Path, size: Size) -> Run:
    """Train the demo's model with one kind of tools."""
    slow = {"environment": "benchmarks.grpo_step:SlowCalculator", "training__max_staleness": 1}
    return turnwise(
        EXAMPLE / "config.yaml",
        f"bench-{tools}-{size.seed}",
        problems,
        size,
        model__path=build / "model",
        data__eval_path=build / "heldout.jsonl",
        rollout__max_turns=MAX_TURNS,
        sampling__max_tokens=MAX_TOKENS,
        training__learning_rate=LEARNING_RATE,
        **({} if tools == "instant" else slow),
    )


def trl(model: Path, problems: Path, size: Size, *more: object) -> Run:
    """Run TRL's trainer on problems in their order; `more` are further options of
    `benchmarks.peers.trl_grpo`."""
    command = [sys.executable, "-m", "benchmarks.peers.trl_grpo", "--model", model]
    command += ["--problems", problems, "--prompts", size.prompts, "--seed", size.seed]
    printed = json.loads(run([*command, "--steps", size.steps, *more]).splitlines()[-1])
    return Run(printed["seconds"], printed["rewards"], printed["tokens"])


def run(command: list[Any]) -> str:
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:4])} failed: {done.stderr[-2000:]}")
    return done.stdout


def step_claim(
    name: str, ours: list[float], theirs: list[float], goal: float, note: str = ""
) -> Claim:
    """Return the claim about the seconds of steps."""
    return Claim(
        f"GRPO step of {name}",
        "s",
        ours,
        "TRL",
        theirs,
        [statistics.median(theirs) / statistics.median(ours)],
        "times faster",
        at_least=goal,
        note=note,
    )


def reward_claim(ours: dict[str, float], theirs: dict[str, float]) -> Claim:
    """Return the claim about the rewards of the problems that both trained on."""
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
        size = Size(prompts, steps, seed)
        ours = demo(build, "instant", first, size)
        theirs = trl(build / "model", problems, size, "--long-tailed-steps", tailed)
        count = prompts * GROUP
        instant = ours.seconds[1:], theirs.seconds[1:steps]
        claims = [
            step_claim(f"{count}, instant tools", *instant, 2.0, ours.note(theirs)),
            reward_claim(ours.rewards, theirs.rewards),
        ]
        if tailed:
            slow = demo(build, "long-tailed", build / "train.jsonl", Size(prompts, 5, seed))
            both = slow.seconds[1:], theirs.seconds[steps:]
            claims.append(step_claim(f"{count}, long-tailed tools", *both, 4.0))
    report(claims, options)


if __name__ == "__main__":
    main()
