"""Synchronous RL on one page: roll out, turn rewards into samples, train, update the engines.

    python -m examples.step02_one_page_loop.loop FILE FOLDER [key.sub=value]...

Uses the same engines, runner and trainer as `turnwise train`, but none of its loop: no producer,
no bound on staleness, no resume. Writes FOLDER/step-N.jsonl (trajectories) and FOLDER/metrics.json.
"""

import asyncio
import json
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from turnwise.config import load_config
from turnwise.rollouts.data import load_training
from turnwise.run.runtime import open_runtime
from turnwise.training.samples import make_samples
from turnwise.trajectory import write_jsonl
from turnwise.weights.sync import WeightSync


async def run(file: str, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    config = load_config(file, overrides)
    problems = load_training(config)
    order = random.Random(f"{config.seed}-0").sample(problems, len(problems))
    rows = []
    async with open_runtime(config, problems[0], folder=folder) as runtime:
        policy = runtime.policy
        assert policy is not None
        weights = WeightSync(policy, 60.0, 60.0)
        rest = iter(enumerate(order))
        for step in range(1, config.training.steps + 1):
            # The engines sample from the trainer's weights.
            await weights.publish()
            await runtime.manager.update_weights(weights)

            # A group is several trajectories of one problem, each with its reward.
            groups = []
            for number, problem in islice(rest, config.rollout.prompts_per_step):
                run_group, engine = runtime.runner.run_group, runtime.generator
                groups.append(await run_group(engine, problem, config.sampling, f"group{number}"))
            write_jsonl(folder / f"step-{step}.jsonl", [t for g in groups for t in g.trajectories])

            # Rewards become advantages, advantages belong to sampled tokens; then the loss.
            samples = make_samples(groups, config, policy.version).samples
            rows.append(await policy.train(samples) if samples else {})
            print(f"step {step}: {len(samples)} samples", flush=True)
    return rows


if __name__ == "__main__":
    where = Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    metrics = asyncio.run(run(sys.argv[1], where, sys.argv[3:]))
    (where / "metrics.json").write_text(json.dumps(metrics))
