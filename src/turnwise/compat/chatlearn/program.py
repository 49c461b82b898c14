"""ChatLearn's programs: `init`, `get_args`, and an engine that learns from a dataset of prompts.

An engine is a `Pipeline` with ChatLearn's loop. In each episode the policy answers the next
prompts, the other models score the answers, and the trainer makes one step.

    python train_rlhf.py --config rlhf.yaml [key.sub=value ...]
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from turnwise.compat.chatlearn.module import (
    ReferenceModule,
    RewardModule,
    TrainerModule,
    ValueModule,
    VLLMModule,
)
from turnwise.compat.chatlearn.outputs import Outputs
from turnwise.compat.chatlearn.pipeline import Module, Pipeline
from turnwise.compat.chatlearn.pipeline_file import changed_tree
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.problems import ProblemStream

logger = logging.getLogger(__name__)
Flow = Callable[[Outputs], Outputs | Sequence[Outputs]]
"""Answers and scores a batch of problems, by the models' `forward_step` or `eval_forward`."""


class RuntimeArgs:
    """The keys of a file's `runtime` as attributes; keys that the file lacks are None."""

    def __init__(self, tree: Mapping[str, Foreign]) -> None:
        self._args_dict = dict(tree)

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._args_dict.get(name)

    def get(self, name: str, default: Foreign = None) -> Foreign:
        """Return the value of a key, or `default`."""
        return self._args_dict.get(name, default)


class Arguments:
    """The arguments of a program: its `config`, its `overrides`, and `runtime_args`."""

    def __init__(self, argv: Sequence[str]) -> None:
        given = list(argv)
        for name in ("--config", "-c"):
            if name in given[:-1]:
                at = given.index(name)
                self.config = given[at + 1]
                self.overrides = given[:at] + given[at + 2 :]
                break
        else:
            raise InputError(f"give the pipeline's file: python {sys.argv[0]} --config FILE")
        if wrong := [each for each in self.overrides if each.startswith("-") or "=" not in each]:
            raise InputError(f"an override has the form key.sub=value, not {wrong[0]!r}")
        tree, _ = changed_tree(Path(self.config).expanduser(), self.overrides)
        runtime = {"eval_episode_interval": 0, **(tree.get("runtime") or {})}
        self.runtime_args = RuntimeArgs(runtime)


_arguments: Arguments | None = None


def init(argv: Sequence[str] | None = None) -> None:
    """Read the program's arguments; `argv` replaces those of the command line.

    Example:
        chatlearn.init()  # in a program that is called with --config rlhf.yaml
        args = chatlearn.get_args()
        args.runtime_args.data_path
    """
    global _arguments
    _arguments = Arguments(sys.argv[1:] if argv is None else argv)


def get_args() -> Arguments:
    """Return what `init` has read."""
    if _arguments is None:
        raise InputError("call chatlearn.init() before get_args() and before an engine")
    return _arguments


class Evaluator:
    """Runs a flow on a dataset of prompts.

    Args:
        flow: Takes the problems of the dataset, and returns what the reward model's `forward_step`
            returns.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.prompts: list[Foreign] = []

    def set_dataset(self, prompts: Sequence[Foreign]) -> Self:
        self.prompts = list(prompts)
        return self

    def post_process(self, results: Sequence[Outputs], eval_info: JsonObject) -> JsonObject:
        """Return the metrics of an evaluation; a subclass may override it."""
        rewards = [float(each) for made in results for each in made.get("rewards") or ()]
        return {"eval_reward_mean": sum(rewards) / len(rewards)} if rewards else {}


class ProgramEngine:
    """Models, a dataset of prompts, and the loop that trains on them; a program's base class.

    Args:
        models: The policy and the other models, in any order.

    Raises:
        InputError: when `init` was not called, or there is not exactly one policy.

    Example:
        chatlearn.init()
        engine = RLHFEngine(policy, reference, reward, value, policy_trainer, value_trainer)
        engine.set_dataset(prompts)
        engine.learn()
    """

    kind: ClassVar[str] = ""
    """The pipeline (grpo, ppo or online_dpo) of the engine, in place of the file's."""

    def __init__(self, *models: Module) -> None:
        arguments = get_args()
        policies = [model for model in models if isinstance(model, VLLMModule)]
        if len(policies) != 1:
            raise InputError(f"an engine needs one policy, a VLLMModule, and has {len(policies)}")
        self.policy = policies[0]
        self.models = models
        self.evaluator: Evaluator | None = None
        self.metrics: list[JsonObject] = []
        """The metrics of each episode."""
        self._prompts: list[Foreign] = []
        overrides = [*([f"pipeline={self.kind}"] if self.kind else []), *arguments.overrides]
        self.pipeline = Pipeline(arguments.config, *models, overrides=overrides)

    def set_dataset(self, prompts: Sequence[Foreign]) -> Self:
        """Set the prompts of training, which the policy's `build_dataset` turns into problems."""
        self._prompts = list(prompts)
        return self

    def set_evaluator(self, evaluator: Evaluator) -> Self:
        self.evaluator = evaluator
        return self

    def env_compute_flow(self, batch: Outputs) -> Sequence[Outputs]:
        """Answer problems, and score the answers; return outputs for the trainer."""
        answers = self.policy.forward_step(batch)
        scores: list[Outputs] = [answers]
        for model in self.models:
            if isinstance(model, ReferenceModule | ValueModule | RewardModule):
                scores.append(model.forward_step(answers))
        return [{key: value for each in scores for key, value in each.items()}]

    def trainer_compute_flow(self, batch: Sequence[Outputs], iteration: int) -> JsonObject:
        """Train on the outputs of an episode. One step trains the policy and PPO's value model."""
        for model in self.models:
            if isinstance(model, TrainerModule):
                return model.train_step(batch, iteration)
        return self.pipeline.train(*batch)

    def learn(self) -> None:
        """Train for `training.steps` episodes; evaluate and save as often as the file says.

        Raises:
            InputError: when `set_dataset` was not called, or gave no usable prompt.
        """
        if not self._prompts:
            raise InputError("engine.learn has no prompts: call engine.set_dataset(prompts) first")
        config = self.pipeline.config
        every, saves = config.eval.every, config.training.checkpoint_every
        with self.pipeline as pipeline:
            problems = ProblemStream(self.policy.build_dataset(self._prompts), seed=config.seed)
            for episode in range(config.training.steps):
                if every and episode % every == 0:
                    self._evaluate(episode)
                batch: Foreign = problems.take(config.rollout.prompts_per_step)
                metrics = self.trainer_compute_flow(self.env_compute_flow(batch), episode)
                self.metrics.append(metrics)
                shown = f"episode {episode + 1}: reward {metrics['reward_mean']:.3f}"
                sys.stdout.write(f"{shown}, {metrics['sampled_tokens']} tokens\n")
                if saves and (episode + 1) % saves == 0:
                    folder = config.run_folder / "checkpoints" / f"step-{episode + 1:04d}"
                    pipeline.save(folder, problems.state())
            if every:
                self._evaluate(config.training.steps)

    def _evaluate(self, episode: int) -> None:
        if self.evaluator is None or not self.evaluator.prompts:
            return
        built: Foreign = self.policy.build_dataset(self.evaluator.prompts, is_eval=True)
        made = self.evaluator.flow(built)
        results = [made] if isinstance(made, Mapping) else list(made)
        shown = self.evaluator.post_process(results, {"train_iteration": episode})
        for name, value in (shown or {}).items():
            sys.stdout.write(f"episode {episode}: {name} {value:.3f}\n")


class RLHFEngine(ProgramEngine):
    """PPO: an engine of the policy, its reference, reward and value models, and their trainers."""

    kind = "ppo"


class OnlineDPOEngine(ProgramEngine):
    """Online DPO: an engine of the policy, its reference and reward models, and its trainer."""

    kind = "online_dpo"


class GRPOEngine(ProgramEngine):
    """GRPO: an engine of the policy, its reference and reward models, and its trainer."""

    kind = "grpo"
