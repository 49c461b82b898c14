"""The RL loop as a program: roll out, train, update the engines.

    python -m examples.step02_one_page_loop.loop FILE [key.sub=value]...

`turnwise train` does the same, with rollouts that run ahead, evaluations, checkpoints and a table.
"""

import sys
from typing import Any

import turnwise


def main(file: str, overrides: list[str]) -> None:
    keys: dict[str, Any] = dict(override.split("=", 1) for override in overrides)
    with turnwise.open(file, **keys) as run:
        for _ in range(run.config.training.steps):
            # A group is several trajectories of one problem, each with its reward.
            groups = run.rollout(run.problems(run.config.rollout.prompts_per_step))

            # Rewards become advantages of the sampled tokens, which the loss uses.
            run.forward_backward(run.samples(groups))
            step = run.optim_step()

            # The engines sample from the trainer's weights.
            print(f"step {step['step']}  reward {step['reward_mean']:.3f}  weights {run.sync()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
