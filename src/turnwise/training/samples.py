"""From a step's groups to training samples: advantages, stale tokens, the audit of it all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnwise.config import AlgorithmConfig, Config, Dpo, Gae
from turnwise.rollout import Group
from turnwise.training.algorithms import (
    choose_pairs,
    group_advantages,
    has_signal,
    overlong_penalty,
)
from turnwise.training.sample import Sample
from turnwise.trajectory import Branch, ExactnessReport, Trajectory, audit


@dataclass(slots=True)
class Made:
    """What a step trains on, and what became of the rest."""

    samples: list[Sample] = field(default_factory=list)
    """Each with trained tokens; none where nothing could be learned from any of them."""
    report: ExactnessReport = field(default_factory=ExactnessReport)
    groups_without_signal: int = 0
    """All of their advantages are 0."""
    stale_groups: int = 0
    """Dropped because a token in them was older than the bound."""
    stale_tokens: int = 0
    """Masked for the same reason."""
    overlong: int = 0
    """Trajectories that lost reward for their length."""


def make_samples(groups: Sequence[Group], config: Config, version: int) -> Made:
    """Samples with their advantages, for a trainer that has taken `version` optimizer steps.

    A group of which fewer than two trajectories came through gives no sample; `dropped` tells
    why. A group without signal counts in the batch's totals, and is computed where there is more
    to learn from it than its advantages; with `algorithm.dynamic_sampling`, which puts another
    group in its place, and for dpo, which finds no pair in it, it gives no sample. Tokens more
    than max_staleness training steps old are masked, or their group dropped.
    """
    made = Made()
    oldest = version - config.training.max_staleness * config.training.updates_per_step
    fresh: list[Group] = []
    for group in groups:
        _account_dropped(group, made.report)
        if config.training.stale == "drop" and _oldest(group) < oldest:
            made.stale_groups += 1
            _leave_out(made, group, "stale_group")
        else:
            fresh.append(group)
    rewards = [_rewards(group, config) for group in fresh]
    made.overlong = sum(_overlong(t, config) < 0 for g in fresh for t in g.trajectories)
    dpo = isinstance(config.algorithm.loss, Dpo)
    for group, sides in zip(fresh, _sides(config, rewards), strict=True):
        if sides is None and len(group.trajectories) < 2:
            _leave_out(made, group, "alone")
        elif sides is None or not _has_signal(sides, config.algorithm):
            made.groups_without_signal += 1
            if sides is None or config.algorithm.dynamic_sampling:
                _leave_out(made, group, "no_signal")
            else:
                _add_without_signal(made, group, config.algorithm, oldest)
        elif dpo:
            _add_pair(made, group, sides, oldest)
        else:
            for place, trajectory in enumerate(group.trajectories):
                _add(made, trajectory, sides[place], oldest)
    made.samples = [sample for sample in made.samples if sample.trained]
    if all(sample.counted_only for sample in made.samples):
        made.samples = []
    return made


def _sides(config: Config, rewards: Sequence[Sequence[float]]) -> list[dict[int, float] | None]:
    """For each group, the advantage of each trajectory that is trained; None trains none."""
    if isinstance(config.algorithm.loss, Dpo):
        pairs = map(choose_pairs, rewards)
        return [None if pair is None else {pair[0]: 1.0, pair[1]: -1.0} for pair in pairs]
    advantages = group_advantages(config.algorithm.advantage, rewards)
    return [None if group is None else dict(enumerate(group)) for group in advantages]


def _has_signal(sides: Mapping[int, float], algorithm: AlgorithmConfig) -> bool:
    """Whether the advantages say anything; those of gae are rewards, and any reward does."""
    return isinstance(algorithm.advantage, Gae) or any(sides.values()) or not sides


def _leave_out(made: Made, group: Group, reason: str) -> None:
    for trajectory in group.trajectories:
        made.report += audit(trajectory, [], masked=reason)


def _add_without_signal(made: Made, group: Group, algorithm: AlgorithmConfig, oldest: int) -> None:
    """A group whose advantages are all 0: without a KL penalty, what it adds to the gradient is
    known to be 0 and is not computed."""
    counted_only = not algorithm.kl.coef
    for trajectory in group.trajectories:
        _add(made, trajectory, 0.0, oldest, counted_only=counted_only)


def _add_pair(made: Made, group: Group, sides: Mapping[int, float], oldest: int) -> None:
    """The chosen trajectory and the rejected one; a half of them says nothing."""
    if not all(_fresh(group.trajectories[place], oldest) for place in sides):
        made.stale_groups += 1
        _leave_out(made, group, "stale_group")
        return
    for place, trajectory in enumerate(group.trajectories):
        if place not in sides:
            made.report += audit(trajectory, [], masked="unpaired")
    unit = len(made.samples)
    for place in sorted(sides, key=lambda place: -sides[place]):
        _add(made, group.trajectories[place], sides[place], oldest, unit)


def _add(
    made: Made,
    trajectory: Trajectory,
    advantage: float,
    oldest: int,
    unit: int | None = None,
    *,
    counted_only: bool = False,
) -> None:
    branches = trajectory.samples()
    masked = [_without_stale(branch, oldest) for branch in branches]
    if counted_only:
        made.report += audit(trajectory, [], masked="no_signal")
    else:
        stale = _trained(branches) - _trained(masked)
        made.stale_tokens += stale
        made.report += audit(trajectory, masked, masked="stale" if stale else None)
    first = len(made.samples)
    for branch in masked:
        # The two sides of a pair are whole trajectories; else a branch is a sequence.
        sequence = len(made.samples) if unit is None else first
        made.samples.append(
            Sample.of(
                branch.token_ids,
                branch.response_mask,
                branch.logprobs,
                branch.weight_versions,
                advantage,
                sequence=sequence,
                unit=unit,
                trajectory=first if unit is None else unit,
                counted_only=counted_only,
            )
        )


def _trained(branches: Sequence[Branch]) -> int:
    return sum(sum(branch.response_mask) for branch in branches)


def _without_stale(branch: Branch, oldest: int) -> Branch:
    """The branch with tokens of versions before `oldest` as context only."""
    if all(version >= oldest or version < 0 for version in branch.weight_versions):
        return branch
    mask = [
        int(bool(trained) and version >= oldest)
        for trained, version in zip(branch.response_mask, branch.weight_versions, strict=True)
    ]
    return replace(branch, response_mask=mask)


def _fresh(trajectory: Trajectory, oldest: int) -> bool:
    """Whether a token of it is young enough to train."""
    return any(v >= oldest for turn in trajectory.turns for v in turn.weight_versions)


def _oldest(group: Group) -> int:
    return min(
        (v for t in group.trajectories for turn in t.turns for v in turn.weight_versions),
        default=0,
    )


def gives_signal(group: Group, config: Config) -> bool:
    """Whether the rewards that would be trained on differ within the group."""
    return has_signal(_rewards(group, config))


def _rewards(group: Group, config: Config) -> list[float]:
    """The rewards that are trained on: DAPO's penalty for nearly full contexts included."""
    return [(t.reward or 0.0) + _overlong(t, config) for t in group.trajectories]


def _overlong(trajectory: Trajectory, config: Config) -> float:
    """DAPO's penalty, 0 or less."""
    algorithm = config.algorithm
    length = max((turn.path_length for turn in trajectory.turns), default=0)
    return overlong_penalty(
        length, config.model.max_length, algorithm.overlong_tokens, algorithm.overlong_penalty
    )


def _account_dropped(group: Group, report: ExactnessReport) -> None:
    for reason, count in group.dropped_tokens.items():
        report.tokens_sampled += count
        report.masked[f"dropped_{reason}"] += count
