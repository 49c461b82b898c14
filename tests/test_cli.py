"""The commands as a person runs them: in a process of their own, on the real stack."""

import itertools
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from examples.calculator.prepare import prepare
from tests.conftest import ROOT, command_environment, own_environment, python
from tests.programs import Mark
from turnwise.cli import app
from turnwise.cli import commands as cli_commands
from turnwise.cli.command import Command as _Command
from turnwise.config import Config, dump_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.core import interrupt
from turnwise.core.sources import stands_for_model
from turnwise.errors import InputError
from turnwise.trajectory import Trajectory, read_jsonl

STEP_KEYS = {
    "step",
    "reward_mean",
    "accuracy_heldout",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "logprob_diff_mean",
    "logprob_diff_max",
    "staleness_max",
    "trajectories",
    "dropped",
    "weight_version",
    "weight_update_seconds",
    "step_seconds",
}
TIMES = ("seconds", "per_s", "memory_gib")


@pytest.fixture
def file(make_config: Callable[..., Config], tmp_path: Path) -> Path:
    """A configuration whose model says nonsense and whose rewards depend on the words."""
    return write_config(make_config, tmp_path)


def write_config(make_config: Callable[..., Config], folder: Path) -> Path:
    config = make_config(
        environment="tests.test_cli:Lottery",
        output_dir=str(folder / "runs"),
        rollout={"prompts_per_step": 4},
        engine={},
        eval={"every": 2, "sampling": {"n": 1, "temperature": 0, "max_tokens": 16}},
    )
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


class Lottery:
    """Rewards an even number of sampled tokens: a signal that even a nonsense model gives."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools: list[Any] = []

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(trajectory.turns[-1].completion_token_ids) % 2 == 0)


def turnwise(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(), "-m", "turnwise.cli", *map(str, arguments)],
        cwd=ROOT,
        env=command_environment() | environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_fills_its_folder_and_its_checkpoint_is_portable(file: Path, tmp_path: Path) -> None:
    done = turnwise("train", file, "training.steps=3", "name=whole", "samples_every=2")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "whole"
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    assert {"config.yaml", "metrics.jsonl", "reward.png", "checkpoints/step-0003"} <= names
    assert {f"trajectories/step-000{i}.jsonl" for i in (1, 2, 3)} <= names
    assert any(name.startswith("tensorboard/events") for name in names)
    assert yaml.safe_load((run / "config.yaml").read_text())["training"]["steps"] == 3

    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    trained = [row["step"] for row in rows if row.get("trained_tokens")]
    assert trained
    assert {f"training/step-000{step}.safetensors" for step in trained} <= names
    for row in rows:
        assert row.keys() >= STEP_KEYS
        assert row["staleness_max"] == 0
        assert row["logprob_diff_max"] < 1e-4
    assert [row["weight_version"] for row in rows] == [0, 1, 2, 3]
    measured = [row["step"] for row in rows if row["accuracy_heldout"] is not None]
    assert measured == [0, 2, 3]
    assert [row["step"] for row in rows if "evaluate" in row["phase_seconds"]] == measured
    assert rows[0]["phase_seconds"].keys() == {"weights", "evaluate"}
    assert done.stdout.count("step ") == 4
    for part in (
        "starting Ray",
        "starting 1 engine",
        "starting the trainer",
    ):
        assert re.search(rf"^{part} \.\.\.$", done.stdout, re.MULTILINE)
        assert re.search(rf"^{part}: \d+\.\d s$", done.stdout, re.MULTILINE)
    assert all(row["worker_tokens_per_s"]["worker-0"] > 0 for row in rows[1:])
    assert "held-out accuracy (reward ≥ 1) " in done.stdout
    assert done.stdout.count("── best: ") == done.stdout.count("── worst: ") == 1

    calls = (run / "timeline" / "step-0001.jsonl").read_text().splitlines()
    _, asked, first, ended, worker, *_ = json.loads(calls[0])[0]
    assert asked <= (first or asked) <= ended
    assert (worker, len(calls)) == ("worker-0", 16)
    for name in ("eval-0000", "eval-0002"):
        held = [*read_jsonl(run / "trajectories" / f"{name}.jsonl")]
        times = (run / "timeline" / f"{name}.jsonl").read_text().splitlines()
        assert [len(json.loads(line)) for line in times] == [len(t.turns) for t in held]

    for step in (1, 2, 3):
        trajectories = list(read_jsonl(run / "trajectories" / f"step-000{step}.jsonl"))
        assert len(trajectories) == rows[step]["trajectories"] == 16
        versions = {v for t in trajectories for b in t.branches() for v in b.weight_versions}
        assert versions == {-1, step - 1}
        mean = sum(t.reward or 0 for t in trajectories) / 16
        assert rows[step]["reward_mean"] == pytest.approx(mean)

    exactness = json.loads((run / "exactness.json").read_text())
    sampled = sum(row["sampled_tokens"] for row in rows[1:])
    assert exactness["tokens_sampled"] == sampled
    assert exactness["tokens_trained"] + sum(exactness["masked"].values()) == sampled
    assert (exactness["exact_percent"], exactness["first_violation"]) == (100.0, None)
    assert f"exact      100 % of {exactness['tokens_trained']:,} trained tokens" in done.stdout

    replay = subprocess.run(
        [*python(), "-m", "tests.plain", str(run)],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    turns = sum(len(t.turns) for t in read_jsonl(run / "trajectories" / "eval-0003.jsonl"))
    assert f"of {turns} greedy turns" in replay.stdout, replay.stderr
    assert f"Transformers: {turns}, vLLM: {turns}" in replay.stdout

    again = turnwise("train", file, "name=whole")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


class Forgery(Lottery):
    """A plug-in that changes what was sampled."""

    def reward(self, trajectory: Trajectory) -> float:
        reward = super().reward(trajectory)
        trajectory.turns[0].completion_token_ids[1] = 7
        return reward


def test_tokens_that_were_not_sampled_stop_the_run(file: Path, tmp_path: Path) -> None:
    forged = ("environment=tests.test_cli:Forgery", "eval.every=0", "training.steps=1")
    forged += ("rollout.prompts_per_step=8",)  # one of them has rewards that differ
    stopped = turnwise("train", file, *forged, "name=stopped")
    assert stopped.returncode == 2
    assert "violations of exactness; the first: train.jsonl:" in stopped.stderr
    assert "turn 0: sampled token 1 is 7, where " in stopped.stderr
    warned = turnwise("train", file, *forged, "name=warned", "exactness=warn")
    assert warned.returncode == 0, warned.stderr
    assert "violations; first: train.jsonl:" in warned.stdout
    report = json.loads((tmp_path / "runs" / "warned" / "exactness.json").read_text())
    assert report["violations"] > 0
    assert report["exact_percent"] < 100


class Diligence(Lottery):
    """A held-out problem counts as solved from weight version 4 on, and not before."""

    def reward(self, trajectory: Trajectory) -> float:
        return super().reward(trajectory) / 2 + (trajectory.turns[0].weight_versions[0] >= 4)


def test_rollouts_obey_max_staleness_and_end_at_the_target(file: Path, tmp_path: Path) -> None:
    # Fewer rows than a step takes: each comes up several times in it.
    few = ("data.limit=3", "training.max_staleness=1", "training.steps=50", "name=ahead")
    target = ("environment=tests.test_cli:Diligence", "eval.target=0.9")
    done = turnwise("train", file, *few, *target)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "ahead"
    rows = metrics_of(run)
    assert max(row["staleness_max"] for row in rows) == 1
    assert [row["trajectories"] for row in rows[1:]] == [16] * 4
    assert [row["accuracy_heldout"] for row in rows] == [0.0, None, 0.0, None, 1.0]
    assert "held-out accuracy 1.000 reaches eval.target 0.9: the run ends" in done.stdout
    assert (run / "checkpoints" / "step-0004" / "model.safetensors").is_file()

    again = turnwise("train", "--resume", run)
    assert again.returncode == 0
    assert "the run is complete; set eval.target=null to continue to training.steps" in again.stderr


class Stuck(Lottery):
    """Its reward never returns once two steps and their evaluations are done."""

    given = itertools.count(1)

    def reward(self, trajectory: Trajectory) -> float:
        if next(self.given) > 16 + 16 + 16 + 16:
            sys.stdout.write("stuck\n")
            sys.stdout.flush()
            time.sleep(600)
        return super().reward(trajectory)


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sigterm_ends_a_stuck_run_within_ten_seconds(file: Path, own: bool) -> None:
    """Also if nothing is shared with this session: all that a person's run starts has to end."""
    shared_memory = our_shared_memory()
    mark = Mark()
    running = subprocess.Popen(
        [
            *([sys.executable] if own else python()),
            *("-m", "turnwise.cli", "train", str(file)),
            *("environment=tests.test_cli:Stuck", "training.steps=10000"),
        ],
        cwd=ROOT,
        env=(own_environment() if own else command_environment()) | mark.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if "stuck" in line:
            break
    pressed = time.monotonic()
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=120)
    assert time.monotonic() - pressed < 100  # the reward would return after 600
    assert interrupt.PATIENCE_SECONDS + 2 * interrupt._KILL_SECONDS < 10  # and that is all it waits
    assert running.returncode == 130, errors
    assert "turnwise: interrupted" in errors
    assert "the environment's reward (" in errors
    assert "at tests/test_cli.py:" in errors
    assert "Traceback" not in errors
    assert mark.left() == []
    assert our_shared_memory() <= shared_memory


def our_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("turnwise*")}


def test_rollout_writes_what_training_would_sample(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "rollouts.jsonl"
    done = turnwise("rollout", file, "data.limit=3", "--output", output)
    assert done.returncode == 0, done.stderr
    trajectories = list(read_jsonl(output))
    assert len(trajectories) == 12
    assert "12 trajectories" in done.stdout
    assert all(math.isfinite(t.reward or 0.0) for t in trajectories)


def test_eval_runs_gsm8k_rows_and_keeps_their_trajectories(tmp_path: Path, model_path: str) -> None:
    """The example's configuration, with the path of a model and of rows alone changed."""
    rows = ROOT / "tests" / "examples" / "gsm8k_rows.jsonl"
    done = turnwise(
        "eval",
        "examples/gsm8k/config.yaml",
        f"data.eval_path={rows}",
        "data.eval_limit=8",
        f"model.path={model_path}",
        f"output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy \(reward ≥ 1\) 0\.\d{4} \(0\.\d{3}–[01]\.\d{3}\)", done.stdout)
    (path,) = tmp_path.glob("*/eval.jsonl")
    assert len((path.parent / "timeline" / path.name).read_text().splitlines()) == 8
    assert len(list(read_jsonl(path))) == 8
    page = in_process("view", path.parent, "--heldout", "--export", tmp_path / "page.html")
    assert page.exit_code == 0, page.output


@pytest.mark.slow
def test_eval_compares_two_models_on_the_same_rows(tmp_path: Path) -> None:
    """The demo's model at two temperatures is one model: a folder and a copy of it."""
    prepare(tmp_path / "made")
    model = tmp_path / "made" / "model"
    other = shutil.copytree(model, tmp_path / "other")
    done = turnwise(
        *("eval", "examples/calculator/config.yaml", other),
        *(f"model.path={model}", "--data", f"{tmp_path}/made/heldout.jsonl"),
        *("data.eval_limit=32", f"output_dir={tmp_path}", "deterministic=true"),
    )
    assert done.returncode == 0, done.stderr
    assert f"{other} compared with {model}, on 32 rows: accuracy +0.0000" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 rows solved less often"
    assert [*map(len, map(list, map(read_jsonl, tmp_path.glob("*/eval.jsonl"))))] == [32, 32]


def in_process(*arguments: object) -> Result:
    """A command that ends before Ray or vLLM is started."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_config_prints_every_key_with_its_meaning(file: Path) -> None:
    done = in_process("config", file, "training.steps=77")
    assert done.exit_code == 0
    assert "  # Number of training steps; each consumes" in done.stdout
    assert "  steps: 77\n" in done.stdout
    assert yaml.safe_load(done.stdout)["training"]["steps"] == 77


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.n=1"], "advantage grpo compares the trajectories of a group, and sampling.n 1"),
        (["sampling.use_beam_search=true"], "sampling.use_beam_search: answers that a search"),
        (["rollout.tool_parser=hermez"], "not 'hermez'; did you mean hermes?"),
        (["training.attention=flash"], "training.attention should be one of auto, eager, "),
        (["rollout.loop=agent"], "rollout: loop agent needs agent: package.module:function, a"),
        (["model.adapter=a/b"], "model.adapter: training does not start from an adapter"),
        (["weights.transport=tests.test_cli:Nothing"], "tests.test_cli has no Nothing"),
        (["algorithm.loss=tests.test_cli:Nothing"], "tests.test_cli has no Nothing"),
        (
            ["algorithm.loss=dpo", "algorithm.mask_truncated=true"],
            "algorithm.loss dpo compares trajectories and needs all of their tokens",
        ),
    ],
)
def test_config_refuses_what_a_run_refuses_without_a_model(
    file: Path, overrides: list[str], message: str
) -> None:
    done = in_process("config", file, "model.path=no/model", *overrides)
    assert message in " ".join(done.stderr.split())
    assert (done.exit_code, done.stdout) == (2, "")


def test_config_without_a_file_prints_the_defaults() -> None:
    done = in_process("config")
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["training"]["steps"] == 100
    assert yaml.safe_load(done.stdout)["model"]["path"] is None
    assert "  # (required) Folder or Hugging Face name of the model" in done.stdout
    assert in_process("config", "training.steps=3").exit_code == 2


def test_the_package_is_the_command() -> None:
    """For shells in which `turnwise` is not on the path."""
    command = [*python(), "-m", "turnwise", "--version"]
    done = subprocess.run(command, cwd=ROOT, env=command_environment(), capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, f"turnwise {version('turnwise')}\n")


def test_the_version_is_the_packages() -> None:
    done = in_process("--version")
    assert (done.exit_code, done.stdout) == (0, f"turnwise {version('turnwise')}\n")


def test_the_shell_completes_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from turnwise.cli import app; app(prog_name='turnwise')"],
        env={
            **command_environment(),
            "_TURNWISE_COMPLETE": "complete_bash",
            "COMP_WORDS": "turnwise train my.yaml training.st",
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == [
        "training.steps=",
        "training.stale_policy=",
        "training.step_timeout=",
    ]


@pytest.mark.parametrize("command", ["train", "eval", "rollout", "serve"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/no/such/model", "model.path: there is no model in /no/such/model"),
        ("training.lr=3", "there is no key training.lr; did you mean training.learning_rate?"),
    ],
)
def test_an_obvious_mistake_is_one_sentence_and_leaves_nothing(
    file: Path, tmp_path: Path, command: str, override: str, message: str
) -> None:
    done = in_process(command, file, override)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_data_that_is_nowhere_is_one_sentence(file: Path, command: str) -> None:
    done = in_process(command, file, "data.path=few.csv", "data.eval_path=few.csv")
    assert done.exit_code == 2
    where = f"{Path.cwd()}, where the command runs"
    assert done.stderr == f"turnwise: data.path: there is no data file few.csv in {where}\n"


def test_eval_needs_no_training_data(file: Path) -> None:
    done = in_process("eval", file, "data.path=few.csv", "environment=nothing")
    assert done.stderr == "turnwise: environment must be package.module:Name, not 'nothing'\n"


def test_a_port_in_use_is_told_before_anything_starts(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = in_process("serve", file, f"serving.port={port}", "model.path=/no/such/model")
    assert done.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port} " in done.stderr
    assert "choose another serving.port" in done.stderr


class Collapsing(Lottery):
    """Cannot be built."""

    def __init__(self, row: dict[str, Any]) -> None:
        raise ValueError("the judge is down")


def test_user_tracebacks_go_to_the_log_and_with_debug_to_stderr(file: Path, tmp_path: Path) -> None:
    broken = ("train", file, "environment=tests.test_cli:Collapsing", "name=broken")
    log = tmp_path / "runs" / "broken" / "errors.log"
    done = in_process(*broken)
    assert done.exit_code == 2
    said, where = done.stderr.splitlines()
    assert said.startswith("turnwise: train.jsonl:1")
    assert "ValueError: the judge is down (tests/test_cli.py:" in said
    assert where == f"traceback: {log} (or --debug)"
    assert 'raise ValueError("the judge is down")' in log.read_text()

    done = in_process(*broken, "--debug")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[0] == said
    assert 'raise ValueError("the judge is down")' in done.stderr
    assert log.read_text().count("Traceback") == 4, "each error and its cause"


def test_an_error_that_nobody_expected_is_one_sentence_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = _Command(debug=False, folder=tmp_path)
    with pytest.raises(ZeroDivisionError) as raised:
        raise ZeroDivisionError("division by zero")
    assert command.fail(raised.value) == 1
    assert _Command(debug=False).fail(raised.value) == 1
    known, unknown = capsys.readouterr().err.split("turnwise: ")[1:]
    assert known.startswith("unexpected ZeroDivisionError: division by zero (tests/test_cli.py:")
    assert known.endswith(f"traceback: {tmp_path / 'errors.log'} (or --debug)\n")
    assert "Traceback" in unknown, "where there is no folder, it is printed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/no/such/model", "there is no model in /no/such/model"),
        ("training.stepz=3", "there is no key training.stepz; did you mean training.steps?"),
        ("engine.swap_space=4", "engine.swap_space is not supported"),
        ("data.path=/no/rows.jsonl", "there is no data file /no/rows.jsonl"),
        ("environment=tests.test_cli:Nothing", "tests.test_cli has no Nothing"),
        ("environment=tests.rollouts.test_loops:UntypedDesk", "cannot be offered to the model"),
        ("environment=examples.gsm8k.environment:Gsm8k", "train.jsonl:1"),
        ("model.max_length=16", "does not fit the context of 16"),
        ("rollout.tool_parser=hermez", "rollout.tool_parser should be one of "),
        ("engine.vllm_args={no_such: 1}", "no_such"),
        ("engine.kv_cache_gib=0.00001", "No available memory for the cache blocks"),
        ("ray_address=127.0.0.1:1", "Ray cannot be reached at 127.0.0.1:1"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_running(
    file: Path, tmp_path: Path, override: str, message: str
) -> None:
    mark = Mark()
    done = turnwise("train", file, override, **mark.environment)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    _, *more = done.stderr.strip().splitlines()
    assert not more or (len(more) == 1 and more[0].startswith(f"traceback: {tmp_path}"))
    assert mark.left() == []


def test_a_model_stands_for_a_file_where_a_command_needs_no_more(tmp_path: Path) -> None:
    model, adapter, gguf = tmp_path / "model", tmp_path / "adapter", tmp_path / "one.gguf"
    for folder, name in ((model, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / name).write_text('{"base_model_name_or_path": "org/base"}')
    gguf.write_bytes(b"GGUF")
    assert stands_for_model(str(adapter))
    for given in (str(model), str(gguf), "org/model-1b"):
        config = cli_commands._file_or_model(given, ["serving.port=0"], NEEDED_KEYS)
        assert (config.model.path, config.serving.port) == (given, 0)
    with pytest.raises(InputError, match=r"there is no configuration file gone\.yaml"):
        cli_commands._file_or_model("gone.yaml", [], NEEDED_KEYS)
    with pytest.raises(InputError, match="there is no configuration file confg"):
        cli_commands._file_or_model("confg", [], NEEDED_KEYS)
    with pytest.raises(InputError, match=r"there is no configuration file runs/gone\.yaml"):
        cli_commands._file_or_model("runs/gone.yaml", [], NEEDED_KEYS)
    with pytest.raises(InputError, match="is a folder, not a configuration file"):
        cli_commands._file_or_model(str(tmp_path.parent), [], NEEDED_KEYS)


def test_the_tinker_command_takes_a_model_or_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    def refuse(*given: object) -> Config:
        asked.append(given)
        raise InputError("read")

    monkeypatch.setattr("turnwise.tinker.backend.server_config", refuse)
    for given in (["org/model", "seed=1"], ["x.yaml", "seed=1"], ["--model", "org/model"]):
        assert in_process("tinker", *given).exit_code == 2
    assert asked == [
        ("org/model", None, ["seed=1"]),
        (None, Path("x.yaml"), ["seed=1"]),
        ("org/model", None, []),
    ]


def test_doctor_names_the_key_of_rows_that_are_not_there(file: Path) -> None:
    done = in_process("doctor", file, "data.eval_path=gone.jsonl")
    assert "data.eval_path: there is no data file gone.jsonl" in done.stdout
