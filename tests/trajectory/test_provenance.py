"""The tree of calls finds the same as a comparison with every call."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.trajectory import Image, PlacedImage, Prompt, Trajectory, provenance
from turnwise.trajectory.prompt import common_length
from turnwise.trajectory.provenance import Provenance, SampledPart, without_overlap
from turnwise.trajectory.turn import Turn

RED, BLUE = (Image.of(data, "png", 28, 28) for data in (b"red", b"blue"))
IMAGES = [
    Prompt([0] * length, [PlacedImage(i, 0, length)]) for i in (RED, BLUE) for length in (1, 2)
]
parts = st.lists(st.integers(0, 2).map(lambda id: [id]) | st.sampled_from(IMAGES), max_size=4)
sampled_ids = st.lists(st.integers(0, 2), max_size=4)


def common(one: Prompt, other: Prompt, images: bool = True) -> int:
    """Compare prompts position by position."""

    def marks(prompt: Prompt) -> list[object]:
        shown = [each for each in prompt.images if images]
        ids = enumerate(prompt.tolist())
        return [(id, [each for each in shown if each.start <= at < each.end]) for at, id in ids]

    equal = [a == b for a, b in zip(marks(one), marks(other), strict=False)]
    return equal.index(False) if False in equal else len(equal)


def plain_search(trajectory: Trajectory, prompt: Prompt, images: bool) -> tuple[int | None, int]:
    """Return the last turn if the prompt has its whole path, or else the first turn of those whose
    path has the most in common with it."""
    shared = []
    for index, turn in enumerate(trajectory.turns):
        path = trajectory.prompt(index) + turn.completion_token_ids
        shared.append(common(prompt, path, images))
    if shared and shared[-1] == len(path):
        return len(shared) - 1, len(path)
    longest = max(shared, default=0)
    return (shared.index(longest) if longest else None), longest


@st.composite
def prompts(draw: st.DrawFn, sent: Sequence[Prompt]) -> Prompt:
    """A new prompt, or one that goes on with any beginning of an earlier path."""
    begin = Prompt()
    if sent and draw(st.booleans()):
        begin = draw(st.sampled_from(sent))
        if draw(st.booleans()):
            cut = draw(st.integers(0, len(begin)))
            begin = Prompt(begin.ids[:cut], [one for one in begin.images if one.end <= cut])
    return Prompt.joined(begin, *draw(parts))


@given(st.data())
def test_the_parent_is_the_one_of_a_search_through_all_paths(data: st.DataObject) -> None:
    """The turns have images, forks from any place, and forced tokens."""
    trajectory, sent = Trajectory("p"), list[Prompt]()
    for _ in range(data.draw(st.integers(1, 8))):
        for prompt in (data.draw(prompts(sent)), data.draw(prompts(sent))):
            for images in (True, False):
                found = trajectory.find_parent(prompt, images=images)
                assert found == plain_search(trajectory, prompt, images)
        sampled = data.draw(sampled_ids)
        versions = [data.draw(st.sampled_from([-1, 0])) for _ in sampled]
        trajectory.add_turn(prompt, sampled, [-0.5] * len(sampled), versions, "stop")
        sent.append(prompt + sampled)


@given(st.data())
def test_a_sequence_is_attributed_to_the_calls_that_sampled_it(data: st.DataObject) -> None:
    """Each id to a call whose prompt is all that comes before the call's first id, images included,
    and which sampled the ids from there on."""
    calls, sent = list[tuple[Prompt, list[int]]](), list[Prompt]()
    for _ in range(data.draw(st.integers(1, 8))):
        prompt, sampled = data.draw(prompts(sent)), data.draw(sampled_ids)
        calls.append((prompt, sampled))
        sent.append(prompt + sampled)
    tree = Provenance()
    for number, (prompt, sampled) in enumerate(calls):
        assert tree.add(prompt, sampled) == number
    sequence = data.draw(prompts(sent))
    right = [
        SampledPart(number, len(prompt), length)
        for number, (prompt, sampled) in enumerate(calls)
        if sequence.startswith(prompt)
        if (length := common(sequence[len(prompt) :], Prompt(sampled)))
    ]
    assert sorted(tree.matches(sequence)) == right
    found = tree.attribute(sequence)
    known = {(part.call, part.start): part.length for part in right}
    assert all(part.length <= known[part.call, part.start] for part in found)
    covered = [at for _, start, length in found for at in range(start, start + length)]
    assert covered == sorted({*covered}), "each id once, in order"
    assert {*covered} == {at for _, start, length in right for at in range(start, start + length)}


def test_equal_calls_are_named_in_turn() -> None:
    calls = Provenance()
    for _ in range(3):
        calls.add(Prompt([1, 2]), [3, 4])
    found = [calls.attribute(Prompt([1, 2, 3, 4]))[0].call for _ in range(4)]
    assert found == [0, 1, 2, 0]


@given(st.data())
def test_turns_of_a_file_may_have_any_parent_before_them(data: st.DataObject) -> None:
    turns = list[Turn]()
    for index in range(data.draw(st.integers(0, 6))):
        parent = data.draw(st.none() | st.integers(0, index - 1)) if index else None
        most = 0 if parent is None else turns[parent].path_length
        added, sampled = (data.draw(st.lists(st.integers(0, 1), max_size=3)) for _ in range(2))
        ones = [-0.5] * len(sampled), [0] * len(sampled)
        start = data.draw(st.integers(0, most))
        turns.append(
            Turn(Prompt(added), sampled, *ones, "stop", parent=parent, prefix_length=start)
        )
    trajectory = Trajectory.from_json(Trajectory("p", turns=turns).to_json())
    prompt = Prompt(data.draw(st.lists(st.integers(0, 1), max_size=12)))
    assert trajectory.find_parent(prompt) == plain_search(trajectory, prompt, images=True)


def test_a_search_reads_no_more_ids_than_the_prompt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of sub-agents that all begin with the same ids."""
    read = 0

    def counting(a_T: npt.NDArray[np.int32], b_T: npt.NDArray[np.int32]) -> int:
        nonlocal read
        read += min(len(a_T), len(b_T))
        return common_length(a_T, b_T)

    monkeypatch.setattr(provenance, "common_length", counting)
    trajectory, given_ids = Trajectory("p"), 0
    for agent in range(200):
        prompt = [1] * 50
        for turn in range(5):
            prompt = [*prompt, 1_000 * agent + turn, *[2] * 20]
            given_ids += len(prompt)
            trajectory.add_turn(prompt, [3], [-0.1], [0], "stop")
            prompt = prompt[:-1] if turn % 2 else [*prompt, 3]  # the template changes the past
    assert read < 2 * given_ids


def test_a_part_is_cut_where_one_that_reaches_further_begins() -> None:
    parts = [SampledPart(0, 0, 4), SampledPart(1, 2, 5), SampledPart(2, 3, 1)]
    assert without_overlap(parts) == [SampledPart(0, 0, 2), SampledPart(1, 2, 5)]
