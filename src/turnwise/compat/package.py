"""Shared parts of environments of Python packages: names, rows of seeds, rewards of turns.

A package is imported when it is first used; docs/how-to/public-environments.md has examples.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from functools import partial

from turnwise.errors import InputError
from turnwise.rollouts.environment import EnvironmentType, Rewards
from turnwise.rollouts.problems import Row

HELD_OUT = 1_000_000_000  # distance of the seeds of held-out rows from those of training rows


def check_name(environment: str, known: Collection[str]) -> None:
    """Raise an `InputError` if a package does not have an environment, `PACKAGE:NAME`, with the
    closest name that it has."""
    package, _, name = environment.partition(":")
    if name not in known:
        close = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {package}:{close[0]}?" if close else ""
        raise InputError(f"environment: {package} has no {name!r}{hint}")


def adapter(
    package: str, kind: EnvironmentType, argument: str, known: Callable[[], Collection[str]]
) -> Callable[[str], EnvironmentType]:
    """Return the function that makes `environment: PACKAGE:NAME` if the package knows the name,
    which is an argument of the class."""

    def at(name: str) -> EnvironmentType:
        check_name(f"{package}:{name}", known())
        return partial(kind, **{argument: name})

    return at


def seed_rows(split: str, count: int) -> list[Row]:
    """Return rows of a seed each, different ones for training and for evaluation."""
    first = HELD_OUT if split == "eval" else 0
    return [{"seed": first + number} for number in range(count)]


def turn_rewards(earned: Mapping[int, float], turns: int) -> Rewards:
    """Return rewards that were earned by turns, of which a trajectory has some number."""
    return Rewards(turns=[earned.get(turn, 0.0) for turn in range(turns)])
