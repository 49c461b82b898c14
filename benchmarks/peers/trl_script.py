"""A script as users of TRL write it, with the module that it imports as an argument.

    python -m benchmarks.peers.trl_script trl|turnwise.trl --model FOLDER --steps N --seed S

The demo's problems, without its tool; answers are rewarded for being near 16 tokens. The last line
is JSON: `state.log_history`.
"""

import argparse
import importlib
import json
import tempfile
from typing import Any

from datasets import Dataset

from examples.calculator.problems import train_problems

PROMPTS, GROUP, TOKENS, LENGTH = 8, 4, 24, 16


def near(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Reward answers of about 16 tokens."""
    return [-abs(LENGTH - len(ids)) / LENGTH for ids in completion_ids]


def main() -> None:
    """Train, and print what was logged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", choices=["trl", "turnwise.trl"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    trl = importlib.import_module(options.module)
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}]}
        for row in train_problems(PROMPTS * options.steps, seed=options.seed)
    ]
    small: dict[str, Any] = {"engine.kv_cache_gib": 0.0625, "model.max_length": 512}
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            max_steps=options.steps,
            learning_rate=1e-3,
            seed=options.seed,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            **({} if options.module == "trl" else {"turnwise": small}),
        )
        trainer = trl.GRPOTrainer(
            model=options.model, reward_funcs=near, args=args, train_dataset=Dataset.from_list(rows)
        )
        trainer.train()
    print(json.dumps([entry for entry in trainer.state.log_history if "reward" in entry]))


if __name__ == "__main__":
    main()
