"""Admission: the order of starts, the limits, and their division among processes."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.admission import (
    OPEN,
    Admission,
    Limits,
    Place,
    Priority,
    Use,
    divide,
    divide_limits,
)

TRAINING, EVALUATION = Priority.TRAINING, Priority.EVALUATION


class Line:
    """Tasks that run until the test releases them; `began` has the order in which they started."""

    def __init__(self, *limits: Any, **more: Any) -> None:
        self.admission = Admission(Limits(*limits, **more))
        self.began: list[str] = []
        self.places: dict[str, Place] = {}
        self.gates: dict[str, asyncio.Event] = {}

    def start(self, name: str, priority: Priority = TRAINING) -> "asyncio.Task[None]":
        self.gates[name] = asyncio.Event()

        async def hold() -> None:
            async with self.admission.admitted(priority) as place:
                self.began.append(name)
                self.places[name] = place
                await self.gates[name].wait()

        return asyncio.create_task(hold())

    async def end(self, *tasks: "asyncio.Task[None]") -> None:
        for gate in self.gates.values():
            gate.set()
        await asyncio.gather(*tasks)
        assert self.admission.use == Use(limits=self.admission.limits), "nothing is left"


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_go_by_priority_and_then_by_order_of_arrival() -> None:
    line = Line(1)
    tasks = [line.start("a")]
    await settled()
    tasks += [line.start(name, EVALUATION) for name in ("eval1", "eval2")]
    tasks += [line.start(name) for name in ("b", "c")]
    tasks += [line.start("judge", Priority.SCORING)]
    for name in ("a", "judge", "b", "c", "eval1", "eval2"):
        await settled()
        assert line.began[-1] == name
        line.gates[name].set()
    await line.end(*tasks)


async def test_free_room_is_taken_by_whoever_comes() -> None:
    line = Line(2)
    tasks = [line.start("eval", EVALUATION), line.start("a"), line.start("b")]
    await settled()
    assert line.began == ["eval", "a"]
    line.gates["eval"].set()
    await settled()
    assert line.began == ["eval", "a", "b"]
    await line.end(*tasks)


async def test_evaluations_fill_the_places_that_training_leaves() -> None:
    line = Line(8, background=3)
    names = ["a", "b", "c", "d"]
    tasks = [line.start(name) for name in names]
    tasks += [line.start(name, EVALUATION) for name in ("eval1", "eval2")]
    await settled()
    assert line.began == names, "there is room, but the step's trajectories are not over"
    for name, began in (("a", []), ("b", ["eval1"]), ("c", ["eval1", "eval2"])):
        line.gates[name].set()
        await settled()
        assert line.began == [*names, *began]
    await line.end(*tasks)


async def test_a_larger_limit_acts_at_once_and_a_smaller_ends_nobody() -> None:
    line = Line(2)
    tasks = [line.start(name) for name in "abcdefgh"]
    await settled()
    assert line.began == ["a", "b"]
    line.admission.limits = Limits(5)
    await settled()
    assert line.began == ["a", "b", "c", "d", "e"], "nobody has to end before"
    line.admission.limits = Limits(2)
    for name in ("a", "b", "c"):
        line.gates[name].set()
    await settled()
    assert len(line.began) == 5
    line.gates["d"].set()
    await settled()
    assert line.began[5:] == ["f"]
    await line.end(*tasks)
    assert line.began == list("abcdefgh")


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_cancelled_wait_loses_no_place(handed_over: bool) -> None:
    line = Line(1)
    first = line.start("first")
    await settled()
    gone, after = line.start("gone"), line.start("after")
    await settled()
    if handed_over:  # in the same turn of the event loop
        line.gates["first"].set()
        await asyncio.sleep(0)
    gone.cancel()
    line.gates["first"].set()
    await settled()
    assert line.began[-1] == "after"
    line.gates["after"].set()
    await asyncio.gather(first, after)
    line.start("next")
    await settled()
    assert line.began[-1] == "next"
    line.gates["next"].set()
    await settled()


async def test_a_wait_for_a_tool_lends_its_place_and_resumes_at_once() -> None:
    line = Line(2)
    tasks = [line.start(name) for name in "abc"]
    await settled()
    with line.places["a"].idle():
        await settled()
        assert line.began == ["a", "b", "c"]
        with line.places["a"].working():
            assert line.admission.use.working == 3
        assert line.admission.use.working == 2
    assert (line.admission.use.working, line.admission.use.playing) == (3, 3)
    await line.end(*tasks)


async def test_playing_includes_waits_for_tools_but_not_for_rewards() -> None:
    line = Line(8, playing=2)
    tasks = [line.start(name) for name in "abcd"]
    await settled()
    with line.places["a"].idle():
        await settled()
        assert line.began == ["a", "b"]
    line.places["a"].played()
    await settled()
    assert line.began == ["a", "b", "c"]
    use = line.admission.use
    assert (use.working, use.playing, use.open, use.waiting) == (2, 2, 3, 1)
    await line.end(*tasks)


@pytest.mark.parametrize("limits", [Limits(2), Limits(9, 2)])
async def test_slow_rewards_do_not_lift_the_limit_of_open_trajectories(limits: Limits) -> None:
    line = Line(limits.working, limits.playing)
    tasks = [line.start(str(number)) for number in range(4 * OPEN)]
    for _ in tasks:
        await settled()
        for place in line.places.values():
            place.played()
    assert len(line.began) == 2 * OPEN
    line.gates["0"].set()
    await settled()
    assert len(line.began) == 2 * OPEN + 1
    while len(line.began) < len(tasks):
        for name in list(line.began):
            line.gates[name].set()
        await settled()
    await line.end(*tasks)


async def test_a_further_attempt_goes_before_those_that_came_later() -> None:
    admission, began = Admission(Limits(1)), list[str]()

    async def attempts(name: str, count: int) -> None:
        arrival = admission.arrive()
        for number in range(count):
            async with admission.admitted(arrival=arrival):
                began.append(f"{name}{number}")
                await settled()

    await asyncio.gather(attempts("a", 3), attempts("b", 1), attempts("c", 1))
    assert began == ["a0", "b0", "a1", "c0", "a2"], "what was handed on stays so"


async def test_what_outlives_its_trajectory_counts_nothing() -> None:
    admission = Admission(Limits(1))
    async with admission.admitted() as place:
        idle = place.idle()
        idle.__enter__()
    idle.__exit__(None, None, None)
    with place.working():
        place.played()
    assert admission.use == Use(limits=Limits(1))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_counts_are_those_of_a_simple_model(data: st.DataObject) -> None:
    """Whatever trajectories do, in whatever order."""

    async def play() -> None:
        line = Line(data.draw(st.integers(1, 4)), data.draw(st.none() | st.integers(1, 4)))
        tasks, idle, played = list["asyncio.Task[None]"](), dict[str, Any](), set[str]()
        for number in range(data.draw(st.integers(1, 25))):
            under_way = [name for name in line.began if not line.gates[name].is_set()]
            busy = [name for name in under_way if name not in idle and name not in played]
            away = sorted(idle.keys() & set(under_way) - played)
            moves = ["start", *["idle", "play"] * bool(busy), *["return"] * bool(away)]
            move = data.draw(st.sampled_from([*moves, *["end"] * bool(under_way)]))
            if move == "start":
                tasks.append(line.start(str(len(tasks))))
            elif move == "idle":
                idle[busy[0]] = line.places[busy[0]].idle()
                idle[busy[0]].__enter__()
            elif move == "play":
                line.places[busy[-1]].played()
                played.add(busy[-1])
            elif move == "return":
                idle.pop(away[0]).__exit__(None, None, None)
            else:
                line.gates[under_way[number % len(under_way)]].set()
            await settled()
            under_way = [name for name in line.began if not line.gates[name].is_set()]
            playing = [name for name in under_way if name not in played]
            use, limits = line.admission.use, line.admission.limits
            assert use.open == len(under_way)
            assert use.playing == len(playing)
            assert use.working == sum(name not in idle for name in playing)
            assert use.waiting == len(tasks) - len(line.began)
            if limits.playing is not None:
                assert use.playing <= limits.playing
            if use.waiting:
                assert not limits.room(use, TRAINING), "nobody waits while there is room"
        await line.end(*tasks)

    asyncio.run(play())


small = st.integers(0, 9)


@given(st.integers(0, 30), st.lists(st.tuples(small, small), min_size=1, max_size=5))
def test_a_limit_is_divided_as_equally_as_wants_allow(
    total: int, parts: list[tuple[int, int]]
) -> None:
    used, more = map(list, zip(*parts, strict=True))
    wanted = [use + one for use, one in zip(used, more, strict=True)]
    shares = divide(total, wanted, used, [0] * len(parts))
    if sum(used) > total:
        shares = divide(total, wanted, used, used)
        assert shares == used
        return
    assert sum(shares) == total
    assert all(share >= use for share, use in zip(shares, used, strict=True))
    short = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    if short:  # nobody has more than the least of these, and one, but what it uses
        rows = zip(shares, used, strict=True)
        assert all(share <= max(use, min(short) + 1) for share, use in rows)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_processes_never_have_more_in_progress_than_the_limit(data: st.DataObject) -> None:
    """Not even while orders and reports travel; and in the end the whole limit is used."""
    count, total = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    limits = Limits(total, total, total)
    own = [Limits(0, 0, 0)] * count  # by which each acts
    ordered, reported = list(own), [Use()] * count
    used, wants = [0] * count, [0] * count

    def begin(place: int) -> None:
        more = max(0, min(wants[place], own[place].working - used[place]))
        used[place] += more
        wants[place] -= more

    def report(place: int) -> None:
        reported[place] = Use(used[place], used[place], 0, wants[place], 0, own[place])
        ordered[:] = divide_limits(limits, reported, ordered)
        assert [each.playing for each in ordered] == [each.working for each in ordered]

    for _ in range(data.draw(st.integers(1, 30))):
        place = data.draw(st.integers(0, count - 1))
        move = data.draw(st.sampled_from(["want", "end", "report", "obey"]))
        if move == "want":
            wants[place] += 3
        elif move == "end" and used[place]:
            used[place] -= 1
        elif move == "obey":
            own[place] = ordered[place]
        elif move == "report":
            report(place)
        begin(place)
        assert sum(used) <= total
    for place in [*range(count)] * 8:
        own[place] = ordered[place]
        begin(place)
        report(place)
        assert sum(used) <= total
    assert sum(used) == min(total, sum(used) + sum(wants))


def test_use_beyond_a_lowered_limit_is_not_given_away() -> None:
    """The last process has two in progress and has obeyed an order for none; the second may have
    begun three since its report, so that nothing of five is left for the first."""
    none, three = Limits(0, 0, 0), Limits(3, 3, 3)
    uses = [Use(0, 0, 0, 5, 0, none), Use(0, 0, 0, 0, 0, three), Use(2, 2, 0, 0, 0, none)]
    orders = divide_limits(Limits(5, 5, 5), uses, [none, three, none])
    assert [order.working for order in orders] == [0, 0, 2]
