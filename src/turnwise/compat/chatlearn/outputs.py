"""Outputs of a module's requests, in the shape of vLLM's `RequestOutput`.

Code for vLLM's objects can read these: `output.outputs[i].logprobs[t][token_id]`. A trajectory of
several turns is one completion. Its ids are everything after the first prompt, including tool
results and template tokens, so that prompt and completion together are the trained sequence.
`loss_mask` is 1 for every sampled id. If there is only one turn, all ids are sampled, as in vLLM.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Group
from turnwise.rollouts.environment import read_reward
from turnwise.trajectory import MAX_REWARD, Branch, ChatTemplate, Prompt, Trajectory

Outputs = dict[str, Any]
"""The outputs of a `forward_step`: lists by name, each with one entry for each trajectory."""
Data = Mapping[str, Any]
"""Outputs that another module reads."""
_NO_TURNS = Branch(leaf=-1, ids=Prompt(), response_mask=[], logprobs=[], weight_versions=[])


class Logprob(float):
    """A token's log-prob: a number, with the attributes of vLLM's `Logprob`."""

    __slots__ = ("_template", "_token_id")

    rank: int | None = None
    """Unknown: engines record only the sampled token's log-prob."""

    def __new__(cls, value: float, token_id: int, template: ChatTemplate) -> "Logprob":
        made = super().__new__(cls, value)
        made._token_id, made._template = token_id, template
        return made

    _token_id: int
    _template: ChatTemplate

    @property
    def logprob(self) -> float:
        return float(self)

    @property
    def decoded_token(self) -> str:
        return self._template.decode_all([self._token_id])


@dataclass(frozen=True, eq=False)
class CompletionOutput:
    """One trajectory after its first prompt: `T` tokens."""

    trajectory: Trajectory
    branch: Branch
    """Tokens of the trajectory; if it has several branches, the branch of the last turn."""
    prompt_length: int
    """Number of ids of the branch before the first sampled id."""
    template: ChatTemplate
    stop: Sequence[str] = ()
    """Strings that end a turn; `text` ends before the first stop string of the last turn."""

    @property
    def index(self) -> int:
        """Position within the prompt's group, from 0."""
        return self.trajectory.sample_index

    @cached_property
    def token_ids(self) -> list[int]:
        return self.branch.token_ids[self.prompt_length :]

    @cached_property
    def loss_mask(self) -> list[int]:
        """`T` numbers: 1 for a sampled token, else 0."""
        return self.branch.response_mask[self.prompt_length :]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]]:
        """One `{token_id: Logprob}` for each of the `T` tokens; 0.0 for tokens not sampled."""
        values = self.branch.logprobs[self.prompt_length :]
        return _by_token(self.token_ids, values, self.template)

    @property
    def cumulative_logprob(self) -> float:
        return sum(self.branch.logprobs)

    @property
    def finish_reason(self) -> str:
        """`stop`, or `length` if a limit of tokens or turns ended the trajectory."""
        return "stop" if self.trajectory.status == "completed" else "length"

    @cached_property
    def text(self) -> str:
        """Text of the `T` tokens, special tokens included, without the stop token or stop string of
        the last turn."""
        ids = self.token_ids
        if self.finish_reason != "stop":
            return self.template.decode_all(ids)
        if ids and ids[-1] in self.template.stop_token_ids:
            return self.template.decode_all(ids[:-1])
        text = self.template.decode_all(ids)
        last = self.template.decode_all(self.trajectory.turns[-1].completion_token_ids)
        found = [last.index(end) for end in self.stop if end in last] if last else []
        return text[: len(text) - len(last) + min(found)] if found else text


@dataclass(frozen=True, eq=False)
class RequestOutput:
    """One prompt and its completions."""

    request_id: str
    """Number of the request in its batch, from 0."""
    prompt: str
    """Text that the program gave with the ids; the decoded ids if the program gave no text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The `sampling.n` completions; fewer where trajectories failed."""
    group: Group
    """All trajectories of the prompt, for training."""
    template: ChatTemplate
    finished: bool = True

    @cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """A list with None for the first id of the prompt, and one `{token_id: Logprob}` for each
        later id; None instead of the list if `sampling.prompt_logprobs` is not set."""
        turns = [output.trajectory.turns for output in self.outputs]
        values = turns[0][0].added_logprobs if turns and turns[0] else None
        if values is None:
            return None
        own = [0.0 if value is None else value for value in values[1:]]
        return [None, *_by_token(self.prompt_token_ids[1:], own, self.template)]


def request_outputs(
    groups: Sequence[Group], template: ChatTemplate, stop: Sequence[str] = ()
) -> list[RequestOutput]:
    """Return the outputs of groups, in the order of the groups and of their trajectories.

    Adjacent trajectories of a group with the same prompt share one output.
    """
    outputs = []
    for number, group in enumerate(groups):
        done: list[tuple[list[int], CompletionOutput]] = []
        for trajectory in group.trajectories:
            branch = (trajectory.branches() or [_NO_TURNS])[-1]
            mask = branch.response_mask
            length = mask.index(1) if 1 in mask else len(branch.token_ids)
            completion = CompletionOutput(trajectory, branch, length, template, stop)
            done.append((branch.token_ids[:length], completion))
        parts = [
            (ids, [completion for _, completion in same])
            for ids, same in groupby(done, lambda pair: pair[0])
        ]
        for ids, completions in parts or [([], [])]:
            text = template.decode_all(ids) if group.prompt is None else group.prompt
            outputs.append(RequestOutput(str(number), text, ids, completions, group, template))
    return outputs


def _by_token(
    token_ids: Sequence[int], values: Sequence[float], template: ChatTemplate
) -> list[dict[int, Logprob]]:
    return [
        {token_id: Logprob(value, token_id, template)}
        for token_id, value in zip(token_ids, values, strict=True)
    ]


def rewarded_groups(outputs: Mapping[str, object]) -> list[Group]:
    """Return the groups of a `forward_step`'s outputs, with its `rewards` set on the trajectories.

    `rewards` are finite numbers or, for a game, dictionaries with a number for each player. If any
    reward differs from its trajectory's reward, all trajectories also lose their reward parts and
    turn rewards.
    """
    groups = outputs.get("groups") if isinstance(outputs, Mapping) else None
    if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
        raise InputError("train takes what forward_step returned: a dictionary with its groups")
    rewards = outputs.get("rewards")
    if rewards is None:
        return list(groups)
    if not isinstance(rewards, Iterable):
        raise InputError(f"rewards must be a list of numbers, not {rewards!r}")
    given, trajectories = list(rewards), [t for group in groups for t in group.trajectories]
    read: list[dict[str, float]] = []
    for trajectory, given_one in zip(trajectories, given, strict=False):
        read.append({})  # stays empty where the reward cannot be used
        named = given_one if isinstance(given_one, Mapping) else {"": given_one}
        if named is not given_one or named.keys() == trajectory.player_rewards.keys():
            with suppress(TrajectoryError):
                read[-1] = {name: read_reward(one, "the program") for name, one in named.items()}
    if len(given) != len(trajectories) or not all(read):
        raise InputError(
            f"rewards must be one finite number for each of {len(trajectories)} trajectories, "
            f"±{MAX_REWARD:g} at most, not {len(given)}: {repr(given)[:80]}"
        )
    made: list[tuple[float, Mapping[str, float]]] = []
    for trajectory, given_one, numbers in zip(trajectories, given, read, strict=True):
        players, reward = trajectory.player_rewards, sum(numbers.values()) / len(numbers)
        if isinstance(given_one, Mapping):
            players = {player: numbers[player] for player in players}
        elif players and reward != trajectory.reward:
            raise InputError(
                f"rewards: {reward!r} is one number for a game, whose players are compared each "
                f"with itself: give a dictionary with a number for each of {', '.join(players)}"
            )
        made.append((reward, players))
    if made != [(trajectory.reward, trajectory.player_rewards) for trajectory in trajectories]:
        for trajectory, (reward, players) in zip(trajectories, made, strict=True):
            trajectory.set_outcome(reward=reward, parts={}, turns=[], players=players)
    return list(groups)
