"""From a step's groups to training samples: rewards -> advantages -> samples, each token audited.

`compute_advantages` computes each trajectory's advantage, and `samples_of` makes the samples. The
audit's report accounts for every trajectory: trained, or the reason why not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.rollout import Group
from turnwise.training.algorithms import (
    Algorithm,
    choose_pairs,
    has_signal,
    make_algorithm,
    overlong_penalty,
)
from turnwise.training.sample import Sample
from turnwise.trajectory import Branch, ExactnessReport, Trajectory, audit

TurnAdvantages = float | list[float]
"""Advantage of a trajectory, or of each of its turns."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """One group and the advantages of its trajectories."""

    group: Group
    advantage_by_index: dict[int, TurnAdvantages]
    """Advantage of each trajectory that is trained, or of each of its turns, by its index in the
    group; with a value model its reward. Empty where the group gives no sample."""
    untrained: str = ""
    """Reason why the group's advantages are not trained on, or "": `stale_group` (too old),
    `alone` (nothing to compare with), `no_signal` (all advantages are 0)."""


@dataclass(slots=True)
class SampleBatch:
    """The samples that a step trains on, and an account of the rest."""

    samples: list[Sample] = field(default_factory=list)
    """Samples, each with trained tokens; empty if there is nothing to train on."""
    report: ExactnessReport = field(default_factory=ExactnessReport)
    """Audit of every sampled token."""
    groups_without_signal: int = 0
    """Groups whose advantages are all 0."""
    stale_groups: int = 0
    """Groups dropped because a token in them was older than the bound."""
    stale_tokens: int = 0
    """Tokens masked for the same reason."""
    overlong: int = 0
    """Trajectories that lost reward for their length."""

    def drop(self, trajectories: Iterable[Trajectory], reason: str) -> None:
        """Account for trajectories that give no sample."""
        for trajectory in trajectories:
            self.report += audit(trajectory, [], masked=reason)


def make_samples(
    groups: Sequence[Group], config: Config, version: int, algorithm: Algorithm | None = None
) -> SampleBatch:
    """Make a step's samples with their advantages.

    Args:
        version: Optimizer steps that the trainer has taken.
        algorithm: Built from `config.algorithm`; None builds it.

    Raises:
        InputError: when the user's `Advantage` does not fit its groups.

    Example:
        batch = make_samples(groups, config, version=0)
        metrics = await trainer.train(batch.samples)
    """
    algorithm = algorithm or make_algorithm(config.algorithm)
    advantages = compute_advantages(groups, config, version, algorithm)
    return samples_of(advantages, config, version, algorithm)


def compute_advantages(
    groups: Sequence[Group], config: Config, version: int, algorithm: Algorithm
) -> list[GroupAdvantages]:
    """Return the advantages of a step's trajectories, from the rewards of their groups.

    A group with tokens more than max_staleness training steps old is left out with
    `training.stale_policy: drop`. A group without signal has advantages of 0; it contains no pair
    for a loss that compares pairs. The arguments are those of `make_samples`.
    """
    oldest = _oldest_version(config, version)
    stale: list[Group] = []
    fresh: list[Group] = []
    for group in groups:
        drop = config.training.stale_policy == "drop" and _oldest(group) < oldest
        (stale if drop else fresh).append(group)
    rewards = [_rewards(group, config) for group in fresh]
    if algorithm.loss.needs_pairs:
        by_index = [_pair_advantages(group) for group in rewards]
    elif algorithm.advantage.per_turn:
        by_index = [_of_turns(group, config, algorithm) for group in fresh]
    else:
        by_index = _advantages(rewards, config, algorithm)
    result = [GroupAdvantages(group, {}, "stale_group") for group in stale]
    for group, advantages in zip(fresh, by_index, strict=True):
        if advantages is None:
            reason = "alone" if len(group.trajectories) < 2 else "no_signal"
        elif algorithm.advantage.needs_values or not advantages or _any(advantages.values()):
            reason = ""  # with a value model these are rewards, and any reward is informative
        else:
            reason = "no_signal"
        result.append(GroupAdvantages(group, advantages or {}, reason))
    return result


def _any(advantages: Iterable[TurnAdvantages]) -> bool:
    """Return whether an advantage is not 0."""
    return any(any(a) if isinstance(a, list) else a for a in advantages)


def _of_turns(
    group: Group, config: Config, algorithm: Algorithm
) -> dict[int, TurnAdvantages] | None:
    """Return the advantages of a group's turns by index, or None if it is not trained."""
    rewards = [_rewards_by_turn(trajectory, config) for trajectory in group.trajectories]
    advantages = algorithm.advantage.of_turns(rewards)
    if advantages is None:
        return None
    found, turns = [len(a) for a in advantages], [len(r) for r in rewards]
    if found != turns:
        raise InputError(
            f"algorithm.advantage: {config.algorithm.advantage.name} returns {found} advantages "
            f"for trajectories of {turns} turns"
        )
    return dict(enumerate(advantages))


def _rewards_by_turn(trajectory: Trajectory, config: Config) -> list[float]:
    """Return the reward of each turn; the last one's includes that of the whole trajectory."""
    turns = list(trajectory.turn_rewards) or [0.0] * len(trajectory.turns)
    total = (trajectory.reward or 0.0) + _overlong(trajectory, config)
    turns[-1] += total - sum(turns)
    return turns


def _pair_advantages(rewards: Sequence[float]) -> dict[int, TurnAdvantages] | None:
    """Return 1 for the chosen trajectory and -1 for the rejected one, or None without a pair."""
    pair = choose_pairs(rewards)
    return None if pair is None else {pair[0]: 1.0, pair[1]: -1.0}


def _advantages(
    rewards: Sequence[Sequence[float]], config: Config, algorithm: Algorithm
) -> list[dict[int, TurnAdvantages] | None]:
    """Return each group's advantages by index, or None if a group is not trained."""
    advantages = algorithm.advantage.of_groups(rewards)
    sizes = [len(group) for group in rewards]
    found = [None if group is None else len(group) for group in advantages]
    if len(found) != len(sizes) or any(
        n is not None and n != size for n, size in zip(found, sizes, strict=True)
    ):
        raise InputError(
            f"algorithm.advantage: {config.algorithm.advantage.name} returns {found} advantages "
            f"for groups of {sizes} trajectories"
        )
    return [None if group is None else dict(enumerate(group)) for group in advantages]


def samples_of(
    advantages: Sequence[GroupAdvantages], config: Config, version: int, algorithm: Algorithm
) -> SampleBatch:
    """Return the samples of groups whose advantages are known, and account for every token.

    A group with fewer than two finished trajectories gives no sample; see `Group.dropped`. A group
    without signal counts in the batch's totals, and is computed only if there is more to train than
    its advantages; it gives no sample with `algorithm.dynamic_sampling`, which replaces it by
    another group, nor for a loss that compares pairs. Tokens more than
    max_staleness training steps old are masked. The arguments are those of `make_samples`.
    """
    batch = SampleBatch()
    oldest = _oldest_version(config, version)
    for scored in advantages:
        group = scored.group
        _account_dropped(group, batch.report)
        if scored.untrained == "stale_group":
            batch.stale_groups += 1
            batch.drop(group.trajectories, "stale_group")
            continue
        batch.overlong += sum(_overlong(t, config) < 0 for t in group.trajectories)
        batch.groups_without_signal += scored.untrained == "no_signal"
        replaced = scored.untrained == "no_signal" and config.algorithm.dynamic_sampling
        if scored.untrained and (replaced or not scored.advantage_by_index):
            batch.drop(group.trajectories, scored.untrained)
        elif algorithm.loss.needs_pairs:
            _add_pair(batch, group, scored.advantage_by_index, oldest)
        else:
            # Without a KL penalty, advantages of 0 add nothing to the gradient.
            counted_only = scored.untrained == "no_signal" and not config.algorithm.kl.coef
            for index, trajectory in enumerate(group.trajectories):
                advantage = scored.advantage_by_index[index]
                _add(
                    batch,
                    trajectory,
                    advantage,
                    oldest,
                    counted_only=counted_only,
                    as_reward=algorithm.advantage.needs_values,
                )
    batch.samples = [sample for sample in batch.samples if sample.trained]
    if all(sample.counted_only for sample in batch.samples):
        batch.samples = []
    return batch


def _add_pair(
    batch: SampleBatch, group: Group, advantage_by_index: dict[int, TurnAdvantages], oldest: int
) -> None:
    """Add the chosen trajectory and the rejected one; half a pair is dropped."""
    if not all(_fresh(group.trajectories[index], oldest) for index in advantage_by_index):
        batch.stale_groups += 1
        batch.drop(group.trajectories, "stale_group")
        return
    unpaired = (t for i, t in enumerate(group.trajectories) if i not in advantage_by_index)
    batch.drop(unpaired, "unpaired")
    pair_id = len(batch.samples)
    for index in sorted(advantage_by_index, key=advantage_by_index.__getitem__, reverse=True):
        _add(batch, group.trajectories[index], advantage_by_index[index], oldest, pair_id)


def _add(
    batch: SampleBatch,
    trajectory: Trajectory,
    advantage: TurnAdvantages,
    oldest: int,
    pair_id: int | None = None,
    *,
    counted_only: bool = False,
    as_reward: bool = False,
) -> None:
    """Add the branches of one trajectory, with tokens of versions before `oldest` masked.

    Args:
        as_reward: Whether the advantage is a reward, for a value model: the share of each turn is
            at its last token, and the rest at the last token of each branch.
    """
    branches = trajectory.samples()
    masked = [_without_stale(branch, oldest) for branch in branches]
    if counted_only:
        batch.drop([trajectory], "no_signal")
    else:
        stale = _trained(branches) - _trained(masked)
        batch.stale_tokens += stale
        batch.report += audit(trajectory, masked, masked="stale" if stale else None)
    first = len(batch.samples)
    for branch in masked:
        # The two sides of a pair are whole trajectories; otherwise a branch is a sequence.
        sequence = len(batch.samples) if pair_id is None else first
        batch.samples.append(
            Sample.of(
                branch.token_ids,
                branch.response_mask,
                branch.logprobs,
                branch.weight_versions,
                _token_rewards(branch, trajectory, advantage)
                if as_reward
                else _token_advantages(branch, advantage),
                sequence=sequence,
                pair_id=pair_id,
                trajectory=first if pair_id is None else pair_id,
                counted_only=counted_only,
                turns=branch.turns,
            )
        )


def _token_advantages(branch: Branch, advantage: TurnAdvantages) -> float | list[float]:
    """Return the advantage of each token of a branch."""
    if not isinstance(advantage, list):
        return advantage
    return [0.0 if turn < 0 else advantage[turn] for turn in branch.turns]


def _token_rewards(branch: Branch, trajectory: Trajectory, reward: TurnAdvantages) -> list[float]:
    """Return the reward of each token of a branch."""
    assert not isinstance(reward, list)
    rewards = [0.0] * len(branch.token_ids)
    last = {turn: t for t, turn in enumerate(branch.turns) if branch.response_mask[t]}
    for turn, share in enumerate(trajectory.turn_rewards):
        if turn in last:
            rewards[last[turn]] += share
    if last:
        rewards[max(last.values())] += reward - sum(trajectory.turn_rewards)
    return rewards


def _trained(branches: Sequence[Branch]) -> int:
    return sum(sum(branch.response_mask) for branch in branches)


def _without_stale(branch: Branch, oldest: int) -> Branch:
    """Return the branch with tokens of versions before `oldest` as context only."""
    if all(version >= oldest or version < 0 for version in branch.weight_versions):
        return branch
    mask = [
        int(bool(trained) and version >= oldest)
        for trained, version in zip(branch.response_mask, branch.weight_versions, strict=True)
    ]
    return replace(branch, response_mask=mask)


def _oldest_version(config: Config, version: int) -> int:
    """Return the oldest weight version whose tokens are trained."""
    return version - config.training.max_staleness * config.training.updates_per_step


def _fresh(trajectory: Trajectory, oldest: int) -> bool:
    """Return whether any token of a trajectory is recent enough to train."""
    return any(v >= oldest for turn in trajectory.turns for v in turn.weight_versions)


def _oldest(group: Group) -> int:
    return min(
        (v for t in group.trajectories for turn in t.turns for v in turn.weight_versions),
        default=0,
    )


def gives_signal(group: Group, config: Config) -> bool:
    """Return whether the rewards that would be trained on differ within the group."""
    return has_signal(_rewards(group, config))


def _rewards(group: Group, config: Config) -> list[float]:
    """Return the rewards that are trained on, with DAPO's penalty for nearly full contexts."""
    return [(t.reward or 0.0) + _overlong(t, config) for t in group.trajectories]


def _overlong(trajectory: Trajectory, config: Config) -> float:
    """Return DAPO's penalty, 0 or less."""
    algorithm = config.algorithm
    length = max((turn.path_length for turn in trajectory.turns), default=0)
    return overlong_penalty(
        length, config.model.max_length, algorithm.overlong_tokens, algorithm.overlong_penalty
    )


def _account_dropped(group: Group, report: ExactnessReport) -> None:
    for reason, count in group.dropped_tokens.items():
        report.tokens_sampled += count
        report.masked[f"dropped_{reason}"] += count
