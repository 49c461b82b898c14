from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import TrajectoryError
from turnwise.trajectory import Trajectory, Turn, read_jsonl, write_jsonl

ids = st.lists(st.integers(0, 200_000), max_size=8)
floats = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
text = st.text(max_size=12)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(ids)
    size = len(sampled)
    return Turn(
        added_token_ids=draw(ids),
        completion_token_ids=sampled,
        logprobs=draw(st.lists(floats, min_size=size, max_size=size)),
        weight_versions=draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        added_logprobs=draw(st.none() | st.lists(st.none() | floats, max_size=4)),
    )


trajectories = st.builds(
    Trajectory,
    problem_id=text,
    sample_index=st.integers(0, 9),
    turns=st.lists(turns(), max_size=4),
    messages=st.lists(st.fixed_dictionaries({"role": text, "content": text}), max_size=3),
    reward=st.none() | st.floats(allow_nan=False),
    status=st.sampled_from(["completed", "length"]),
    events=st.dictionaries(text, st.integers(1, 5)).map(Counter),
)


@given(trajectories)
def test_json_loses_nothing(trajectory: Trajectory) -> None:
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@given(trajectories)
def test_all_views_are_aligned(trajectory: Trajectory) -> None:
    length = len(trajectory.token_ids)
    mask = trajectory.response_mask
    assert len(mask) == len(trajectory.logprobs) == len(trajectory.weight_versions) == length
    assert sum(mask) == trajectory.sampled_tokens
    for masked, logprob, version in zip(
        mask, trajectory.logprobs, trajectory.weight_versions, strict=True
    ):
        assert masked or (logprob == 0.0 and version == -1)


def test_a_file_of_trajectories_reads_back(tmp_path: Path) -> None:
    written = [Trajectory("a", 0), Trajectory("b\n\u2028", 1, reward=0.1 + 0.2)]
    write_jsonl(tmp_path / "deep" / "file.jsonl", written)
    assert list(read_jsonl(tmp_path / "deep" / "file.jsonl")) == written
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file.jsonl"]


def test_a_turn_stores_only_what_it_adds() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    turn = trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.3], [1], "stop")
    assert turn.added_token_ids == [5]
    assert trajectory.token_ids == [1, 2, 3, 4, 5, 6]
    assert trajectory.response_mask == [0, 0, 1, 1, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.3]
    assert trajectory.weight_versions == [-1, -1, 0, 0, -1, 1]


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4], [1, 2, 3], []])
def test_a_prompt_that_changes_the_past_is_refused(prompt: list[int]) -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    with pytest.raises(TrajectoryError, match="does not continue the 4 tokens") as error:
        trajectory.add_turn(prompt, [6], [-0.3], [1], "stop")
    assert error.value.reason == "prefix_changed"
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    "turn", [([3], [], [0]), ([3], [-0.1], []), ([], [-0.1], [])], ids=["logprob", "version", "id"]
)
def test_a_token_without_its_logprob_or_version_is_refused(turn: tuple[Any, Any, Any]) -> None:
    with pytest.raises(TrajectoryError, match="lengths differ"):
        Trajectory("p").add_turn([1], *turn, "stop")


def test_the_final_text_is_the_last_assistant_message() -> None:
    trajectory = Trajectory("p")
    assert trajectory.final_text == ""
    trajectory.messages = [
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "last"},
        {"role": "tool", "content": "7"},
    ]
    assert trajectory.final_text == "last"
