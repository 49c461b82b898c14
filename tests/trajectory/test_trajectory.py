import doctest
import importlib
import json
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import TrajectoryError
from turnwise.trajectory import (
    FORCED,
    Outcome,
    Prompt,
    Trajectory,
    audit,
    read_jsonl,
    write_jsonl,
)
from turnwise.trajectory.allowed import described_sets, pack_allowed, sets_of
from turnwise.trajectory.records import fingerprint
from turnwise.trajectory.trajectory import status_after
from turnwise.trajectory.turn import ADVANTAGE

ids = st.lists(st.integers(0, 3), max_size=6)
floats = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
text = st.text(max_size=12)
Calls = list[tuple[list[int], list[int]]]


@st.composite
def attempts(draw: st.DrawFn) -> tuple[Trajectory, Calls]:
    """A trajectory and its calls of the engine: turns that go on, retries, edits, new starts."""
    trajectory = Trajectory(
        problem_id=draw(text),
        sample_index=draw(st.integers(0, 9)),
        messages=draw(st.lists(st.fixed_dictionaries({"role": text, "content": text}), max_size=3)),
        status=draw(st.sampled_from(["completed", "length"])),
        events=Counter(draw(st.dictionaries(text, st.integers(1, 5)))),
        outcome=Outcome(
            draw(st.none() | st.floats(allow_nan=False)),
            draw(st.dictionaries(text, floats, max_size=2)),
        ),
    )
    calls: Calls = []
    for version in range(draw(st.integers(0, 6))):
        past: list[int] = []
        if calls and draw(st.integers(0, 9)):
            prompt, completion = draw(st.sampled_from(calls))
            past = [*prompt, *completion]
            if draw(st.booleans()):
                past = past[: draw(st.integers(0, len(past)))]
        prompt, sampled = [*past, *draw(ids)], draw(ids)
        logprobs = draw(st.lists(floats, min_size=len(sampled), max_size=len(sampled)))
        versions = [version] * len(sampled)
        trajectory.add_turn(prompt, sampled, logprobs, versions, "stop")
        calls.append((prompt, sampled))
    return trajectory, calls


@given(attempts())
def test_json_loses_nothing(attempt: tuple[Trajectory, Calls]) -> None:
    trajectory, _ = attempt
    copy = Trajectory.from_json(trajectory.to_json())
    assert copy == trajectory
    for each in (copy, trajectory):
        each.add_turn([0, 1], [2], [-0.5], [9], "stop")
    assert copy == trajectory


@given(attempts())
def test_every_call_lies_on_a_branch(attempt: tuple[Trajectory, Calls]) -> None:
    trajectory, calls = attempt
    branches = trajectory.branches()
    for index, (prompt, completion) in enumerate(calls):
        assert trajectory.prompt_token_ids(index) == prompt
        path = [*prompt, *completion]
        assert any(branch.token_ids[: len(path)] == path for branch in branches)


@given(attempts())
def test_each_sampled_token_is_trained_in_one_sample(attempt: tuple[Trajectory, Calls]) -> None:
    trajectory, calls = attempt
    samples = trajectory.samples()
    assert sum(sum(sample.response_mask) for sample in samples) == trajectory.sampled_tokens
    trained: list[tuple[int, ...]] = []
    for sample in samples:
        views = (sample.response_mask, sample.logprobs, sample.weight_versions)
        assert {len(view) for view in views} == {len(sample.token_ids)}
        for position, (masked, logprob, version) in enumerate(zip(*views, strict=True)):
            if masked:  # versions tell the calls apart
                trained.append((version, *sample.token_ids[: position + 1]))
            else:
                assert (logprob, version) == (0.0, -1)
    assert sorted(trained) == sorted(
        (version, *prompt, *completion[: i + 1])
        for version, (prompt, completion) in enumerate(calls)
        for i in range(len(completion))
    )
    assert audit(trajectory).tokens_exact == trajectory.sampled_tokens


def test_a_file_of_trajectories_reads_back(tmp_path: Path) -> None:
    written = [Trajectory("a", 0), Trajectory("b\n\u2028", 1, outcome=Outcome(0.1 + 0.2))]
    write_jsonl(tmp_path / "deep" / "file.jsonl", written)
    assert list(read_jsonl(tmp_path / "deep" / "file.jsonl")) == written
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file.jsonl"]


def test_a_file_without_the_parts_of_the_reward_reads_too() -> None:
    written = Trajectory("a", outcome=Outcome(1.0))
    tree = json.loads(written.to_json())
    del tree["reward_parts"]
    assert Trajectory.from_json(json.dumps(tree)) == written


def test_a_turn_stores_only_what_it_adds() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    turn = trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.3], [1], "stop")
    assert turn.added_token_ids == [5]
    (branch,) = trajectory.branches()
    assert branch.leaf == 1
    assert branch.token_ids == [1, 2, 3, 4, 5, 6]
    assert branch.response_mask == [0, 0, 1, 1, 0, 1]
    assert branch.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, -0.3]
    assert branch.weight_versions == [-1, -1, 0, 0, -1, 1]


def test_a_prompt_that_leaves_the_past_begins_a_branch_there() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.3], [0], "stop")
    retry = trajectory.add_turn([1, 2, 3, 4, 5], [7], [-0.4], [0], "stop", fork_reason="retry")
    assert (retry.parent, retry.prefix_length, retry.added_token_ids) == (1, 5, [])
    edited = trajectory.add_turn([1, 2, 3, 8], [9], [-0.5], [0], "stop")
    assert (edited.prefix_length, edited.added_token_ids) == (3, [8])
    assert [turn.fork_reason for turn in trajectory.turns] == [
        None, None, "retry", "new_conversation",
    ]  # fmt: skip
    assert [sample.response_mask for sample in trajectory.samples()] == [
        [0, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1],
    ]


def test_memory_grows_with_the_tokens_and_not_with_the_turns() -> None:
    trajectory, prompt = Trajectory("p"), [1]
    for turn in range(2000):
        trajectory.add_turn(prompt, [turn] * 10, [-0.1] * 10, [0] * 10, "stop")
        prompt = [*prompt, *[turn] * 10, 2, 3]
    stored = sum(len(t.added_token_ids) + len(t.completion_token_ids) for t in trajectory.turns)
    assert stored == len(prompt) - 2
    trajectory.add_turn([1, 9], [9], [-0.1], [0], "stop")
    assert [len(branch.token_ids) for branch in trajectory.branches()] == [stored, 3]


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


@pytest.mark.parametrize("name", ["trajectory", "turn", "prompt", "provenance", "images"])
def test_the_examples_of_the_docstrings_run(name: str) -> None:
    module = importlib.import_module(f"turnwise.trajectory.{name}")
    results = doctest.testmod(module, extraglobs={"Trajectory": Trajectory, "np": np})
    assert results.attempted > 1
    assert results.failed == 0


@given(attempts(), st.data())
def test_chosen_rows_train_what_was_sampled_and_nothing_twice(
    attempt: tuple[Trajectory, Calls], data: st.DataObject
) -> None:
    trajectory, _ = attempt
    rows: list[tuple[list[int], list[int]]] = []
    for branch in trajectory.branches():
        end = data.draw(st.integers(0, len(branch.token_ids)))
        mask = data.draw(st.lists(st.integers(0, 1), min_size=end, max_size=end))
        rows.append((branch.token_ids[:end], mask))
    trajectory.choose(rows)
    report = audit(trajectory)
    assert report.first_violation is None
    assert report.tokens_trained <= sum(sum(mask) for _, mask in rows)
    again = Trajectory.from_json(trajectory.to_json())
    assert again == trajectory
    assert again.samples() == trajectory.samples()


def test_a_trained_row_that_differs_from_the_sample_is_refused() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 7], [-0.1, -0.2], [0, 1], "stop")
    with pytest.raises(TrajectoryError, match=r"row 0 has token 8 at position 5, where .* has 6"):
        trajectory.choose([([1, 2, 3, 4, 5, 8, 7], [0, 0, 1, 1, 0, 1, 1])])
    assert not any(turn.streams for turn in trajectory.turns)
    trajectory.choose([([1, 2, 3, 4, 5, 8, 7], [0, 0, 1, 1, 0, 0, 0])])  # beyond what is trained
    assert trajectory.samples()[0].response_mask == [0, 0, 1, 1]
    assert audit(trajectory).masked == {"not_chosen": 2}
    trajectory.choose([([1, 2, 3, 4, 5, 6, 7, 9], [1] * 8)])  # what nobody sampled is left out
    (sample,) = trajectory.samples()
    assert sample.response_mask == [0, 0, 1, 1, 0, 1, 1]
    assert sample.weight_versions == [-1, -1, 0, 0, -1, 0, 1]
    assert audit(trajectory).masked == {}


@given(attempts(), st.data())
def test_what_is_scattered_over_branches_is_gathered_from_them(
    attempt: tuple[Trajectory, Calls], data: st.DataObject
) -> None:
    """Whatever branches share, and whatever masks and forced tokens leave out."""
    trajectory, _ = attempt
    for index, turn in enumerate(trajectory.turns):
        size = len(turn.completion_token_ids)
        versions = [data.draw(st.sampled_from([FORCED, 3, 3])) for _ in range(size)]
        trajectory.turns[index] = turn = replace(turn, weight_versions=versions)
        if data.draw(st.booleans()):
            mask = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
            turn.streams["mask"] = np.asarray(mask, np.float32)
    trained: dict[tuple[int, int], float] = {}  # by turn and place
    for number, sample in enumerate(trajectory.samples()):
        values_T = np.arange(len(sample.ids), dtype=np.float32) + 1000 * (number + 1)
        sample.scatter("credit", values_T)
        starts = [trajectory.turns[turn].prompt_length for turn in sample.turns]
        for at, (turn, start) in enumerate(zip(sample.turns, starts, strict=True)):
            if sample.response_mask[at]:
                assert (turn, at - start) not in trained, "trained twice"
                trained[turn, at - start] = float(values_T[at])
    expected = {
        (index, place)
        for index, turn in enumerate(trajectory.turns)
        for place, version in enumerate(turn.weight_versions)
        if version != FORCED and ("mask" not in turn.streams or turn.streams["mask"][place])
    }
    assert trained.keys() == expected
    for sample in trajectory.samples():
        gathered_T = sample.gather("credit")
        for at, turn in enumerate(sample.turns):
            place = at - trajectory.turns[turn].prompt_length
            assert gathered_T[at] == (trained[turn, place] if sample.response_mask[at] else 0.0)
    assert not trajectory.samples() or not trajectory.samples()[0].gather("unknown").any()


def test_files_of_older_runs_keep_their_masks_and_teachers() -> None:
    trajectory = Trajectory("a", outcome=Outcome(1.0))
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.3], [0], "stop")
    tree = json.loads(trajectory.to_json())
    tree["turns"][1]["same_call"] = True
    tree |= {"chosen": [[1, [0, 0, 1, 0, 0, 1]]], "teacher_logprobs": [[0, 0, -1.5, 0, 0, -2.5]]}
    (sample,) = Trajectory.from_tree(tree).samples()
    assert sample.response_mask == [0, 0, 1, 0, 0, 1]
    assert sample.gather("teacher").tolist() == [0, 0, -1.5, 0, 0, -2.5]
    tree |= {"chosen": None, "teacher_logprobs": []}
    assert Trajectory.from_tree(tree) == trajectory


def test_a_forced_token_is_context_of_its_turn() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1], [2, 3, 4], [-0.1, 0.0, -0.2], [5, FORCED, 5], "stop")
    assert trajectory.sampled_tokens == 2
    (sample,) = trajectory.samples()
    assert sample.response_mask == [0, 1, 0, 1]
    assert sample.weight_versions == [-1, 5, -1, 5]
    report = audit(trajectory)
    assert (report.violations, report.tokens_sampled, report.tokens_exact) == (0, 2, 2)
    sample.response_mask[2] = 1
    assert "trained but was not sampled" in str(audit(trajectory, [sample]).first_violation)


def test_a_prompt_is_its_turns_while_another_turn_is_recorded() -> None:
    """A thread that has seen the turns, but not yet the path of the last one."""
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3], [-0.1], [0], "stop")
    seen = trajectory._last
    trajectory.add_turn([1, 9], [4], [-0.1], [0], "stop")
    assert trajectory.prompt(0) == [1, 2]
    trajectory._last = seen
    assert [trajectory.prompt(index).tolist() for index in (0, 1)] == [[1, 2], [1, 9]]


def test_a_turn_keeps_its_adapter_and_decides_the_status() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1], [2], [-0.5], [0], "stop", adapter="ada")
    again = Trajectory.from_tree(json.loads(trajectory.to_json()))
    assert again.turns[0].adapter == trajectory.turns[0].adapter == "ada"
    assert [status_after(why) for why in ("length", "stop")] == ["length", "completed"]


def test_a_parent_that_comes_later_is_refused_by_its_code() -> None:
    trajectory = Trajectory("p")
    trajectory.add_turn([1], [2], [-0.5], [0], "stop")
    tree = json.loads(trajectory.to_json())
    tree["turns"][0]["parent"] = 0
    with pytest.raises(TrajectoryError, match="turn 0: parent 0 is not before it") as caught:
        Trajectory.from_tree(tree)
    assert caught.value.reason == "inconsistent_turn"


def test_advantages_are_not_written_with_the_other_streams() -> None:
    trajectory = Trajectory("p")
    turn = trajectory.add_turn([1], [2], [-0.5], [0], "stop")
    turn.streams.update({name: np.ones(1, np.float32) for name in (ADVANTAGE, "own")})
    (written,) = json.loads(trajectory.to_json())["turns"]
    assert [*written["streams"]] == ["own"]


def test_a_fingerprint_depends_on_every_allowed_set() -> None:
    one, two, three = (pack_allowed(bytes([bits])) for bits in (1, 2, 3))
    prints = {
        fingerprint(Prompt([1]), [2, 3], [-0.5, -0.5], [0, 0], None, allowed)
        for allowed in ((one, two), (three, two), (one, three), ())
    }
    assert len(prints) == 4


def test_sets_of_allowed_ids_are_described_once_each() -> None:
    one, two = (pack_allowed(bytes([bits, 0])) for bits in (1, 2))
    described = described_sets([one, two, one])
    assert described["tokens"] == [0, 1, 0]
    assert len(described["sets"]) == 2
    assert sets_of(json.loads(json.dumps(described))) == (one, two, one)
    assert zlib.decompress(one) == bytes([1, 0])
