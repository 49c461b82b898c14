"""From a step's groups to training samples: rewards -> advantages -> samples, each token audited.

Without players, the trajectories of a group are compared with each other. In a game, the turns of
one player are compared with the same player's turns in the other trajectories. The audit's report
contains every trajectory, either as trained or with the reason why it is not trained.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from turnwise.config import AlgorithmConfig, Config, RewardConfig, TeacherConfig
from turnwise.errors import InputError
from turnwise.rollouts import Group
from turnwise.training.algorithms import Advantage, Algorithm, make_algorithm
from turnwise.training.algorithms.advantages import has_signal, overlong_penalty
from turnwise.training.algorithms.losses import choose_pairs
from turnwise.training.sample import Sample
from turnwise.trajectory import Branch, ExactnessReport, Trajectory, audit
from turnwise.trajectory.turn import ADVANTAGE, FORCED, MASK, TEACHER

_Advantages = Mapping[int, Sequence[float]]
"""Advantage of each turn of a trajectory, by the trajectory's index in its group."""


_PLAIN = Advantage()  # all tokens of a turn have its advantage


@dataclass(slots=True)
class SampleBatch:
    """The samples that a step trains on, and an account of the rest."""

    samples: list[Sample] = field(default_factory=list)
    """Samples with trained tokens, and an empty sample for each policy and `truncated` trajectory,
    which counts in the batch's mean. Empty if there is nothing to train on."""
    origins: dict[int, Trajectory] = field(default_factory=dict)
    """The trajectory of each sample that has tokens, by `id(sample)`."""
    report: ExactnessReport = field(default_factory=ExactnessReport)
    """Audit of every sampled token."""
    groups_without_signal: int = 0
    """Number of groups whose advantages are all 0."""
    stale_groups: int = 0
    """Number of groups dropped because one of their tokens was older than the bound."""
    stale_tokens: int = 0
    """Number of tokens masked because they were older than the bound."""
    overlong: int = 0
    """Number of trajectories whose reward was reduced because of their length."""
    truncated: int = 0
    """Number of trajectories left out of the loss because they ended at a length limit."""

    def drop(self, trajectories: Iterable[Trajectory], reason: str) -> None:
        """Record in the audit that these trajectories give no sample, for this reason."""
        for trajectory in trajectories:
            self.report += audit(trajectory, [], masked=reason)


class RewardRules(NamedTuple):
    """The parts of a configuration that decide how rewards are compared."""

    algorithm: AlgorithmConfig
    weights: dict[str, float]
    """Weights of the entries of `rollout.rewards`, by name."""
    max_length: int
    policies: list[str]

    @classmethod
    def of(cls, config: Config) -> "RewardRules":
        entries = config.rollout.rewards or [RewardConfig()]
        weights = {entry.label: entry.weight for entry in entries}
        return cls(config.algorithm, weights, config.model.max_length, config.policies)


def make_samples(
    groups: Sequence[Group],
    config: Config,
    version: int,
    algorithm: Algorithm | None = None,
    oldest: int | None = None,
) -> SampleBatch:
    """Make a step's samples with their advantages, and account for every token.

    A group with fewer than two finished trajectories gives no sample; see `Group.dropped`. A group
    without signal, in which all advantages are 0, counts in the batch's totals; its tokens are
    computed only if they matter for more than their advantages, for instance for a penalty. It
    gives no sample with `algorithm.dynamic_sampling`, which replaces the group by a new one, nor
    for a loss that compares pairs.

    Args:
        version: Number of optimizer steps that the trainer has taken.
        algorithm: Built from `config.algorithm`; None builds it.
        oldest: Oldest weight version whose tokens are trained, from `Config.recent_versions`.
            Older tokens are masked; with `training.stale_policy: drop`, groups with older tokens
            are dropped. None assumes that every step took `Config.versions_per_step` optimizer
            steps.

    Raises:
        InputError: when the user's `Advantage` does not fit its groups.
    """
    algorithm, rules = algorithm or make_algorithm(config.algorithm), RewardRules.of(config)
    oldest = config.recent_versions(version)[0] if oldest is None else oldest
    batch, fresh = SampleBatch(), list[Group]()
    for group in groups:
        for reason, count in group.dropped_tokens.items():
            batch.report.tokens_sampled += count
            batch.report.masked[f"dropped_{reason}"] += count
        turns = (turn for t in group.trajectories for turn in t.turns if not turn.untrained)
        versions = (v for turn in turns for v in turn.weight_versions if v != FORCED)
        if config.training.stale_policy == "drop" and min(versions, default=0) < oldest:
            batch.stale_groups += 1
            batch.drop(group.trajectories, "stale_group")
        else:
            fresh.append(group)
    teachers = config.teachers()
    for group, advantages in zip(fresh, _of_groups(fresh, rules, algorithm), strict=True):
        teacher = teachers.get(group.environment)
        _add_group(batch, group, advantages, rules, oldest, algorithm, teacher)
    # Any reward is informative to a value model, and penalties train without advantages.
    always = algorithm.advantage.needs_values or config.algorithm.has_penalties
    if not any(
        not s.counted_only and (always or any(s.teacher_weights) or s.advantages_T.any())
        for s in batch.samples
    ):
        batch.samples = []
    return batch


def _add_group(
    batch: SampleBatch,
    group: Group,
    advantages: _Advantages | None,
    rules: RewardRules,
    oldest: int,
    algorithm: Algorithm,
    teacher: TeacherConfig | None,
) -> None:
    batch.overlong += sum(_overlong(t, rules) < 0 for t in group.trajectories)
    if advantages is None and len(group.trajectories) < 2:
        batch.drop(group.trajectories, "alone")
        return
    # With a value model these are rewards, and any reward is informative.
    silent = advantages is None or not (
        teacher or algorithm.advantage.needs_values or any(map(any, advantages.values()))
    )
    batch.groups_without_signal += silent
    if advantages is None or (silent and rules.algorithm.dynamic_sampling):
        batch.drop(group.trajectories, "no_signal")
        return
    pair_id = None
    if algorithm.loss.needs_pairs:
        pair = [group.trajectories[index] for index in advantages]  # the chosen trajectory first
        # A pair compares whole trajectories; versions of tokens that are not trained are negative.
        versions = [
            [v for branch in t.samples() for v in branch.weight_versions if v >= 0] for t in pair
        ]
        if min(min(each, default=-1) for each in versions) < max(0, oldest):
            batch.stale_groups += 1
            batch.drop(group.trajectories, "stale_group")
            return
        others = (t for index, t in enumerate(group.trajectories) if index not in advantages)
        batch.drop(others, "unpaired")
        pair_id = len(batch.samples)
    parts = rules.algorithm
    # Without penalties, tokens with advantage 0 add nothing to the gradient. But with a quantile,
    # their entropies affect which other tokens are trained.
    needed = parts.has_penalties or parts.entropy.top_quantile < 1
    for index, advantage in advantages.items():
        trajectory = group.trajectories[index]
        if parts.mask_truncated and trajectory.status in ("length", "context_full"):
            batch.truncated += 1
            batch.drop([trajectory], "truncated")
            for policy in rules.policies:  # add a sample that only counts in the batch's mean
                number, none = len(batch.samples), list[int]()
                own = Sample.of(none, none, none, none, 0.0, number, counted_only=True)
                batch.samples.append(replace(own, policy=policy))
            continue
        add_trajectory(
            batch,
            trajectory,
            advantage,
            oldest,
            pair_id,
            counted_only=silent and not needed,
            estimator=algorithm.advantage,
            teacher=teacher,
        )


def add_trajectory(
    batch: SampleBatch,
    trajectory: Trajectory,
    advantage: Sequence[float],
    oldest: int,
    pair_id: int | None = None,
    *,
    counted_only: bool = False,
    estimator: Advantage = _PLAIN,
    teacher: TeacherConfig | None = None,
    as_sampled: bool = True,
) -> None:
    """Add the branches of a trajectory as samples, with the advantage of each turn.

    Tokens of weight versions before `oldest` are context, which is not trained. Each token is
    scored under the distribution that it was drawn from; without `as_sampled`, it is scored under
    the run's `sampling`. A value model gets rewards in place of advantages: each turn's own reward
    is at the turn's last token, and the rest of the reward is at the last token of each branch.
    """
    branches = trajectory.samples(oldest)
    if counted_only:
        batch.drop([trajectory], "no_signal")
    else:
        stale = sum(sum(turn.trainable()) for turn in trajectory.turns)
        stale -= sum(sum(branch.response_mask) for branch in branches)
        batch.stale_tokens += stale
        batch.report += audit(trajectory, branches, masked="stale" if stale else None)
    first, turns = len(batch.samples), trajectory.turns
    if estimator.needs_values:
        for branch in branches:
            branch.scatter(ADVANTAGE, _token_rewards(branch, trajectory, advantage))
    else:
        estimator.annotate(trajectory, advantage)
    own = {
        number: turn.distribution
        for number, turn in enumerate(turns)
        if as_sampled and turn.distribution is not None
    }
    names = {name for turn in turns for name in turn.streams} - {ADVANTAGE, MASK}
    if teacher is None:
        names -= {TEACHER}
    assert teacher is None or teacher.in_ranks or not branches or TEACHER in names, "not scored"
    for branch in branches:
        # In a pair, each whole trajectory is a sequence; otherwise each branch is one.
        sample = Sample.of(
            branch.ids,
            branch.response_mask,
            branch.logprobs,
            branch.weight_versions,
            branch.gather(ADVANTAGE),
            sequence=len(batch.samples) if pair_id is None else first,
            pair_id=pair_id,
            trajectory=first if pair_id is None else pair_id,
            counted_only=counted_only,
            calls=branch.turns,
            experts=branch.experts,
            streams={name: branch.gather(name) for name in sorted(names)},
            teacher_weights=(0.0, 0.0) if teacher is None else teacher.weights,
            distributions=own,
            allowed=branch.allowed if as_sampled else {},
            policy=_policy_of(branch, trajectory),
        )
        if sample.trained:
            batch.samples.append(sample)
            batch.origins[id(sample)] = trajectory


def _policy_of(branch: Branch, trajectory: Trajectory) -> str:
    """Return the policy that sampled a branch's trained tokens; raise InputError if several
    policies did."""
    if not any(turn.adapter for turn in trajectory.turns):
        return "policy"
    trained = {turn for turn, own in zip(branch.turns, branch.response_mask, strict=True) if own}
    names = sorted({trajectory.turns[turn].adapter or "policy" for turn in trained})
    if len(names) > 1:
        raise InputError(
            f"{trajectory.problem_id}: {' and '.join(names)} sampled turns of one conversation, "
            "and each policy needs a conversation of its own to be trained"
        )
    return names[0] if names else "policy"


def _token_rewards(
    branch: Branch, trajectory: Trajectory, reward: Sequence[float]
) -> Sequence[float]:
    rewards = [0.0] * len(branch.ids)
    last = {turn: t for t, turn in enumerate(branch.turns) if branch.response_mask[t]}
    if not last:
        return rewards
    shares = trajectory.turn_rewards or [0.0] * len(trajectory.turns)
    for turn, t in last.items():
        rewards[t] += shares[turn]
    end, players = max(last), trajectory.turn_players or [""] * len(shares)
    given = (share for share, who in zip(shares, players, strict=True) if who == players[end])
    rewards[max(last.values())] += reward[end] - sum(given)
    return rewards


@dataclass(slots=True)
class _Side:
    """The turns of one player in a trajectory; without players, all turns."""

    index: int  # index of the trajectory in its group
    turns: list[int]  # indices of its turns
    reward: float
    turn_rewards: list[float]  # of each turn; the last turn's includes the rest of `reward`
    parts: dict[str, float]  # parts of the reward, for `Advantage.of_objectives`
    advantages: list[float] | None = None  # of each turn; None if the side is not trained


def _sides(group: Group, rules: RewardRules, *, by_part: bool) -> list[list[_Side]]:
    """Return a list for each player: the player's side of each trajectory. The sides in one list
    are compared with each other."""
    sides: dict[str, list[_Side]] = {}
    for index, trajectory in enumerate(group.trajectories):
        penalty = _overlong(trajectory, rules)
        by_turn = trajectory.turn_rewards or [0.0] * len(trajectory.turns)
        players = trajectory.turn_players or [""] * len(by_turn)
        rewards = trajectory.player_rewards or {"": trajectory.reward or 0.0}
        for player in dict.fromkeys(players) or [""]:
            turns = [turn for turn, who in enumerate(players) if who == player]
            own, total = [by_turn[turn] for turn in turns], rewards[player] + penalty
            if own:
                own[-1] += total - sum(own)
            parts = _parts(trajectory, penalty, rules) if by_part else {}
            sides.setdefault(player, []).append(_Side(index, turns, total, own, parts))
    return list(sides.values())


def _parts(trajectory: Trajectory, penalty: float, rules: RewardRules) -> dict[str, float]:
    """Return the parts of a trajectory's reward that `Advantage.of_objectives` compares."""
    if trajectory.player_rewards:
        raise InputError(
            f"algorithm.advantage {rules.algorithm.advantage.name} compares the parts of a "
            "trajectory's reward, and players of a game have one reward each: choose another"
        )
    weights, given = rules.weights, trajectory.reward_parts
    if not given:  # a program gave the reward, as a whole
        weights = {"reward": 1.0}
    parts = {name: value for name, value in given.items() if name in weights}
    if len(weights) == 1:  # compare the named parts of the only entry's reward, and the remainder
        ((label, weight),) = weights.items()
        total = given.get(label, trajectory.reward or 0.0)
        parts = {name: weight * value for name, value in given.items() if name != label}
        parts[label] = round(weight * total - sum(parts.values()), 9)
    return parts | ({"overlong_penalty": penalty} if rules.algorithm.overlong_tokens else {})


def _of_groups(
    groups: Sequence[Group], rules: RewardRules, algorithm: Algorithm
) -> list[_Advantages | None]:
    """Return the advantages of each group: 0 without signal, None if the group is not trained.

    For a loss that compares pairs, the advantages are 1 for the chosen trajectory and -1 for the
    rejected one, in this order.
    """
    if algorithm.loss.needs_pairs:
        pairs = [(group, choose_pairs(_rewards(group, rules))) for group in groups]
        return [
            None
            if pair is None
            else {
                i: [a] * len(group.trajectories[i].turns)
                for i, a in zip(pair, (1.0, -1.0), strict=True)
            }
            for group, pair in pairs
        ]
    by_part = algorithm.advantage.multi_objective
    sides = [_sides(group, rules, by_part=by_part) for group in groups]
    _compare([same for group in sides for same in group], rules, algorithm)
    merged: list[_Advantages | None] = []
    for group, of_group in zip(groups, sides, strict=True):
        trained = [side for same in of_group for side in same if side.advantages is not None]
        advantages = {index: [0.0] * len(t.turns) for index, t in enumerate(group.trajectories)}
        for side in trained:
            for turn, advantage in zip(side.turns, side.advantages or [], strict=True):
                advantages[side.index][turn] = advantage
        merged.append(advantages if trained else None)
    return merged


def _compare(compared: Sequence[Sequence[_Side]], rules: RewardRules, algorithm: Algorithm) -> None:
    """Set the advantages of the sides that are trained."""
    advantage, name = algorithm.advantage, rules.algorithm.advantage.name
    if advantage.per_turn:
        for same in compared:
            given = advantage.of_turns([side.turn_rewards for side in same])
            turns = [len(side.turns) for side in same]
            if given is not None and (found := [len(a) for a in given]) != turns:
                raise InputError(
                    f"algorithm.advantage: {name} returns {found} advantages for trajectories of "
                    f"{turns} turns"
                )
            for side, own in zip(same, [] if given is None else given, strict=False):
                side.advantages = list(own)  # the user's `Advantage` may return an array
        return
    if advantage.multi_objective:
        weights = rules.weights
        by_part = [[side.parts for side in same] for same in compared]
        of_groups = advantage.of_objectives(by_part, weights if len(weights) > 1 else {})
    else:
        of_groups = advantage.of_groups([[side.reward for side in same] for same in compared])
    lengths = [None if group is None else len(group) for group in of_groups]
    sizes = [len(same) for same in compared]
    if len(lengths) != len(sizes) or any(
        n is not None and n != size for n, size in zip(lengths, sizes, strict=True)
    ):
        raise InputError(
            f"algorithm.advantage: {name} returns {lengths} advantages for groups of {sizes} "
            "trajectories"
        )
    for same, values in zip(compared, of_groups, strict=True):
        for side, value in zip(same, [] if values is None else values, strict=False):
            side.advantages = [value] * len(side.turns)


def _rewards(group: Group, rules: RewardRules) -> list[float]:
    """Return the rewards to train on, which include DAPO's penalty for nearly full contexts."""
    return [(t.reward or 0.0) + _overlong(t, rules) for t in group.trajectories]


def _overlong(trajectory: Trajectory, rules: RewardRules) -> float:
    algorithm = rules.algorithm
    length = max((turn.path_length for turn in trajectory.turns), default=0)
    return overlong_penalty(
        length, rules.max_length, algorithm.overlong_tokens, algorithm.overlong_penalty
    )


def gives_signal(group: Group, rules: RewardRules, algorithm: Algorithm) -> bool:
    """Return whether the rewards that the algorithm compares (of turns or of trajectories) differ
    within the group. This may call the user's `Advantage`."""
    if algorithm.loss.needs_pairs:
        return choose_pairs(_rewards(group, rules)) is not None
    advantage = algorithm.advantage
    sides = _sides(group, rules, by_part=advantage.multi_objective)
    if (advantage.per_turn or advantage.multi_objective) and not advantage.needs_values:
        _compare(sides, rules, algorithm)
        return any(any(side.advantages or []) for same in sides for side in same)
    return any(has_signal([side.reward for side in same]) for same in sides)
