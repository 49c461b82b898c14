"""From a step's groups to training samples: rewards -> advantages -> samples, each token audited.

`advantages` computes each trajectory's advantage, and `samples_of` makes the samples. The
audit's report accounts for every trajectory: trained, or the reason why not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from turnwise.config import Config
from turnwise.rollouts import Group
from turnwise.training.advantages import (
    GroupAdvantages,
    TurnAdvantages,
    compute_advantages,
    overlong,
)
from turnwise.training.algorithms import Algorithm, make_algorithm
from turnwise.training.sample import Sample
from turnwise.training.staleness import oldest_version
from turnwise.trajectory import Branch, ExactnessReport, Trajectory, audit


@dataclass(slots=True)
class SampleBatch:
    """The samples that a step trains on, and an account of the rest."""

    samples: list[Sample] = field(default_factory=list)
    """Samples, each with trained tokens; empty if there is nothing to train on."""
    origins: dict[int, Trajectory] = field(default_factory=dict)
    """The trajectory that each sample is a branch of, by the sample's `id`."""
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
    groups: Sequence[Group],
    config: Config,
    version: int,
    algorithm: Algorithm | None = None,
    oldest: int | None = None,
) -> SampleBatch:
    """Make a step's samples with their advantages.

    Args:
        version: Optimizer steps that the trainer has taken.
        algorithm: Built from `config.algorithm`; None builds it.
        oldest: Oldest weight version whose tokens are trained (`RecentVersions.oldest`); None
            assumes that every step took `training.updates_per_step` optimizer steps.

    Raises:
        InputError: when the user's `Advantage` does not fit its groups.

    Example:
        batch = make_samples(groups, config, version=0)
        metrics = await trainer.train(batch.samples)
    """
    algorithm = algorithm or make_algorithm(config.algorithm)
    oldest = oldest_version(config, version) if oldest is None else oldest
    advantages = compute_advantages(groups, config, oldest, algorithm)
    return samples_of(advantages, config, oldest, algorithm)


def samples_of(
    advantages: Sequence[GroupAdvantages], config: Config, oldest: int, algorithm: Algorithm
) -> SampleBatch:
    """Return the samples of groups whose advantages are known, and account for every token.

    A group with fewer than two finished trajectories gives no sample; see `Group.dropped`. A group
    without signal counts in the batch's totals, and is computed only if there is more to train than
    its advantages; it gives no sample with `algorithm.dynamic_sampling`, which replaces it by
    another group, nor for a loss that compares pairs. Tokens of versions before `oldest` are
    masked. The arguments are those of `make_samples`.
    """
    batch = SampleBatch()
    for scored in advantages:
        group = scored.group
        _account_dropped(group, batch.report)
        if scored.untrained == "stale_group":
            batch.stale_groups += 1
            batch.drop(group.trajectories, "stale_group")
            continue
        batch.overlong += sum(overlong(t, config) < 0 for t in group.trajectories)
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
        sample = Sample.of(
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
            experts=branch.experts,
        )
        batch.samples.append(sample)
        batch.origins[id(sample)] = trajectory


def _token_advantages(branch: Branch, advantage: TurnAdvantages) -> float | list[float]:
    """Return the advantage of each token of a branch."""
    if not isinstance(advantage, list):
        return advantage
    return [0.0 if turn < 0 else advantage[turn] for turn in branch.turns]


def _token_rewards(branch: Branch, trajectory: Trajectory, reward: TurnAdvantages) -> list[float]:
    """Return the reward of each token of a branch."""
    rewards = [0.0] * len(branch.token_ids)
    last = {turn: t for t, turn in enumerate(branch.turns) if branch.response_mask[t]}
    shares = trajectory.turn_rewards or [0.0] * len(trajectory.turns)
    for turn, share in enumerate(shares):
        if turn in last:
            rewards[last[turn]] += share
    if last:
        total = reward[max(last)] if isinstance(reward, list) else reward
        rewards[max(last.values())] += total - sum(_of_same_player(trajectory, shares, max(last)))
    return rewards


def _of_same_player(trajectory: Trajectory, values: Sequence[float], turn: int) -> Sequence[float]:
    """Return the values of the turns of the player who took `turn`; without players, all."""
    players = trajectory.turn_players
    if not players:
        return values
    return [value for value, who in zip(values, players, strict=True) if who == players[turn]]


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


def _fresh(trajectory: Trajectory, oldest: int) -> bool:
    """Return whether any token of a trajectory is recent enough to train."""
    return any(v >= oldest for turn in trajectory.turns for v in turn.weight_versions)


def _account_dropped(group: Group, report: ExactnessReport) -> None:
    for reason, count in group.dropped_tokens.items():
        report.tokens_sampled += count
        report.masked[f"dropped_{reason}"] += count
