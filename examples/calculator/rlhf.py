"""The demo as a program of ChatLearn: PPO with a reference, a value and a reward model.

python -m examples.calculator.prepare
python -m examples.calculator.rlhf --config examples/calculator/rlhf.yaml [key.sub=value ...]
"""

import json
import random
from pathlib import Path
from typing import Any

import turnwise.compat.chatlearn as chatlearn
from turnwise.compat.chatlearn import (
    Evaluator,
    ReferenceModule,
    RewardModule,
    RLHFEngine,
    TrainerModule,
    ValueModule,
    VLLMModule,
)


def right(trajectory: Any, row: dict[str, Any]) -> float:
    """Return 1 if the answer contains the right number."""
    return float(str(row["answer"]) in trajectory.final_text)


def main() -> RLHFEngine:
    chatlearn.init()
    args = chatlearn.get_args().runtime_args
    policy, reward = VLLMModule("policy"), RewardModule("reward")
    engine = RLHFEngine(
        policy,
        ReferenceModule("reference"),
        reward,
        ValueModule("value"),
        TrainerModule("ppo_policy"),
        TrainerModule("ppo_value"),
    )
    lines = Path(args.data_path).read_text().splitlines()
    rows = list(map(json.loads, lines))[: args.training_data_num_limit]
    random.Random(policy.model_args["seed"]).shuffle(rows)
    held_out = len(rows) // 10 if args.eval_episode_interval else 0

    def evaluate(batch: Any) -> Any:
        return reward.eval_forward(policy.eval_forward(batch))

    engine.set_evaluator(Evaluator(evaluate).set_dataset(rows[:held_out]))
    engine.set_dataset(rows[held_out:])
    engine.learn()
    return engine


if __name__ == "__main__":
    main()
