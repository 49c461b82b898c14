"""The training loop as a plain program: a module that samples, and a pipeline that trains.

python -m examples.step05_pipeline.pipeline [key.sub=value ...]
"""

import sys
from pathlib import Path

from turnwise.compat.chatlearn import Pipeline, VLLMModule

CONFIG = Path(__file__).parent / "config.yaml"


def main(overrides: list[str]) -> None:
    policy = VLLMModule("policy")
    with Pipeline(CONFIG, policy, overrides=overrides) as pipeline:
        problems = policy.build_dataset(pipeline.rows())
        size = pipeline.config.rollout.prompts_per_step
        for iteration in range(pipeline.config.training.steps):
            first = iteration * size % len(problems)
            outputs = policy.forward_step(problems[first : first + size], iteration)
            # To use your own rewards: outputs["rewards"] = [...]
            metrics = pipeline.train(outputs)
            print(f"step {iteration + 1}  reward {metrics['reward_mean']:.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
