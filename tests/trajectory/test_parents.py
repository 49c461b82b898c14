"""The search for a prompt's parent finds what comparing it with every path would find."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.trajectory import Image, PlacedImage, PromptIds, Trajectory, parents
from turnwise.trajectory.images import as_seen, extended, placed
from turnwise.trajectory.parents import common_prefix
from turnwise.trajectory.trajectory import Turn

RED, BLUE = (Image.of(data, "png", 28, 28) for data in (b"red", b"blue"))
IMAGES = [
    PromptIds([0] * length, [PlacedImage(i, 0, length)]) for i in (RED, BLUE) for length in (1, 2)
]
parts = st.lists(st.integers(0, 2).map(lambda id: [id]) | st.sampled_from(IMAGES), max_size=4)


def plain_search(
    trajectory: Trajectory, prompt: Sequence[int], images: bool
) -> tuple[int | None, int]:
    """Return the last turn if the prompt has its whole path, or else the first turn of those whose
    path has the most in common with it."""
    shared = []
    for index, turn in enumerate(trajectory.turns):
        path = extended(trajectory.prompt_token_ids(index), turn.completion_token_ids)
        pair = [as_seen(ids, placed(ids) if images else ()) for ids in (prompt, path)]
        shared.append(common_prefix(*pair))
    if shared and shared[-1] == len(path):
        return len(shared) - 1, len(path)
    longest = max(shared, default=0)
    return (shared.index(longest) if longest else None), longest


@given(st.data())
def test_the_parent_is_the_one_of_a_search_through_all_paths(data: st.DataObject) -> None:
    """Of turns with images, forks from any place, and forced tokens."""
    trajectory, sent = Trajectory("p"), list[list[int]]()

    def drawn() -> list[int]:
        begin: list[int] = []
        if sent and data.draw(st.booleans()):
            begin = data.draw(st.sampled_from(sent))
            if data.draw(st.booleans()):
                cut = data.draw(st.integers(0, len(begin)))
                kept = [each for each in placed(begin) if each.end <= cut]
                begin = PromptIds(begin[:cut], kept)
        return extended(begin, *data.draw(parts))

    for _ in range(data.draw(st.integers(1, 8))):
        for prompt in (drawn(), drawn()):
            for images in (True, False):
                found = trajectory.find_parent(prompt, images=images)
                assert found == plain_search(trajectory, prompt, images)
        sampled = data.draw(st.lists(st.integers(0, 2), max_size=4))
        versions = [data.draw(st.sampled_from([-1, 0])) for _ in sampled]
        trajectory.add_turn(prompt, sampled, [-0.5] * len(sampled), versions, "stop")
        sent.append(extended(prompt, sampled))


@given(st.data())
def test_turns_of_a_file_may_have_any_parent_before_them(data: st.DataObject) -> None:
    turns = list[Turn]()
    for index in range(data.draw(st.integers(0, 6))):
        parent = data.draw(st.none() | st.integers(0, index - 1)) if index else None
        most = 0 if parent is None else turns[parent].path_length
        added, sampled = (data.draw(st.lists(st.integers(0, 1), max_size=3)) for _ in range(2))
        ones = [-0.5] * len(sampled), [0] * len(sampled)
        start = data.draw(st.integers(0, most))
        turns.append(Turn(added, sampled, *ones, "stop", parent=parent, prefix_length=start))
    trajectory = Trajectory.from_json(Trajectory("p", turns=turns).to_json())
    prompt = data.draw(st.lists(st.integers(0, 1), max_size=12))
    assert trajectory.find_parent(prompt) == plain_search(trajectory, prompt, images=True)


def test_a_search_reads_no_more_ids_than_the_prompt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of sub-agents that all begin with the same ids."""
    read = 0

    def counting(a: Sequence[int], b: Sequence[int]) -> int:
        nonlocal read
        read += len(b)
        return common_prefix(a, b)

    monkeypatch.setattr(parents, "common_prefix", counting)
    trajectory, given_ids = Trajectory("p"), 0
    for agent in range(200):
        prompt = [1] * 50
        for turn in range(5):
            prompt = [*prompt, 1_000 * agent + turn, *[2] * 20]
            given_ids += len(prompt)
            trajectory.add_turn(prompt, [3], [-0.1], [0], "stop")
            prompt = prompt[:-1] if turn % 2 else [*prompt, 3]  # the template changes the past
    assert read < 2 * given_ids
