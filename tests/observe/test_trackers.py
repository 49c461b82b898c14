"""Where metrics go: the file, TensorBoard, and the trackers where their packages are there."""

import importlib.util
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from turnwise.config import Config, parse_config
from turnwise.errors import InputError, TurnwiseError
from turnwise.observe import trackers as trackers_module
from turnwise.observe.trackers import MetricsLog, Tracker
from turnwise.trajectory import Outcome, Trajectory

STEP = {
    "step": 1,
    "reward_mean": 0.5,
    "accuracy_heldout": None,
    "dropped": {"reward_error": 2},
    "deep": {"a": {"b": 3}},
    "note": "a text",
    "pass@2": 1,
}
NUMBERS = {"reward_mean": 0.5, "dropped/reward_error": 2, "deep/a/b": 3, "pass_2": 1}


def config(**more: Any) -> Config:
    return parse_config(
        {
            "environment": "a:B",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "serving": {"api_key": "hush-hush"},
            **more,
        }
    )


def events(folder: Path) -> list[Event]:
    """TensorBoard's records: a length in 8 bytes, its checksum in 4, the event, its checksum."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def scalars(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (event.step, value.tag): value.simple_value
        for event in events(folder)
        for value in event.summary.value
    }


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_file_has_everything_and_tensorboard_the_numbers(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    sinks.write(STEP)
    sinks.write({"step": 2, "reward_mean": 0.75})
    sinks.close()
    assert lines(tmp_path) == sinks.rows == [STEP, {"step": 2, "reward_mean": 0.75}]
    expected = {(1, name): value for name, value in NUMBERS.items()}
    assert scalars(tmp_path) == expected | {(2, "reward_mean"): 0.75}


def said(text: str) -> Trajectory:
    trajectory = Trajectory("rows:7", status="completed", outcome=Outcome(0.5))
    trajectory.messages = [{"role": "assistant", "content": text}]
    return trajectory


def test_conversations_are_texts_of_tensorboard(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    sinks.write_samples(2, [said("Hello.\n# no title"), said("Bye.")])
    sinks.close()
    texts = {
        (event.step, value.tag): value.tensor.string_val[0].decode()
        for event in events(tmp_path)
        for value in event.summary.value
    }
    assert texts.keys() == {(2, "samples/0/text_summary"), (2, "samples/1/text_summary")}
    first = texts[2, "samples/0/text_summary"].splitlines()
    assert first[0] == "    ── rows:7 #0  reward 0.5  completed  0 turns, 0 tokens"
    assert [line.split() for line in first[1:]] == [["assistant", "Hello."], ["#", "no", "title"]]
    assert all(line.startswith("    ") for line in first), "Markdown shows it as it is"


def test_what_is_not_finite_is_null_and_json_for_everybody(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    sinks.write({"step": 1, "loss": float("nan"), "deep": {"a": [float("inf"), 1.0]}, "x": 2})
    sinks.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=refuse)
    assert row == sinks.rows[0] == {"step": 1, "loss": None, "deep": {"a": [None, 1.0]}, "x": 2}
    assert scalars(tmp_path) == {(1, "x"): 2}


def test_a_run_that_goes_on_loses_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    for step in range(5):
        sinks.write({"step": step, "x": step})
    sinks.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    again = MetricsLog(tmp_path, config(), after_step=2)
    assert again.rows == lines(tmp_path) == [{"step": step, "x": step} for step in range(3)]
    again.write({"step": 3, "x": 30})
    again.close()
    assert [row["x"] for row in lines(tmp_path)] == [0, 1, 2, 30]
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_there_must_be_something_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*metrics\.jsonl to resume from"):
        MetricsLog(tmp_path, config(), after_step=2)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TurnwiseError, match=r"metrics\.jsonl cannot be written: No space left"):
        sinks.write(STEP)
    sinks.close()


def offline(calls: list[int]) -> Tracker:
    """A tracker whose network is away; adds the steps that it is given to `calls`."""

    def write(step: int, values: dict[str, float]) -> None:
        calls.append(step)
        raise ConnectionError("unreachable")

    def close() -> None:
        raise ConnectionError("unreachable")

    return Tracker(write, lambda step, rows: close(), close)


def test_a_failing_sink_warns_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = MetricsLog(tmp_path, config())
    calls = list[int]()
    sinks._trackers = {"wandb": offline(calls), **sinks._trackers, "mlflow": offline([])}
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sinks.write({"step": step, "x": 1})
        sinks.close()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb failed and gets no more metrics: ConnectionError: unreachable",
        "mlflow failed and gets no more metrics: ConnectionError: unreachable",
    ]
    assert calls == [0]
    assert len(lines(tmp_path)) == len(scalars(tmp_path)) == 3


TRACKERS = ("wandb", "mlflow", "trackio")
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(name)]


@pytest.mark.parametrize("name", [name for name in TRACKERS if name not in INSTALLED])
def test_a_tracker_that_is_missing_names_its_package(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"trackers names {name}, .*: pip install {name}"):
        MetricsLog(tmp_path, config(trackers=[name]))


def goes_on(folder: Path, name: str) -> None:
    """A run of three steps, gone on with after the second."""
    sinks = MetricsLog(folder, config(trackers=[name], name="trial"))
    for step in range(3):
        sinks.write({**STEP, "step": step})
    sinks.write_samples(2, [said("Hello."), said("Bye.")])
    sinks.close()
    again = MetricsLog(folder, config(trackers=[name], name="trial"), after_step=1)
    for step in (2, 3):
        again.write({**STEP, "step": step})
    assert set(again._trackers) == {"TensorBoard", name}, "none has failed"
    again.close()
    assert set(again._trackers) == {"TensorBoard", name}


def test_what_comes_late_joins_the_line_of_its_step(tmp_path: Path) -> None:
    sinks = MetricsLog(tmp_path, config())
    environments = {"shop": {"reward_mean": 0.5}}
    first = {"step": 1, "x": 1, "heldout": {}, "environments": environments}
    sinks.write(first)
    sinks.write({"step": 2, "x": 2})
    heldout = {"accuracy": 0.75}
    shop = {"reward_mean": 0.5, "heldout": heldout}
    late = {"step": 1, "heldout": heldout, "environments": {"shop": shop}}
    sinks.amend(late)
    sinks.write({"step": 3, "x": 3})
    sinks.close()
    assert (
        sinks.rows
        == lines(tmp_path)
        == [
            {**late, "x": 1},
            {"step": 2, "x": 2},
            {"step": 3, "x": 3},
        ]
    )
    assert scalars(tmp_path)[1, "heldout/accuracy"] == 0.75
    assert scalars(tmp_path)[1, "environments/shop/heldout/accuracy"] == 0.75
    assert scalars(tmp_path)[1, "environments/shop/reward_mean"] == 0.5


class Wandb:
    """What the tracker uses of W&B's package, which takes nothing for a step before the newest."""

    Settings = staticmethod(dict)
    id = "run-1"

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.axes: dict[str, str] = {}

    def init(self, **_: Any) -> "Wandb":
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        pass


def test_wandb_draws_late_metrics_over_the_step_they_belong_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, find, load = Wandb(), importlib.util.find_spec, importlib.import_module
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: n == "wandb" or find(n))
    monkeypatch.setattr(importlib, "import_module", lambda n: run if n == "wandb" else load(n))
    sinks = MetricsLog(tmp_path, config(trackers=["wandb"]))
    sinks.write({"step": 0, "heldout": {"accuracy": 0.25}})
    for step in (1, 2):
        sinks.write({"step": step, "x": step})
    sinks.amend({"step": 1, "x": 1, "heldout": {"accuracy": 0.5}})
    sinks.write({"step": 3, "x": 3})
    sinks.close()
    assert run.axes == {"heldout/accuracy": "step_evaluated"}
    assert run.rows == {
        0: {"heldout/accuracy": 0.25, "step_evaluated": 0},
        1: {"x": 1},
        2: {"x": 2, "heldout/accuracy": 0.5, "step_evaluated": 1},
        3: {"x": 3},
    }


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="mlflow is not installed")
def test_mlflow_has_one_run_with_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    goes_on(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("turnwise")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("trial", "FINISHED")
    assert run.data.metrics == NUMBERS
    history = client.get_metric_history(run.info.run_id, "dropped/reward_error")
    assert {metric.step for metric in history} == {0, 1, 2, 3}
    kept = mlflow.artifacts.load_dict(f"runs:/{run.info.run_id}/config.json")
    assert kept["environment"] == "a:B"
    table = client.load_table(experiment.experiment_id, "samples.json", [run.info.run_id])
    assert [*table["problem"]] == ["rows:7 #0"] * 2
    assert "Hello." in table["conversation"][0]
    assert "hush-hush" not in json.dumps(kept)


@pytest.mark.skipif("trackio" not in INSTALLED, reason="trackio is not installed")
def test_trackio_has_one_run_with_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    from trackio.sqlite_storage import SQLiteStorage

    goes_on(tmp_path, "trackio")
    logged = SQLiteStorage.get_logs("turnwise", "trial")
    assert {row["step"] for row in logged} == {0, 1, 2, 3}
    samples = [row for row in logged if "samples" in row]
    assert [row["step"] for row in samples] == [2]
    assert all(row["dropped/reward_error"] == 2 for row in logged if row not in samples)


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    goes_on(tmp_path, "wandb")
    names = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len({name.rpartition("-")[2] for name in names}) == 1
    assert (tmp_path / "wandb_run").read_text() == names[0].rpartition("-")[2]
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*.wandb"))
    assert b"reward_error" in written
    assert list((tmp_path / "wandb").rglob("samples*.table.json"))
    assert b"hush-hush" not in written


class Slow:
    """A tracker whose server does not answer."""

    def __init__(self, gate: threading.Event, *, starts: bool) -> None:
        self.gate, self.calls = gate, 0
        if not starts:
            gate.wait(60)

    def write(self, step: int, values: dict[str, float]) -> None:
        self.calls += 1
        self.gate.wait(60)

    write_samples = close = write


def test_a_tracker_that_does_not_answer_gets_no_more_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, made = threading.Event(), list[Slow]()

    def start(*_: object) -> Slow:
        made.append(Slow(gate, starts=True))
        return made[0]

    monkeypatch.setattr(trackers_module, "_CALL_SECONDS", 0.1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(trackers_module._TRACKERS, "wandb", start)
    trackers = MetricsLog(tmp_path, config(trackers=["wandb"]))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            trackers.write({**STEP, "step": step})
        trackers.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "wandb failed and gets no more metrics" in warning
    assert "the tracker wandb did not answer within 0.1 s" in warning
    assert made[0].calls == 1
    assert {step for step, _ in scalars(tmp_path)} == {1, 2}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2

    monkeypatch.setattr(trackers_module, "_START_SECONDS", 0.1)
    monkeypatch.setitem(trackers_module._TRACKERS, "wandb", lambda *_: Slow(gate, starts=False))
    with pytest.raises(InputError, match=r"wandb does not start: the tracker wandb did not answer"):
        MetricsLog(tmp_path, config(trackers=["wandb"]))
    gate.set()
