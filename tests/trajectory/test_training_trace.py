"""Training traces: every token, log-prob, version and reward survives the way there and back."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.conftest import ROOT
from turnwise.cli import app
from turnwise.errors import InputError, TurnwiseError
from turnwise.trajectory import Outcome, Trajectory, audit, read_jsonl, write_jsonl
from turnwise.trajectory.training_trace import (
    SCHEMA_VERSION,
    export_traces,
    from_training_trace,
    import_traces,
    to_training_trace,
)

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
LOGPROBS = st.floats(-50, 0, allow_nan=False) | st.floats(0, 1e-4)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Trees of up to six turns: continued, retried, forked and unrelated."""
    trajectory = Trajectory("math:1", draw(st.integers(0, 3)))
    version = 0
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(IDS)
        if trajectory.turns and draw(st.booleans()):
            index = draw(st.integers(0, len(trajectory.turns) - 1))
            path = trajectory.prompt_token_ids(index)
            path += trajectory.turns[index].completion_token_ids
            prompt = [*path[: draw(st.integers(1, len(path)))], *prompt]
        version += draw(st.integers(0, 1))
        sampled = draw(IDS)
        known = draw(st.booleans())
        trajectory.add_turn(
            prompt,
            sampled,
            [draw(LOGPROBS) for _ in sampled],
            [version] * len(sampled),
            draw(st.sampled_from(["stop", "length"])),
            [None, *([-0.25] * (len(prompt) - 1))] if known else None,
            fork_reason=draw(st.sampled_from([None, "retry"])),
            adapter=draw(st.sampled_from(["", "terse"])),
            messages=draw(st.sampled_from([(), ({"role": "user", "content": "\u2028é"},)])),
        )
    trajectory.messages = [{"role": "user", "content": "hi\u2028"}]
    trajectory.status, trajectory.events = "completed", Counter(tool_call=2)
    turns = [0.1] * len(trajectory.turns)
    trajectory.outcome = Outcome(0.1 + 0.2, {"environment": 0.3}, turns, metrics={"steps": 1.0})
    if draw(st.booleans()):
        trajectory.turn_players = [draw(st.sampled_from("xo")) for _ in trajectory.turns]
        trajectory.set_outcome(players={"x": 1.0, "o": -1.0})
    return trajectory


def test_a_zero_keeps_its_sign() -> None:
    trajectory = Trajectory("math:1", status="completed")
    trajectory.add_turn([1], [2, 3, 4], [-0.0, 0.0, 1e-5], [0, 0, 0], "stop")
    trace = json.loads(json.dumps(to_training_trace(trajectory)))
    assert from_training_trace(trace) == trajectory
    trajectory = Trajectory("math:1", status="completed")
    trajectory.add_turn([1], [2, 3], [-0.0, 0.0], [0, 0], "stop")
    again = from_training_trace(json.loads(json.dumps(to_training_trace(trajectory))))
    assert again.to_json() == trajectory.to_json()


@given(trajectories())
def test_a_trajectory_comes_back_as_it_was(trajectory: Trajectory) -> None:
    trace = json.loads(json.dumps(to_training_trace(trajectory)))
    again = from_training_trace(trace)
    assert again == trajectory
    assert again.samples() == trajectory.samples()
    assert again.to_json() == trajectory.to_json()
    assert audit(again).first_violation is None
    for turn in trace["turns"]:  # what the format demands
        assert len(turn["loss_mask"]) == len(turn["prompt_token_ids"]) + len(
            turn["completion_token_ids"]
        )
        assert all(logprob <= 0 for logprob in turn["per_token_logps"])


def one(**changes: Any) -> dict[str, Any]:
    turn = {
        "node_id": "a",
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "per_token_logps": [-0.1, -0.2, -0.3],
        "loss_mask": [0, 0, 1, 1, 1],
    }
    return turn | changes


def trace(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"schema_version": 1, "turns": list(turns)}


def test_a_trace_of_another_program() -> None:
    more = one(
        node_id="c",
        prompt_token_ids=[1, 2, 3, 4, 5, 6],
        completion_token_ids=[7, 8, 9, 9],
        per_token_logps=[-1, -2.0, -3.0, -4.0],
        loss_mask=[0] * 7 + [1, 1, 0],
        request={"messages": "theirs", "tools": 3},
    )
    context = one(node_id="b", loss_mask=[0] * 5)
    made = from_training_trace(trace(one(), context, more), name="file:1", weight_version=4)
    assert (made.problem_id, made.reward, made.status) == ("file:1", None, "completed")
    (sample,) = made.samples()
    assert sample.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert sample.response_mask == [0, 0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert sample.logprobs == [0, 0, -0.1, -0.2, -0.3, 0, 0, -2.0, -3.0, 0]
    assert sample.weight_versions == [-1, -1, 4, 4, 4, -1, -1, 4, 4, -1]
    assert audit(made).first_violation is None


def test_a_call_that_was_masked_after_its_export_is_context() -> None:
    trajectory = Trajectory("math:1", turn_players=["x", "o"], outcome=Outcome(turns=[0.5, 1.0]))
    trajectory.add_turn([1], [2, 3], [-0.1, -0.2], [3, 3], "stop")
    trajectory.add_turn([1, 2, 3, 4], [5], [-0.3], [4], "stop")
    exported = to_training_trace(trajectory)
    exported["turns"][0]["loss_mask"] = [0, 0, 0]
    made = from_training_trace(exported)
    (sample,) = made.samples()
    assert (sample.token_ids, sample.response_mask) == ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])
    assert (sample.weight_versions[-1], made.turn_rewards) == (4, [0.5, 1.0])
    assert made.turn_players == ["x", "o"]
    exported["turns"][0]["metadata"]["turnwise"]["trajectory"]["turn_players"].pop()
    with pytest.raises(InputError, match="turn_players must have an entry for each of 2 turns"):
        from_training_trace(exported)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"turns": []} | {"schema_version": 2}, "has schema_version 1 and turns"),
        (trace({}), "turn 0 has no node_id"),
        (trace(one(), one()), "turn 1: another turn has the node_id a"),
        (trace(one(prompt_token_ids=[1, -2])), "prompt_token_ids must be a list of token ids"),
        (trace(one(completion_token_ids=[3, True, 5])), "completion_token_ids must be a list"),
        (trace(one(per_token_logps=[-0.1, float("nan"), 0])), "per_token_logps must be finite"),
        (trace(one(per_token_logps=[-0.1])), "a log-prob and a version belong to each"),
        (trace(one(loss_mask=[0, 0, 1])), "loss_mask must cover prompt and completion"),
        (trace(one(loss_mask=[0, 1, 1, 1, 1])), "loss_mask trains a token of the prompt"),
        (trace(one(loss_mask=[0, 0, 2, 1, 1])), "loss_mask must hold 0 and 1"),
    ],
)
def test_a_malformed_trace_is_named(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_training_trace(bad, name="file:7")


def test_a_completion_may_be_trained_in_pieces() -> None:
    made = from_training_trace(trace(one(loss_mask=[0, 0, 1, 0, 1])))
    assert made.samples()[0].response_mask == [0, 0, 1, 0, 1]
    assert audit(made).masked == {"not_chosen": 1}
    assert from_training_trace(to_training_trace(made)).samples() == made.samples()


def test_a_token_changed_after_its_export_is_found() -> None:
    trajectory = Trajectory("math:1")
    trajectory.add_turn([1], [2, 3], [-0.1, -0.2], [3, 3], "stop")
    for key, value in (("completion_token_ids", [2, 4]), ("per_token_logps", [-0.1, -0.3])):
        exported = to_training_trace(trajectory)
        exported["turns"][0][key] = value
        with pytest.raises(
            InputError, match="turn 0: its images, tokens, log-probs, versions or sampling"
        ):
            from_training_trace(exported)


def test_files(tmp_path: Path) -> None:
    first = Trajectory("math:1", messages=[{"role": "user", "content": "a\u2028b"}])
    first.add_turn([1], [2, 3], [-0.1, -0.2], [3, 3], "stop")
    source, traces, back = (tmp_path / name for name in ("a.jsonl", "out/t.jsonl", "b.jsonl"))
    write_jsonl(source, [first, Trajectory("math:2")])
    assert export_traces(source, traces) == 1
    assert import_traces(traces, back) == 1
    assert [*read_jsonl(back)] == [first]
    with pytest.raises(InputError, match=r"a\.jsonl:1, turn 0 has no node_id"):
        import_traces(source, back)
    with pytest.raises(InputError, match="holds no trajectories"):
        export_traces(traces, back)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        export_traces(tmp_path / "none", back)
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(InputError, match="text:1 is not JSON"):
        import_traces(tmp_path / "text", back)
    with pytest.raises(TurnwiseError, match="cannot be written"):
        export_traces(source, source / "x")


def test_the_command_goes_there_and_back(tmp_path: Path) -> None:
    trajectory = Trajectory("math:1", outcome=Outcome(0.5))
    trajectory.add_turn([1], [2, 3], [-0.1, -0.2], [3, 3], "stop")
    source, traces, back = (str(tmp_path / f"{name}.jsonl") for name in "abc")
    write_jsonl(Path(source), [trajectory])
    exported = CliRunner().invoke(app, ["trace", "export", source, traces])
    assert (exported.exit_code, exported.output.split()[:2]) == (0, ["1", "traces"])
    imported = CliRunner().invoke(app, ["trace", "import", traces, back])
    assert (imported.exit_code, imported.output.split()[:2]) == (0, ["1", "trajectories"])
    assert [*read_jsonl(Path(back))] == [trajectory]
    assert CliRunner().invoke(app, ["trace", "import", source, back]).exit_code == 2


CHECK = """
import sys
from openenv.core.harness.training import TrainingTrace
for line in sys.stdin.read().strip().split(chr(10)):
    trace = TrainingTrace.model_validate_json(line)
    print(trace.model_dump_json())
"""


@pytest.mark.slow
def test_openenv_reads_and_writes_our_traces(tmp_path: Path) -> None:
    """OpenEnv's own class validates them strictly; what it writes again is the same trajectory."""
    made: list[Trajectory] = []
    for version in (0, 7):
        trajectory = Trajectory("math:1", outcome=Outcome(0.5, turns=[0.25, 0.25]))
        trajectory.add_turn([1], [2, 3], [-0.1, 5e-6], [version] * 2, "stop")
        trajectory.add_turn([1, 2, 3, 4], [5], [-0.3], [version + 1], "length")
        made.append(trajectory)
    source, exported, theirs, back = (tmp_path / f"{name}.jsonl" for name in "abcd")
    write_jsonl(source, made)
    export_traces(source, exported)
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=ROOT, check=True)
    python = str(ROOT / ".venv-interop" / "bin" / "python")
    with exported.open() as file, theirs.open("w") as output:
        subprocess.run([python, "-c", CHECK], stdin=file, stdout=output, check=True)
    assert import_traces(theirs, back) == 2
    assert [*read_jsonl(back)] == made


def test_a_foreign_trace_has_weight_version_0() -> None:
    made = Trajectory("p")
    turn = made.add_turn([1, 3], [2], [-0.5], [0], "stop", [None, -0.25])
    turn.streams["own"] = np.full(1, 0.1, np.float32)
    trace = to_training_trace(made)
    assert trace["schema_version"] == SCHEMA_VERSION
    again = from_training_trace(json.loads(json.dumps(trace))).turns[0]
    assert again.streams["own"].dtype == np.float32
    assert again.added_logprobs == turn.added_logprobs == [None, -0.25]
    foreign = {
        "node_id": "1",
        "prompt_token_ids": [1],
        "completion_token_ids": [2],
        "per_token_logps": [-0.5],
        "loss_mask": [0, 1],
    }
    assert from_training_trace({"turns": [foreign]}).turns[0].weight_versions == [0]
