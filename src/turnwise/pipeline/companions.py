"""Modules for the models beside the policy: reference, value, reward, and the trainer.

Each reads the outputs of a policy's `forward_step` and returns lists with an entry for each of its
trajectories, under ChatLearn's names, to be put beside them.
In a step the trainer computes log-probs and values from the same models itself; `ref_logprobs` and
`old_values` are only for the program. `iteration` is the caller's count, for overrides.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.pipeline.outputs import Data, Outputs
from turnwise.pipeline.pipeline import Module
from turnwise.training.model import ModelName
from turnwise.trajectory import Trajectory


class _TokenModule(Module):
    """A model in the trainer's processes that scores tokens."""

    _model: ClassVar[ModelName]
    _output: ClassVar[str]

    def setup(self) -> None:
        """Check that the trainer has such a model."""
        self.pipeline.check_model(self._model)

    def forward_step(self, data: Data, iteration: int = 0) -> Outputs:
        """Score sequences of tokens.

        Args:
            data: `all_tokens`, for each sequence its T ids; and `loss_mask`, for each T times 1
                (a token to be scored) or 0; without it all but the first tokens are scored.

        Returns:
            A list with T floats for each sequence, 0.0 where a token is not scored.
        """
        if data.get("all_tokens") is None:
            raise InputError(
                f"{self.name} needs all_tokens, which the forward_step of a policy returns"
            )
        tokens = [list(map(int, ids)) for ids in data["all_tokens"]]
        masks = data.get("loss_mask")
        if masks is None:
            masks = [[int(place > 0) for place in range(len(ids))] for ids in tokens]
        masks = [list(map(int, mask)) for mask in masks]
        if list(map(len, masks)) != list(map(len, tokens)):
            raise InputError(f"{self.name}: loss_mask must have a number for each of all_tokens")
        return {self._output: self.pipeline.score(self._model, tokens, masks)}


class ReferenceModule(_TokenModule):
    """The frozen model that the KL penalty and dpo compare with: `algorithm.kl.model`.

    `forward_step` returns `ref_logprobs`: for each sequence T log-probs under `sampling`.

    Example:
        reference = ReferenceModule("reference", "reference.yaml")
        with Pipeline("config.yaml", policy, reference) as pipeline:
            logprobs = reference.forward_step(policy.forward_step(problems))["ref_logprobs"]
    """

    role = "reference"
    _model = "reference"
    _output = "ref_logprobs"


class ValueModule(_TokenModule):
    """PPO's value model: `algorithm.advantage.model`.

    `forward_step` returns `old_values`: for each sequence T returns, as the model expects them
    before each token.

    Example:
        value = ValueModule("value", "value.yaml")
        with Pipeline("ppo.yaml", policy, value) as pipeline:
            values = value.forward_step(policy.forward_step(problems))["old_values"]
    """

    role = "value"
    _model = "value"
    _output = "old_values"


class RewardModule(Module):
    """A reward model or function: the entry of `rollout.rewards` with this module's name.

    Example:
        reward = RewardModule("reward", "reward.yaml")
        with Pipeline("config.yaml", policy, reward) as pipeline:
            outputs = policy.forward_step(problems)
            pipeline.train(outputs | reward.forward_step(outputs))
    """

    role = "reward"

    def forward_step(self, data: Data, iteration: int = 0) -> Outputs:
        """Return `rewards`, a float for each trajectory, without their weight.

        Args:
            data: The outputs of a policy's `forward_step` (`trajectories`, or `groups` of them), or
                `messages`, the messages of each trajectory, which only reward models accept.

        Raises:
            TrajectoryError: naming the trajectory that has no reward, and why.
        """
        judged: list[Trajectory]
        if "trajectories" in data:
            judged = list(data["trajectories"])
        elif "groups" in data:
            judged = [trajectory for group in data["groups"] for trajectory in group.trajectories]
        elif "messages" in data:
            judged = [
                Trajectory(f"{self.name}:{number}", number, messages=list(messages))
                for number, messages in enumerate(data["messages"])
            ]
        else:
            raise InputError(
                f"{self.name} needs trajectories, which the forward_step of a policy returns"
            )
        return {"rewards": self.pipeline.judge(self.name, judged)}


class TrainerModule(Module):
    """The trainer of the policy, and of PPO's value model.

    Example:
        trainer = TrainerModule("ppo_policy", "ppo_policy.yaml")
        with Pipeline("config.yaml", policy, trainer) as pipeline:
            for iteration in range(100):
                metrics = trainer.train_step(policy.forward_step(problems), iteration)
    """

    role = "ppo_policy"

    def train_step(self, data: Data | Sequence[Data], iteration: int = 0) -> JsonObject:
        """Train on one dictionary of a policy's outputs or several; see `Pipeline.train`."""
        each = [data] if isinstance(data, Mapping) else list(data)
        return self.pipeline.train(*(dict(outputs) for outputs in each))
