"""The demo as its own pipeline program: modules instead of `turnwise train`.

python -m examples.calculator.prepare
python -m examples.calculator.pipeline [--steps N] [--save FOLDER] [--resume FOLDER]
                                       [key.sub=value ...]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.chatlearn import Pipeline, VLLMModule
from turnwise.errors import TurnwiseError
from turnwise.rollouts import ProblemStream

HERE = Path(__file__).parent


class Policy(VLLMModule):
    """The demo's model: a plain module that also reports its accuracy."""

    def eval_forward(self, data: Any, iteration: int = 0) -> dict[str, Any]:
        outputs = super().eval_forward(data, iteration)
        right = sum(reward >= 1.0 for reward in outputs["rewards"])
        return {**outputs, "accuracy": right / len(data)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="examples.calculator.pipeline", description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path, help="a folder that --save wrote")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args(arguments)

    policy = Policy("policy", HERE / "policy.yaml")
    changes = ["name=calculator-pipeline", f"training.steps={options.steps}", *options.overrides]
    with Pipeline(
        HERE / "config.yaml", policy, overrides=changes, resume=options.resume
    ) as pipeline:
        heldout = policy.build_dataset(pipeline.rows(is_eval=True), is_eval=True)
        problems = ProblemStream(policy.build_dataset(pipeline.rows()), pipeline.config.seed)
        if options.resume:
            problems.restore(pipeline.state)
        print(f"accuracy before {policy.eval_forward(heldout)['accuracy']:.3f}", flush=True)
        for iteration in range(pipeline.iteration + 1, options.steps + 1):
            batch = problems.take(pipeline.config.rollout.prompts_per_step)
            metrics = pipeline.train(policy.forward_step(batch, iteration))
            print(
                f"step {iteration}  reward {metrics['reward_mean']:.3f}  "
                f"weight version {metrics['weight_version']}",
                flush=True,
            )
        print(f"accuracy after  {policy.eval_forward(heldout)['accuracy']:.3f}", flush=True)
        if options.save:
            print(f"saved {pipeline.save(options.save, problems.state())}")


if __name__ == "__main__":
    try:
        main()
    except TurnwiseError as error:
        sys.exit(f"pipeline: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
