"""Calculator word problems: chains of two or three operations, each on the last result.

A problem is a row with the fields `question`, `answer`, `phrasing` and `steps`, the list of
`[a, operation, b]`. Numbers in a question have two to four digits, results lie between 0 and
99999. Every number of two or more digits belongs to training or to the held-out set, decided
by its hash: a held-out question contains held-out numbers only, and no held-out number occurs
in a training problem, as an operand or as a result. The same seed gives the same rows.
"""

import json
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .phrasings import PHRASINGS, SEEN, UNSEEN, Phrasing, Step

Row = dict[str, Any]

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_LARGEST_RESULT = 99_999
_HELD_OUT_ONE_IN = 8
_FORGETS = 0.75
_ANY_OPERATION = 0.2


def is_held_out(number: int) -> bool:
    """Return whether a number is reserved for the held-out set; single digits never are."""
    return number >= 10 and (number * 2_654_435_761 % 2**32 >> 16) % _HELD_OUT_ONE_IN == 0


def _numbers_by_digits(held_out: bool) -> dict[int, list[int]]:
    return {
        digits: [n for n in range(10 ** (digits - 1), 10**digits) if is_held_out(n) == held_out]
        for digits in (2, 3, 4)
    }


_NUMBERS = {held_out: _numbers_by_digits(held_out) for held_out in (False, True)}


def _draw_steps(rng: random.Random, held_out: bool) -> list[Step] | None:
    """Return one chain of operations, or None when a result is out of bounds or held out."""
    numbers = _NUMBERS[held_out]
    value = rng.choice(numbers[rng.randint(2, 4)])
    steps: list[Step] = []
    for _ in range(rng.randint(2, 3)):
        operation = rng.choice("+-*")
        number = rng.choice(numbers[2 if operation == "*" else rng.randint(2, 4)])
        step = (value, operation, number)
        if not _within_bounds(value := _result(step), held_out):
            return None
        steps.append(step)
    return steps


def _result(step: Step) -> int:
    a, operation, b = step
    return _OPERATIONS[operation](a, b)


def _within_bounds(result: int, held_out: bool) -> bool:
    return 0 <= result <= _LARGEST_RESULT and (held_out or not is_held_out(result))


def _draw(rng: random.Random, phrasing: Phrasing, held_out: bool) -> Row:
    while (steps := _draw_steps(rng, held_out)) is None:
        pass
    return {
        "question": phrasing.render(steps, rng),
        "answer": _result(steps[-1]),
        "phrasing": phrasing.name,
        "steps": steps,
    }


def demonstrations(seed: int) -> Iterator[Row]:
    """Yield endless training problems, in the seen phrasings, solved by a careless teacher.

    `steps` and `answer` are the teacher's: it often forgets the third of three steps, and sometimes
    does a random operation instead of the right one.
    """
    rng = random.Random(f"warm start {seed}")
    while True:
        row = _draw(rng, rng.choice(SEEN), held_out=False)
        if (done := _carelessly(row["steps"], rng)) is not None:
            yield {**row, "steps": done, "answer": _result(done[-1])}


def _carelessly(steps: list[Step], rng: random.Random) -> list[Step] | None:
    """Return the teacher's version of a problem's steps; None if a result is out of bounds."""
    forgets = len(steps) == 3 and rng.random() < _FORGETS
    done: list[Step] = []
    value = steps[0][0]
    for _, operation, number in steps[: len(steps) - forgets]:
        if rng.random() < _ANY_OPERATION:
            operation = rng.choice("+-*")
        step = (value, operation, number)
        if not _within_bounds(value := _result(step), held_out=False):
            return None
        done.append(step)
    return done


def number_rows(seed: int) -> Iterator[list[int]]:
    """Yield endless rows of one to six training numbers, for learning to copy digits."""
    rng = random.Random(f"numbers {seed}")
    numbers = _NUMBERS[False]
    while True:
        yield [rng.choice(numbers[rng.randint(2, 4)]) for _ in range(rng.randint(1, 6))]


def train_problems(count: int, seed: int) -> list[Row]:
    """Return problems for reinforcement learning, in all phrasings."""
    rng = random.Random(f"train {seed}")
    return [_draw(rng, rng.choice(PHRASINGS), held_out=False) for _ in range(count)]


def heldout_problems(count: int, seed: int) -> list[Row]:
    """Return problems on held-out numbers, every second one in an unseen phrasing."""
    rng = random.Random(f"held out {seed}")
    pools = (SEEN, UNSEEN)
    return [_draw(rng, rng.choice(pools[i % 2]), held_out=True) for i in range(count)]


def write_rows(rows: list[Row], path: Path) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
