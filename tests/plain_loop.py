"""A synchronous run written out plainly: roll out, train, update, again. No producer, no bound.

    python -m tests.plain_loop FILE FOLDER [key.sub=value]...

Uses the same engines, runner and trainer as `turnwise train`, but none of its loop, and writes
FOLDER/step-N.jsonl (trajectories) and FOLDER/metrics.json.
"""

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

from turnwise.config import load_config
from turnwise.machinery import load_training, open_machinery
from turnwise.training.samples import make_samples
from turnwise.trajectory import write_jsonl
from turnwise.weights.delivery import Delivery


async def run(file: str, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    config = load_config(file, overrides)
    problems = load_training(config)
    order = random.Random(f"{config.seed}-0").sample(problems, len(problems))
    rows = []
    async with open_machinery(config, problems, folder=folder) as machinery:
        policy = machinery.policy
        assert policy is not None
        delivery = Delivery(policy, 60.0, 60.0)
        number = 0
        for step in range(1, config.training.steps + 1):
            await delivery.publish()
            await machinery.manager.update_weights(delivery)
            groups = []
            for _ in range(config.rollout.prompts_per_step):
                groups.append(
                    await machinery.runner.run_group(
                        machinery.generator, order[number], config.sampling, f"group{number}"
                    )
                )
                number += 1
            write_jsonl(folder / f"step-{step}.jsonl", [t for g in groups for t in g.trajectories])
            samples = make_samples(groups, config, policy.version).samples
            rows.append(await policy.train(samples) if samples else {})
    return rows


if __name__ == "__main__":
    where = Path(sys.argv[2])
    metrics = asyncio.run(run(sys.argv[1], where, sys.argv[3:]))
    (where / "metrics.json").write_text(json.dumps(metrics))
