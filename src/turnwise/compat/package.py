"""Helpers for environments from Python packages: checks of names, rows with seeds, rewards of
turns.

A package is imported when it is first used; docs/how-to/public-environments.md has examples.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import partial

from turnwise.errors import InputError
from turnwise.rollouts.environment import EnvironmentType, Rewards
from turnwise.rollouts.problems import Row

HELD_OUT = 1_000_000_000  # first seed of held-out rows; the first seed of training rows is 0


def check_name(environment: str, known: Collection[str]) -> None:
    """Raise an `InputError` if a package does not have the environment `PACKAGE:NAME`; the error
    suggests the closest known name."""
    package, _, name = environment.partition(":")
    if name not in known:
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {package}:{close[0]}?" if close else ""
        raise InputError(f"environment: {package} has no {name!r}{hint}")


def adapter(
    package: str, kind: EnvironmentType, argument: str, known: Callable[[], Collection[str]]
) -> Callable[[str], EnvironmentType]:
    """Return a function that resolves the NAME in `environment: PACKAGE:NAME`.

    Args:
        kind: The environment's class.
        argument: The argument of `kind` that gets the name.
        known: Function that returns the names of the package's environments.
    """

    def at(name: str) -> EnvironmentType:
        check_name(f"{package}:{name}", known())
        return partial(kind, **{argument: name})

    return at


def seed_rows(split: str, count: int) -> list[Row]:
    """Return `count` rows with one seed each; training and evaluation have different seeds."""
    first = HELD_OUT if split == "eval" else 0
    return [{"seed": first + number} for number in range(count)]


def turn_rewards(earned: Mapping[int, float], turns: int) -> Rewards:
    """Return the rewards of a trajectory's `turns` turns; turns not in `earned` get 0."""
    return Rewards(turns=[earned.get(turn, 0.0) for turn in range(turns)])
