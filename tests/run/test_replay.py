"""A step made again from a run's files, and trajectories of it that go on in another way."""

import asyncio
import functools
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from starlette.testclient import TestClient

from examples.calculator.prepare import prepare
from examples.calculator.tool import calculate
from tests.test_cli import turnwise
from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Request, Route, generate
from turnwise.errors import EngineError, InputError
from turnwise.observe.conversations import read_trajectories
from turnwise.rollouts.recorded import RecordedEngine
from turnwise.run.bundle import write_bundle
from turnwise.run.display import SILENT
from turnwise.run.replay import Compared, Replayed, groups_of, replay_steps
from turnwise.run.whatif import read_edits, turns_of, what_if
from turnwise.trajectory import Trajectory
from turnwise.trajectory.prompt import Prompt
from turnwise.viewer.run_files import open_runs
from turnwise.viewer.server import make_app


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the demo, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("replay")
    prepare(folder, seed=0, train=16, heldout=2)
    done = turnwise(
        *("train", "examples/calculator/config.yaml", f"model.path={folder / 'model'}"),
        *(f"data.path={folder / 'train.jsonl'}", "data.eval_path=null", "eval.target=null"),
        *(f"output_dir={folder / 'runs'}", "name=run", "rollout.prompts_per_step=4"),
        *(
            "training.steps=2",
            "training.checkpoint_every=1",
            "deterministic=true",
            "ray_env.SECRET=hidden",
        ),
    )
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "run"


def replayed(*arguments: Any, **keys: Any) -> Replayed:
    return asyncio.run(replay_steps(*arguments, **keys))


def test_every_value_of_a_step_is_made_again(run: Path, tmp_path: Path) -> None:
    """From the initial model, and the second step from the first one's checkpoint."""
    made = replayed(run, "1-2", output=tmp_path / "again")
    assert [each.step for each in made.steps] == [1, 2]
    for step in [*made.steps, *replayed(run).steps]:
        assert step.equal, "\n".join(made.lines())
        assert not step.notes
        assert step.quantities["conversations"].count == step.trajectories == 32
        assert step.quantities["rewards"].count == 32
        tokens = step.quantities["masks"].count
        assert tokens > 200
        for name in ("advantage", "trainer_logprob", "entropy", "ratio", "loss"):
            assert step.quantities[name].count == tokens
        assert {"grad_norm", "loss", "reward_mean", "trained_tokens"} <= step.metrics.keys()
        assert step.quantities["metrics"].count > 20
    own = load_file(run / "checkpoints" / "step-0002" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert own.keys() == again.keys()
    assert max(abs(own[name] - again[name]).max() for name in own) < 1e-6


def test_another_reward_and_algorithm_show_what_changes(run: Path, tmp_path: Path) -> None:
    changes = ["rollout.rewards=[{function: tests.run.test_replay:length}]"]
    (made,) = replayed(run, "1", [*changes, "algorithm.loss.name=gspo"], False).steps
    rewards, masks = made.quantities["rewards"], made.quantities["masks"]
    assert rewards.different > 0
    assert masks.different + made.quantities.get("advantage", Compared()).different > 0
    assert not made.quantities["conversations"].different
    assert "trainer_logprob" not in made.quantities


def length(trajectory: Trajectory, row: dict[str, Any]) -> float:
    return float(trajectory.sampled_tokens)


def test_a_tool_that_answers_otherwise_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(calculate)
    def wrong(expression: str) -> str:
        return f"{calculate(expression)}0"

    monkeypatch.setattr("examples.calculator.environment.calculate", wrong)
    (made,) = replayed(run, "1", (), False).steps
    assert not made.equal
    conversations = made.quantities["conversations"]
    assert 0 < conversations.different <= 32
    assert "prompt of turn 1: from token" in "\n".join(conversations.examples)


def test_a_bundle_needs_neither_data_nor_run(run: Path, tmp_path: Path) -> None:
    file = write_bundle(run, 2, tmp_path / "step.zip", weights=True)
    with zipfile.ZipFile(file) as bundle:
        assert "hidden" not in bundle.read("config.yaml").decode()
        assert len(bundle.read("rows.jsonl").splitlines()) == 4
    data = run.parents[1] / "train.jsonl"
    away = data.with_suffix(".away")
    shutil.move(data, away)
    try:
        (made,) = replayed(file).steps
    finally:
        shutil.move(away, data)
    assert made.equal
    assert made.quantities["trainer_logprob"].count > 200

    alone = write_bundle(run, 2, tmp_path / "alone.zip", weights=False)
    result = replayed(alone)
    assert "no weights of step 1" in result.notes[0]
    assert result.steps[0].equal, "\n".join(result.lines())
    assert result.steps[0].quantities["advantage"].count > 200
    assert "trainer_logprob" not in result.steps[0].quantities


def test_the_command_fails_if_something_differs(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "trajectories" / "step-0001.jsonl"
    first, *others = file.read_text().splitlines()
    tree = json.loads(first)
    tree["reward"] += 0.5
    file.write_text("\n".join([json.dumps(tree), *others]) + "\n")
    done = turnwise("replay", tmp_path / "run", "--step", "1", "--no-numbers", "--json")
    assert done.returncode == 1, done.stderr
    (step,) = json.loads(done.stdout)
    assert step["quantities"]["rewards"]["different"] == 1
    assert step["quantities"]["rewards"]["max_difference"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("step", "said"),
    [("two", "--step two: write a number"), ("3-1", "steps begin with 1"), ("9", "no trajec")],
)
def test_a_step_that_is_not_there_is_one_sentence(run: Path, step: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        replayed(run, step, (), False)


def test_a_recorded_engine_answers_by_prompt() -> None:
    trajectory = Trajectory("rows:1")
    trajectory.add_turn([11, 12], [7, 2], [-0.5, -0.1], [3, 3], "stop")
    trajectory.add_turn([11, 12, 7, 2, 13], [8, 2], [-0.2, -0.1], [3, 4], "length")
    engine = RecordedEngine({"a": trajectory, "b": trajectory}, lambda ids: " ".join(map(str, ids)))

    def ask(name: str, prompt: list[int]) -> Any:
        request = Request(Prompt(prompt), SamplingConfig(), f"{name}-0")
        return asyncio.run(generate(engine, request))

    later, first = ask("a", [11, 12, 7, 2, 13]), ask("a", [11, 12])
    assert (later.token_ids, later.finish_reason, later.weight_versions) == (
        [8, 2],
        "length",
        [3, 4],
    )
    assert (first.token_ids, first.logprobs) == ([7, 2], [-0.5, -0.1])
    assert engine.differences == {}
    with pytest.raises(EngineError, match="asks for turn 2, which the run has not stored"):
        ask("a", [11])
    assert ask("b", [11, 14]).token_ids == [7, 2]
    assert engine.differences["b"] == "prompt of turn 0: from token 1 on, '12' is '14' now"
    with pytest.raises(EngineError, match="the run has not stored c, nor"):
        ask("c", [11])
    # An agent's request has no trajectory's name.
    assert ask("c", [11, 12, 7, 2, 13]).token_ids == [8, 2]
    assert "c" not in engine.differences
    # A trajectory that the run dropped must not take the turns of another.
    engine = RecordedEngine({"a": trajectory}, str)
    own = Request(Prompt([11, 12]), SamplingConfig(), "d-0", route=Route(session="d"))
    with pytest.raises(EngineError, match="the run has not stored d, nor"):
        asyncio.run(generate(engine, own))


def test_a_supervised_step_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "trajectories" / "step-0001.jsonl"
    trees = [{**json.loads(line), "reward": None} for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(tree)}\n" for tree in trees))
    with pytest.raises(InputError, match="supervised steps cannot be made again"):
        replayed(tmp_path / "run", "1", (), False)


def test_a_file_is_divided_into_the_groups_of_its_step() -> None:
    order = [("a", 0), ("a", 2), ("b", 1), ("b", 0), ("a", 0)]
    groups = groups_of([Trajectory(name, index) for name, index in order])
    assert [[t.sample_index for t in each.trajectories] for each in groups] == [
        [0, 2],
        [1],
        [0],
        [0],
    ]


def test_numbers_are_compared_relative_to_their_size() -> None:
    compared = Compared(1e-5)
    for before, now in ((1.0, 1.000009), (1e6, 1e6 + 5), (float("nan"), float("nan")), ("a", "a")):
        compared.add("here", before, now)
    assert compared.different == 0
    compared.add("there", 0.0, 2e-5)
    compared.add("there", None, 0.0)
    assert compared.examples == ["there: 0.0 is 2e-05 now", "there: None is 0.0 now"]
    before, nan, inf = np.array([1.0, 1e6, 0.0]), float("nan"), float("inf")
    array = Compared(1e-5)
    array.add_array(str, np.append(before, [nan, inf]), np.append(before + 9e-6, [nan, inf]))
    assert (array.count, array.different) == (5, 0)
    array.add_array(str, np.zeros(9), np.arange(9.0))
    assert (array.count, array.different, array.max_difference) == (14, 8, 8.0)
    assert array.examples[0] == "1: 0 is 1 now"
    assert len(array.examples) == 5


def stored(run: Path, step: int = 2) -> Trajectory:
    """A trajectory that called a tool, not the first one of its group."""
    file = run / "trajectories" / f"step-000{step}.jsonl"
    return next(t for t in read_trajectories(file) if len(t.turns) > 1 and t.sample_index)


def test_a_deterministic_run_samples_the_same_tokens_again(run: Path) -> None:
    """By the viewer's page, which runs `turnwise whatif`, with the weights before the step."""
    old = stored(run)
    file = read_trajectories(run / "trajectories" / "step-0002.jsonl")
    index = next(i for i, each in enumerate(file) if each == old)
    host = "http://127.0.0.1:8123"
    client = TestClient(make_app(open_runs([run]), "token", 8123), base_url=host)
    assert client.get("/?token=token").status_code == 200
    path = f"/api/runs/run/files/step-0002/{index}/whatif"
    answer = client.post(path, json={"n": 2, "turn": 0}, headers={"origin": host})
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert not made["differences"]
    assert not made["failures"]
    again = {each["sample_index"]: each for each in made["continuations"]}
    assert len(again) == 2
    ids = [turn["completion_token_ids"] for turn in again[old.sample_index]["turns"]]
    assert ids == [turn.completion_token_ids for turn in old.turns]
    assert again[old.sample_index]["reward"] == old.reward


def test_a_changed_result_of_a_tool_is_read_by_the_next_turn(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    old = stored(run, 1)
    message = next(i for i, m in enumerate(old.messages) if m["role"] == "tool")
    made = asyncio.run(
        what_if(
            *(run, old.problem_id, SILENT),
            step=1, sample=old.sample_index, edits={message: "41"}, n=2, weights="now",
        )
    )  # fmt: skip
    assert (made.turn, made.message) == (1, message)
    assert len(made.made) == 2
    for each in made.made:
        assert each.messages[message]["content"] == "41"
        assert each.turns[0].completion_token_ids == old.turns[0].completion_token_ids
        assert each.turns[1].weight_versions != old.turns[1].weight_versions
        assert each.reward is not None
    shown = made.shown().plain
    assert "── stored: reward" in shown
    assert "── 1: reward" in shown
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sample": 99}, "has no trajectory 99 of .*it has: 0, 1"),
        ({"turn": 99}, "turn 99: the trajectory has 0 to "),
        ({"edits": {99: "x"}}, "message 99: the trajectory has 0 to"),
        ({"edits": {1: "x"}}, "message 1 is the model's: choose --turn 0"),
        ({"edits": {2: "x"}, "turn": 0}, "message 2 comes after turn 0: raise --turn"),
    ],
)
def test_what_is_not_there_is_one_sentence(run: Path, given: dict[str, Any], said: str) -> None:
    old = stored(run)
    keys = {"sample": old.sample_index, "step": 2} | given
    with pytest.raises(InputError, match=said):
        asyncio.run(what_if(run, old.problem_id, SILENT, **keys))


def test_a_message_belongs_to_the_turn_that_reads_it() -> None:
    trajectory = Trajectory("rows:1")
    for ids in ([11], [11, 7, 12]):
        trajectory.add_turn(ids, [7], [-0.5], [0], "stop")
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    trajectory.messages = [{"role": role, "content": ""} for role in roles]
    assert turns_of(trajectory) == {0: -1, 1: -1, 2: 0, 3: 0, 4: 1, 5: 1}


def test_an_edit_is_a_number_and_a_text() -> None:
    assert read_edits(["2=a=b", "0="]) == {2: "a=b", 0: ""}
    for wrong in ("2", "x=1", "=1"):
        with pytest.raises(InputError, match="write the message's number and its text"):
            read_edits([wrong])
