import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.trajectory import ExactnessReport, Prompt, Trajectory, audit


def conversation() -> Trajectory:
    """Two turns, a retry of the second, and a new conversation: three branches."""
    trajectory = Trajectory("problem 7", sample_index=3)
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 7], [-0.3, -0.4], [0, 1], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [8], [-0.5], [1], "stop", fork_reason="retry")
    trajectory.add_turn([9], [10, 11], [-0.6, -0.7], [1, 1], "length")
    return trajectory


def test_an_exact_trajectory_passes() -> None:
    report = audit(conversation())
    assert report.first_violation is None
    assert (report.tokens_sampled, report.tokens_trained, report.tokens_exact) == (7, 7, 7)
    assert (report.turns, report.bridged) == (4, 1)
    assert report.forked == {"retry": 1, "new_conversation": 1}
    assert report.percent == 100.0
    assert str(report).startswith("exact      100 % of 7 trained tokens; 7 sampled\n")


def test_tokens_that_are_not_trained_have_a_reason() -> None:
    report = audit(conversation(), [], masked="no_signal")
    assert (report.tokens_trained, report.masked) == (0, {"no_signal": 7})
    assert "not trained: 7 no_signal" in str(report)


def test_one_corrupted_token_of_a_training_sample_is_named() -> None:
    trajectory = conversation()
    samples = trajectory.samples()
    ids = samples[0].token_ids
    ids[5] = 99
    samples[0] = replace(samples[0], ids=Prompt(ids))
    report = audit(trajectory, samples)
    assert report.first_violation == (
        "problem 7 sample 3, training sample 0: token 5 is 99, where turn 1 sampled 6"
    )
    assert report.tokens_exact == 2 + 1 + 2  # what stands before it, and the other branches
    assert "exact      71.42 % of 7" in str(report)


@given(st.data())
def test_one_corrupted_token_of_the_record_is_named(data: st.DataObject) -> None:
    trajectory = conversation()
    index = data.draw(st.integers(0, 3))
    turn = trajectory.turns[index]
    kind = "sampled" if not turn.added_token_ids or data.draw(st.booleans()) else "added"
    ids = turn.completion_token_ids if kind == "sampled" else turn.added_token_ids
    position, wrong = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(100, 999))
    right, ids[position] = ids[position], wrong
    if kind == "added":
        trajectory.turns[index] = replace(turn, added=Prompt(ids))
    report = audit(Trajectory.from_json(trajectory.to_json()))
    assert report.first_violation == (
        f"problem 7 sample 3, turn {index}: {kind} token {position} is {wrong}, "
        f"where {right} was recorded"
    )
    assert report.percent == 0.0


def test_several_corrupted_tokens_are_told() -> None:
    trajectory = conversation()
    trajectory.turns[1].completion_token_ids[:] = [7, 6]
    assert "several of its 3 token ids are not those recorded" in str(audit(trajectory))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_mask", 1, r"token 1 \(2\) is trained but was not sampled"),
        ("logprobs", -9.0, r"token 2 \(3\) has log-prob -9.0, where -0.1 was sampled"),
        ("weight_versions", 5, r"token 2 \(3\) has weight version 5, where 0 was sampled"),
        ("turns", 1, r"token 2 \(3\) has turn 1, where 0 was sampled"),
    ],
)
def test_everything_about_a_trained_token_is_compared(
    field: str, value: float, message: str
) -> None:
    trajectory = conversation()
    samples = trajectory.samples()
    getattr(samples[0], field)[1 if field == "response_mask" else 2] = value
    report = audit(trajectory, samples)
    with pytest.raises(AssertionError, match=message):
        assert report.first_violation is None, report.first_violation


def test_a_token_trained_twice_is_named() -> None:
    trajectory = conversation()
    report = audit(trajectory, trajectory.branches())
    assert report.first_violation == (
        "problem 7 sample 3, training sample 1: token 2 (3) is trained twice"
    )


def test_a_token_trained_nowhere_is_a_violation_without_a_reason() -> None:
    trajectory = conversation()
    samples = trajectory.samples()
    samples[0].response_mask[2] = 0
    report = audit(trajectory, samples)
    assert report.first_violation == (
        "problem 7 sample 3, 1 sampled tokens are in no training sample"
    )
    assert audit(trajectory, samples, masked="filtered").masked == {"filtered": 1}


def test_samples_that_are_no_branch_are_named() -> None:
    trajectory = conversation()
    sample = trajectory.samples()[0]
    shorter = replace(sample, ids=sample.ids[:-1])
    assert "7 tokens" not in str(audit(trajectory, [shorter]))
    assert "masks, log-probs, versions and turns of [7]" in str(audit(trajectory, [shorter]))
    assert "no branch that ends with turn 2" in str(audit(trajectory, [replace(sample, leaf=2)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": 3}, "its parent 3 is not a turn before it"),
        ({"parent": 1}, "its parent 1 is not a turn before it"),
        ({"parent": -1}, "its parent -1 is not a turn before it"),
        ({"parent": None, "prefix_length": 0}, "its prompt of 1 tokens is not the prompt of 5"),
        ({"prefix_length": 3}, "its prompt of 4 tokens is not the prompt of 5"),
        (
            {"logprobs": [-0.3, -5.0]},
            "its images, sampled tokens, log-probs, versions or sampling parameters",
        ),
        (
            {"weight_versions": [1, 1]},
            "its images, sampled tokens, log-probs, versions or sampling parameters",
        ),
        ({"prefix_length": 9}, "shares 9 tokens with a path of 4"),
        ({"logprobs": [-0.3, float("nan")]}, "sampled token 1 has log-prob nan"),
        ({"logprobs": [0.5, -0.1]}, "sampled token 0 has log-prob 0.5"),
        ({"weight_versions": [-2, 0]}, "sampled token 0 has weight version -2"),
        (
            {"weight_versions": [-1, 1]},  # as if it had been forced
            "its images, sampled tokens, log-probs, versions or sampling parameters",
        ),
    ],
)
def test_the_record_itself_is_checked(change: dict[str, object], message: str) -> None:
    trajectory = conversation()
    trajectory.turns[1] = replace(trajectory.turns[1], **change)  # type: ignore[arg-type]
    assert message in (audit(trajectory).first_violation or "")


def test_a_turn_on_an_engine_with_older_weights_is_exact() -> None:
    """Engines load an update each at its own time, and a conversation may move meanwhile."""
    trajectory = Trajectory("p")
    trajectory.add_turn([1], [2, 3], [-0.1, -0.1], [6, 7], "stop")
    trajectory.add_turn([1, 2, 3, 4], [5, 6], [-0.1, -0.1], [6, 7], "stop")
    report = audit(trajectory)
    assert (report.violations, report.tokens_exact) == (0, 4)


def test_a_parent_may_share_less_than_its_own_prompt() -> None:
    """A file may name any turn that shares the prefix, also one that adds none of its ids."""
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.2], [0, 0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6], [-0.3], [0], "stop")
    trajectory.add_turn([1, 2, 9], [7], [-0.4], [0], "stop")
    assert (trajectory.turns[2].parent, trajectory.turns[2].prefix_length) == (0, 2)
    trajectory.turns[2] = replace(trajectory.turns[2], parent=1)
    report = audit(trajectory)
    assert (report.first_violation, report.tokens_exact) == (None, 4)


def test_a_token_that_its_mask_leaves_out_is_not_trained() -> None:
    trajectory = conversation()
    samples = trajectory.samples()
    trajectory.turns[0].streams["mask"] = np.array([0, 1], np.float32)
    assert "its mask leaves it out" in str(audit(trajectory, samples).first_violation)
    report = audit(trajectory)
    assert (report.violations, report.tokens_exact, report.masked) == (0, 6, {"not_chosen": 1})


def test_reports_add_up() -> None:
    total = ExactnessReport()
    broken = conversation()
    broken.turns[0].completion_token_ids[0] = 77
    for report in (audit(conversation()), audit(broken), audit(conversation(), [], masked="x")):
        total += report
    assert (total.trajectories, total.tokens_sampled, total.tokens_trained) == (3, 21, 14)
    assert (total.tokens_exact, total.violations, total.masked) == (7, 2, {"x": 7})
    assert total.forked == {"retry": 3, "new_conversation": 3}
    assert "turn 0: sampled token 0 is 77, where 3 was recorded" in str(total)
    assert json.loads(json.dumps(total.to_dict()))["exact_percent"] == 50.0
    total.tokens_trained, total.tokens_exact = 100_000, 99_999
    assert "99.99 %" in str(total)  # never rounded up
