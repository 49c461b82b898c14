"""From rewards to advantages: what is compared within a group, and with which result.

Without players, a group's trajectories are compared; in a game, each player's part of them with the
same player's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.rollouts import Group
from turnwise.training.algorithms import Algorithm, choose_pairs, has_signal, overlong_penalty
from turnwise.trajectory import Trajectory

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


def compute_advantages(
    groups: Sequence[Group], config: Config, oldest: int, algorithm: Algorithm
) -> list[GroupAdvantages]:
    """Return the advantages of a step's trajectories, from the rewards of their groups.

    A group with tokens of versions before `oldest` is left out with `training.stale_policy: drop`.
    A group without signal has advantages of 0; it contains no pair for a loss that compares pairs.
    The arguments are those of `make_samples`.
    """
    stale: list[Group] = []
    fresh: list[Group] = []
    for group in groups:
        drop = config.training.stale_policy == "drop" and _oldest(group) < oldest
        (stale if drop else fresh).append(group)
    if algorithm.loss.needs_pairs:
        by_index = [_pair_advantages(_rewards(group, config)) for group in fresh]
    else:
        sides = [_sides(group, config) for group in fresh]
        if algorithm.advantage.per_turn:
            of_sides = [[_of_turns(s, config, algorithm) for s in group] for group in sides]
        else:
            of_sides = _advantages(sides, config, algorithm)
        by_index = [
            _merged(group, of_group, advantages)
            for group, of_group, advantages in zip(fresh, sides, of_sides, strict=True)
        ]
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


@dataclass(frozen=True, slots=True)
class _Side:
    """The part of a trajectory that one player played; without players, the whole."""

    index: int
    """Index of the trajectory in its group."""
    turns: list[int]
    """Indices of its turns."""
    reward: float
    turn_rewards: list[float]
    """Reward of each turn; the last one's includes the rest of `reward`."""


def _sides(group: Group, config: Config) -> list[list[_Side]]:
    """Return what is compared within a group: for each player, this player's part of each
    trajectory; without players, the trajectories."""
    sides: dict[str, list[_Side]] = {}
    for index, trajectory in enumerate(group.trajectories):
        penalty = overlong(trajectory, config)
        by_turn = trajectory.turn_rewards or [0.0] * len(trajectory.turns)
        players = trajectory.turn_players or [""] * len(trajectory.turns)
        rewards = trajectory.player_rewards or {"": trajectory.reward or 0.0}
        for player in dict.fromkeys(players) or [""]:
            turns = [turn for turn, who in enumerate(players) if who == player]
            own, total = [by_turn[turn] for turn in turns], rewards[player] + penalty
            if own:
                own[-1] += total - sum(own)
            sides.setdefault(player, []).append(_Side(index, turns, total, own))
    return list(sides.values())


def _merged(
    group: Group,
    sides: Sequence[Sequence[_Side]],
    advantages: Sequence[list[TurnAdvantages] | None],
) -> dict[int, TurnAdvantages] | None:
    """Return the advantages of trajectories by index, or None if the group is not trained."""
    if all(of_side is None for of_side in advantages):
        return None
    if not any(trajectory.turn_players for trajectory in group.trajectories):
        ((only,), (found,)) = sides, advantages
        return {side.index: value for side, value in zip(only, found or (), strict=True)}
    merged = {index: [0.0] * len(t.turns) for index, t in enumerate(group.trajectories)}
    for same, values in zip(sides, advantages, strict=True):
        for side, value in zip(same, values or [0.0] * len(same), strict=True):
            own = value if isinstance(value, list) else [value] * len(side.turns)
            for turn, advantage in zip(side.turns, own, strict=True):
                merged[side.index][turn] = advantage
    return dict(merged)


def _of_turns(
    sides: Sequence[_Side], config: Config, algorithm: Algorithm
) -> list[TurnAdvantages] | None:
    """Return the advantages of the turns of each side, or None if they are not trained."""
    advantages = algorithm.advantage.of_turns([side.turn_rewards for side in sides])
    if advantages is None:
        return None
    found, turns = [len(a) for a in advantages], [len(side.turns) for side in sides]
    if found != turns:
        raise InputError(
            f"algorithm.advantage: {config.algorithm.advantage.name} returns {found} advantages "
            f"for trajectories of {turns} turns"
        )
    return list(advantages)


def _pair_advantages(rewards: Sequence[float]) -> dict[int, TurnAdvantages] | None:
    """Return 1 for the chosen trajectory and -1 for the rejected one, or None without a pair."""
    pair = choose_pairs(rewards)
    return None if pair is None else {pair[0]: 1.0, pair[1]: -1.0}


def _advantages(
    groups: Sequence[Sequence[Sequence[_Side]]], config: Config, algorithm: Algorithm
) -> list[list[list[TurnAdvantages] | None]]:
    """Return the advantage of each side of each group, or None where sides are not trained."""
    rewards = [[side.reward for side in sides] for group in groups for sides in group]
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
    left = iter(advantages)
    return [[None if (a := next(left)) is None else list(a) for _ in group] for group in groups]


def gives_signal(group: Group, config: Config, algorithm: Algorithm) -> bool:
    """Return whether what the algorithm compares differs within the group.

    These are the rewards that would be trained on: of the turns, if turns have advantages of their
    own; otherwise, of the trajectories. May call the user's `Advantage`.
    """
    if algorithm.loss.needs_pairs:
        return choose_pairs(_rewards(group, config)) is not None
    sides = _sides(group, config)
    if algorithm.advantage.per_turn and not algorithm.advantage.needs_values:
        return any(_any(_of_turns(same, config, algorithm) or []) for same in sides)
    return any(has_signal([side.reward for side in same]) for same in sides)


def check_group_size(config: Config, algorithm: Algorithm) -> None:
    """Check that a group contains something to compare, if the algorithm compares within groups.

    Raises:
        InputError: when `sampling.n` is 1, and no group of one can be trained on.
    """
    parts = config.algorithm
    if config.sampling.n > 1:
        return
    if algorithm.loss.needs_pairs:
        compares = f"algorithm.loss {parts.loss.name}"
    elif parts.dynamic_sampling:
        compares = "algorithm.dynamic_sampling"
    elif config.data.curriculum:
        compares = "data.curriculum"
    elif not _trains_alone(algorithm):
        compares = f"algorithm.advantage {parts.advantage.name}"
    else:
        return
    raise InputError(
        f"{compares} compares the trajectories of a group, and sampling.n 1 has nothing to "
        "compare: raise sampling.n"
    )


def _trains_alone(algorithm: Algorithm) -> bool:
    """Return whether the `Advantage`, possibly the user's, accepts a group of one."""
    advantage = algorithm.advantage
    try:
        if advantage.per_turn:
            return advantage.of_turns([[1.0]]) is not None
        return advantage.of_groups([[1.0]])[0] is not None
    except Exception:  # such as a standard deviation of one number
        return False


def _rewards(group: Group, config: Config) -> list[float]:
    """Return the rewards that are trained on, with DAPO's penalty for nearly full contexts."""
    return [(t.reward or 0.0) + overlong(t, config) for t in group.trajectories]


def overlong(trajectory: Trajectory, config: Config) -> float:
    """Return DAPO's penalty, 0 or less."""
    algorithm = config.algorithm
    length = max((turn.path_length for turn in trajectory.turns), default=0)
    return overlong_penalty(
        length, config.model.max_length, algorithm.overlong_tokens, algorithm.overlong_penalty
    )


def _oldest(group: Group) -> int:
    return min(
        (v for t in group.trajectories for turn in t.turns for v in turn.weight_versions),
        default=0,
    )
