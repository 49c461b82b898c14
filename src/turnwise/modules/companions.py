"""The models beside the policy as modules: reference, value, reward, and the trainer.

Each takes what a policy's `forward_step` returned and gives lists with an entry for each of its
trajectories, under ChatLearn's names; together they are what a training step is made of:

    outputs = policy.forward_step(batch)
    outputs |= reference.forward_step(outputs)   # ref_logprobs
    outputs |= value.forward_step(outputs)       # old_values
    outputs |= reward.forward_step(outputs)      # rewards: they are what is trained on
    metrics = trainer.train_step(outputs)

A step trains with log-probs and values that the trainer computes from the same models by itself,
so that `ref_logprobs` and `old_values` are for a program's own eyes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from turnwise.errors import InputError
from turnwise.modules.base import Module
from turnwise.modules.model_file import Settings
from turnwise.modules.pipeline_file import model_settings
from turnwise.rollout import Group
from turnwise.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from turnwise.training.policy import ModelName

Data = Mapping[str, Any]
"""The outputs of a module's `forward_step`."""


class CompanionModule(Module):
    """A model beside the policy.

    Args:
        name: Its name in the pipeline's file; different in each module of a pipeline.
        model_file: The model's YAML file (see `pipeline_file`), where the pipeline's file does
            not name it.

    Raises:
        InputError: when the file cannot be read or has an unknown key.
    """

    role: ClassVar[str] = ""
    """The name of such a model in a pipeline's file."""

    def __init__(self, name: str, model_file: str | Path | None = None) -> None:
        super().__init__(name)
        self.settings: Settings = (
            {} if model_file is None else model_settings(name, self.role, model_file)
        )


class _TokenModule(CompanionModule):
    """A model in the trainer's processes that says something of each token."""

    _model: ClassVar["ModelName"]
    _output: ClassVar[str]

    def setup(self) -> None:
        """See that the trainer has such a model.

        Raises:
            InputError: naming the key that makes it have one.
        """
        self.pipeline.check_model(self._model)

    def forward_step(self, data: Data, iteration: int = 0) -> dict[str, Any]:
        """What the model says of sequences of tokens.

        Args:
            data: `all_tokens`, for each sequence its T ids; and `loss_mask`, for each T times 1
                (a token to be scored) or 0; without it all but first tokens are.
            iteration: The caller's count; for overrides.

        Returns:
            A list with T floats for each sequence, 0.0 where a token is not scored.

        Raises:
            InputError: when `data` has no tokens, or its lists do not fit each other.
            TrainerError, DeadlineError: naming who failed.
        """
        tokens, masks = _tokens(self.name, data)
        return {self._output: self.pipeline.score(self._model, tokens, masks)}


class ReferenceModule(_TokenModule):
    """The frozen model that the KL penalty and dpo compare with: `algorithm.kl.model`.

    `forward_step` returns `ref_logprobs`: the log-probs of tokens under `sampling`.
    """

    role = "reference"
    _model = "reference"
    _output = "ref_logprobs"


class ValueModule(_TokenModule):
    """PPO's value model: `algorithm.advantage.model`.

    `forward_step` returns `old_values`: the return that the model expects before each token.
    """

    role = "value"
    _model = "value"
    _output = "old_values"


class RewardModule(CompanionModule):
    """A reward model or function: the entry of `rollout.rewards` with this module's name, or the
    only one."""

    role = "reward"

    def forward_step(self, data: Data, iteration: int = 0) -> dict[str, Any]:
        """The rewards of trajectories, without their weight.

        Args:
            data: What a policy's `forward_step` returned (`trajectories`, or `groups` of them), or
                `messages`, for each trajectory its messages, which only a reward model can read.

        Returns:
            `rewards`, a float for each.

        Raises:
            InputError: when there is nothing in `data` to read, or no such reward.
            TrajectoryError: naming the trajectory that has no reward, and why.
        """
        return {"rewards": self.pipeline.judge(self.name, _judged(self.name, data))}


class TrainerModule(CompanionModule):
    """The trainer of the policy, and of PPO's value model."""

    role = "ppo_policy"

    def train_step(self, data: Data | Sequence[Data], iteration: int = 0) -> dict[str, Any]:
        """Train on outputs of a policy's `forward_step`, and update the engines.

        Returns:
            The step's metrics; see `Pipeline.train`, which also says what is raised.
        """
        each = [data] if isinstance(data, Mapping) else list(data)
        return self.pipeline.train(*(dict(outputs) for outputs in each))


def _tokens(name: str, data: Data) -> tuple[list[list[int]], list[list[int]]]:
    tokens = data.get("all_tokens")
    if tokens is None:
        raise InputError(f"{name} reads all_tokens, which forward_step of a policy returns")
    tokens = [list(map(int, ids)) for ids in tokens]
    masks = data.get("loss_mask")
    if masks is None:
        masks = [[int(place > 0) for place in range(len(ids))] for ids in tokens]
    masks = [list(map(int, mask)) for mask in masks]
    if list(map(len, masks)) != list(map(len, tokens)):
        raise InputError(f"{name}: loss_mask must have a number for each of all_tokens")
    return tokens, masks


def _judged(name: str, data: Data) -> list[Trajectory]:
    if "trajectories" in data:
        return list(data["trajectories"])
    if "groups" in data:
        groups: Sequence[Group] = data["groups"]
        return [trajectory for group in groups for trajectory in group.trajectories]
    if "messages" in data:
        return [_said(name, number, each) for number, each in enumerate(data["messages"])]
    raise InputError(f"{name} reads trajectories, which forward_step of a policy returns")


def _said(name: str, number: int, messages: Sequence[Message]) -> Trajectory:
    trajectory = Trajectory(f"{name}:{number}", number)
    trajectory.messages = list(messages)
    return trajectory
