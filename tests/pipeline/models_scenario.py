"""PPO and online DPO with all their models, as programs; the results go to a JSON file.

    python -m tests.pipeline.models_scenario PIPELINE_FILE CHECKPOINT OUTPUT

`test_models` runs it once, checks the results, and compares with Transformers.
"""

import json
import sys
from pathlib import Path
from typing import Any

from turnwise.compat.chatlearn import (
    Pipeline,
    ReferenceModule,
    RewardModule,
    TrainerModule,
    ValueModule,
    VLLMModule,
)
from turnwise.errors import TurnwiseError
from turnwise.rollouts import ProblemStream

LISTS = ("all_tokens", "loss_mask", "logprobs", "rewards")


def refused(attempt: Any, *arguments: Any) -> str:
    """Return the error's message; "" where nothing was refused."""
    try:
        attempt(*arguments)
    except TurnwiseError as error:
        return str(error)
    return ""


def ppo(path: str, folder: Path, seen: dict[str, Any]) -> None:
    policy, trainer = VLLMModule("policy"), TrainerModule("ppo_policy")
    reference, value = ReferenceModule("reference"), ValueModule("value")
    reward = RewardModule("reward")
    modules = policy, reference, value, reward, trainer
    changes = ["pipeline=ppo", 'runtime.colocation=["policy,ppo_policy"]', "name=ppo"]
    changes += ["training.offload=[params, optimizer]"]
    with Pipeline(path, *modules, overrides=changes) as pipeline:
        stream = ProblemStream(policy.build_dataset(pipeline.rows()), pipeline.config.seed)
        steps = []
        for iteration in (1, 2):
            outputs = policy.forward_step(stream.take(2), iteration)
            outputs |= reference.forward_step(outputs) | value.forward_step(outputs)
            outputs |= reward.forward_step(outputs)
            kept = {name: outputs[name] for name in (*LISTS, "ref_logprobs", "old_values")}
            kept["messages"] = [t.messages for t in outputs["trajectories"]]
            kept["judged"] = reward.forward_step({"messages": kept["messages"]})["rewards"]
            kept["metrics"] = trainer.train_step(outputs, iteration)
            kept["saved"] = str(pipeline.save(folder / f"ppo-{iteration}", stream.state()))
            steps.append(kept)
        seen["steps"] = steps
        pipeline.load(steps[0]["saved"])
        again = policy.pipeline
        seen["loaded"] = again.iteration, again.weight_version, again.state
        seen["old_values"] = value.forward_step(outputs)["old_values"]
        seen["exactness"] = again.exactness.to_dict()
        trainer.train_step(outputs, 2)
        seen["again"] = str(pipeline.save(folder / "ppo-again"))
        seen["refused"] = {
            "no tokens": refused(reference.forward_step, {}),
            "mask": refused(value.forward_step, {"all_tokens": [[1, 2]], "loss_mask": [[1]]}),
            "nothing": refused(reward.forward_step, {}),
            "no messages": refused(reward.forward_step, {"messages": [[]]}),
            "checkpoint": refused(pipeline.load, folder / "nowhere"),
            "broken": refused(pipeline.load, folder),
        }


def online_dpo(path: str, checkpoint: str, seen: dict[str, Any]) -> None:
    policy, reference = VLLMModule("policy"), ReferenceModule("reference")
    changes = ["pipeline=online_dpo", "name=dpo"]
    with Pipeline(path, policy, reference, overrides=changes, resume=checkpoint) as pipeline:
        seen["began"] = pipeline.iteration, pipeline.weight_version
        data = policy.build_dataset(pipeline.rows()[:2])
        first = policy.forward_step(data)
        seen["first"] = {name: first[name] for name in LISTS}
        seen["metrics"] = [pipeline.train(first), pipeline.train(policy.forward_step(data, 2))]
        seen["ended"] = pipeline.iteration, pipeline.weight_version
        value = ValueModule("value")
        seen["refused"] = refused(pipeline.add, value)


def main() -> None:
    path, checkpoint, output = sys.argv[1:]
    seen: dict[str, Any] = {"ppo": {}, "dpo": {}}
    try:
        ppo(path, Path(output).parent, seen["ppo"])
        online_dpo(path, checkpoint, seen["dpo"])
    finally:
        Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
