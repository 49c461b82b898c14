"""The stream of problems: its order, its epochs, and how it is stopped and gone on with."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InputError
from turnwise.rollouts import Problem, ProblemStream


def problems(count: int) -> list[Problem]:
    return [Problem(f"rows:{number}", {"n": number}) for number in range(1, count + 1)]


@given(
    count=st.integers(1, 9), takes=st.lists(st.integers(0, 25), max_size=6), seed=st.integers(0, 3)
)
def test_each_epoch_is_the_seeds_shuffle_for_takes_of_any_size(
    count: int, takes: list[int], seed: int
) -> None:
    rows = problems(count)
    stream = ProblemStream(rows, seed)
    taken = [problem for number in takes for problem in stream.take(number)]
    endless = itertools.chain.from_iterable(
        random.Random(f"{seed}-{epoch}").sample(rows, count) for epoch in itertools.count()
    )
    assert taken == list(itertools.islice(endless, sum(takes)))


@given(count=st.integers(1, 9), before=st.integers(0, 40), after=st.integers(0, 40))
def test_a_restored_stream_goes_on_where_the_first_stopped(
    count: int, before: int, after: int
) -> None:
    first = ProblemStream(problems(count), 7)
    first.take(before)
    state = json.loads(json.dumps(first.state()))
    second = ProblemStream(problems(count), 7)
    second.take(3)
    second.restore(state)
    assert second.state() == state
    assert second.take(after) == first.take(after)


def test_a_state_of_other_data_is_refused_and_changes_nothing() -> None:
    stream = ProblemStream(problems(5), 0)
    stream.take(2)
    before = stream.state()
    with pytest.raises(InputError, match="stopped with 4 problems and now has 5; give it the s"):
        stream.restore(ProblemStream(problems(4), 0).state())
    assert stream.state() == before


def test_rows_may_keep_their_own_order() -> None:
    stream = ProblemStream(problems(3), 7, shuffle=False)
    assert [problem.row["n"] for problem in stream.take(7)] == [1, 2, 3, 1, 2, 3, 1]
    later = ProblemStream(problems(3), 7, shuffle=False)
    later.restore(stream.state())
    assert [problem.row["n"] for problem in later.take(2)] == [2, 3]


def test_no_problems_are_no_stream() -> None:
    with pytest.raises(InputError, match="no problems"):
        ProblemStream([], 0)
