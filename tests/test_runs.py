"""Whole training runs that are killed, resumed, spread out or squeezed together."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.conftest import ROOT, command_environment, python
from tests.programs import Mark
from tests.test_cli import TIMES, Lottery, file, metrics_of, turnwise, write_config
from turnwise.config import Config, load_config
from turnwise.trajectory import Trajectory, read_jsonl

__all__ = ["Lottery", "file"]

SHORT = ("eval.every=0", "sampling.n=4")
PER_STEP = 16
"""Trajectories of a step of these runs."""
HELD = "environment=tests.test_runs:Held"


class Held(Lottery):
    """Lottery that gives as many rewards as TURNWISE_HELD says, and others once its file exists."""

    given = itertools.count(1)

    def reward(self, trajectory: Trajectory) -> float:
        most, _, file = os.environ.get("TURNWISE_HELD", "").partition(" ")
        if most and next(self.given) > int(most):
            sys.stdout.write("held\n")
            sys.stdout.flush()
            while not Path(file).exists():
                time.sleep(0.05)
        return super().reward(trajectory)


class HeldOut(Held):
    """Lottery that holds the rewards of held-out rows only."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.held_out = row.get("held_out")

    def reward(self, trajectory: Trajectory) -> float:
        return super().reward(trajectory) if self.held_out else Lottery.reward(self, trajectory)


class Sure(Lottery):
    """Lottery that everyone wins: its groups have no signal."""

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0


def timeless(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.endswith(TIMES)}
        for row in metrics_of(run)
    ]


class Running:
    """`turnwise train` in a process of its own, watched line by line.

    Args:
        steps: Steps after which `Held` waits.
        go: File that it waits for; None waits for ever.
        environment: The one that waits.
    """

    def __init__(
        self, *arguments: object, steps: int, go: Path | None = None, environment: str = HELD
    ) -> None:
        self.mark = Mark()
        self.process = subprocess.Popen(
            [*python(), "-m", "turnwise.cli", "train", *map(str, arguments), environment],
            cwd=ROOT,
            env=command_environment()
            | self.mark.environment
            | {"TURNWISE_HELD": f"{steps * PER_STEP} {go or '/no/such/file'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, *texts: str) -> None:
        """Read its lines until each of these has come, in any order."""
        assert self.process.stdout is not None
        missing = set(texts)
        for line in self.process.stdout:
            missing -= {text for text in missing if text in line}
            if not missing:
                return
        raise AssertionError(f"it ended before it said {missing}: {self.process.stderr.read()}")

    def ranks(self) -> list[psutil.Process]:
        """The trainer's processes, in the order in which they began."""
        found = [p for p in self.mark.processes() if "TrainerActor" in " ".join(p.cmdline())]
        return sorted(found, key=lambda process: process.create_time())

    def kill(self) -> None:
        """As a machine that loses power, as far as a test can."""
        ends = time.monotonic() + 120
        while (alive := self.mark.processes()) and time.monotonic() < ends:
            for process in alive:  # one of them may have been starting another
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        self.process.communicate(timeout=120)


REPEATABLE = (
    *("deterministic=true", "training.steps=4", "training.checkpoint_every=1", *SHORT),
    "sampling.max_tokens=8",  # a deterministic engine computes one sequence at a time
)


@pytest.fixture(scope="module")
def whole(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run of four steps, and beside it the configuration of it."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_config(make_config, folder)
    done = turnwise("train", path, *REPEATABLE, "name=whole")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "whole"


def test_a_run_ended_and_then_killed_resumes_bit_for_bit(whole: Path) -> None:
    killed = whole.with_name("killed")
    options = (*REPEATABLE, "training.checkpoint_every=0", "name=killed")
    running = Running(whole.parents[1] / "config.yaml", *options, steps=2)
    running.until("step    2/4", "held")
    running.process.send_signal(signal.SIGTERM)
    stdout, stderr = running.process.communicate(timeout=120)
    assert running.process.returncode == 130, stderr
    assert "asked to end: step 2 is saved first" in stdout
    assert running.mark.left() == []
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-0002"]

    often = "training.checkpoint_minutes=0.00001"  # every step takes longer
    running = Running("--resume", killed, often, steps=1)
    running.until("step    3/4", "held")
    running.kill()
    assert len(metrics_of(killed)) == 3
    # A crash while it saves leaves less than a checkpoint; the one before is taken, and it says so.
    newest = max((killed / "checkpoints").glob("step-*[0-9]"))
    before = f"step-{int(newest.name[5:]) - 1:04d}"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    resumed = turnwise("train", "--resume", killed)
    assert resumed.returncode == 0, resumed.stderr
    assert "a newer checkpoint is incomplete" in resumed.stdout
    assert f"continuing from {killed.resolve()}/checkpoints/{before}" in resumed.stdout

    assert timeless(killed) == timeless(whole)
    steps = [f"trajectories/step-000{step}.jsonl" for step in (1, 2, 3, 4)]
    for kind in (*steps, "checkpoints/step-0004/model.safetensors"):
        assert (killed / kind).read_bytes() == (whole / kind).read_bytes()
    firsts = {t.turns[0].completion_token_ids[0] for t in read_jsonl(whole / steps[0])}
    assert len(firsts) > 1  # a group's samples have seeds of their own
    first, second = (json.loads((r / "exactness.json").read_text()) for r in (whole, killed))
    assert first == second
    kept = sorted(folder.name for folder in (killed / "checkpoints").iterdir())
    assert kept == ["step-0003", "step-0004"]

    again = turnwise("train", "--resume", killed)
    assert again.returncode == 0
    assert "the run is complete; set training.steps=N to continue to step N" in again.stderr


def test_the_synchronous_run_is_the_plain_loop(whole: Path, tmp_path: Path) -> None:
    """`training.max_staleness` is 0."""
    config = str(whole.parents[1] / "config.yaml")
    subprocess.run(
        [
            *python(),
            "-m",
            "examples.step02_one_page_loop.loop",
            config,
            f"output_dir={tmp_path}",
            "name=plain",
            *REPEATABLE,
            "training.steps=2",
        ],
        cwd=ROOT,
        env=command_environment(),
        timeout=1000,
        check=True,
    )
    plain = tmp_path / "plain"
    for step in (1, 2):
        for name in (f"trajectories/step-000{step}.jsonl", f"training/step-000{step}.safetensors"):
            assert (whole / name).read_bytes() == (plain / name).read_bytes()
    ours, theirs = timeless(whole), timeless(plain)
    assert [row["step"] for row in theirs] == [1, 2]
    for row, other in zip([row for row in ours if row["step"] in (1, 2)], theirs, strict=True):
        held_out = {"accuracy_heldout", "heldout", "groups_discarded"}
        assert {k: v for k, v in row.items() if k not in held_out} == {
            k: v for k, v in other.items() if k not in held_out
        }


@pytest.mark.slow  # the parts alone: rollouts/test_mixture.py, rollouts/test_curriculum.py
def test_several_environments_with_a_curriculum_resume_exactly(whole: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((whole.parents[1] / "config.yaml").read_text())
    rows = {"path": tree["data"]["path"], "eval_path": tree["data"]["eval_path"], "eval_limit": 2}
    tree["environments"] = {
        "lottery": {"environment": "tests.test_cli:Lottery", "data": {**rows, "limit": 3}},
        "sure": {"environment": "tests.test_runs:Sure", "data": {**rows, "limit": 3}, "weight": 2},
    }
    del tree["environment"]
    tree |= {"data": {"curriculum": True}, "output_dir": str(tmp_path / "runs")}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree, sort_keys=False))
    options = (*REPEATABLE, "eval.every=2")
    done = turnwise("train", config, *options, "training.steps=6", "name=through")
    assert done.returncode == 0, done.stderr
    through, halted = tmp_path / "runs" / "through", tmp_path / "runs" / "halted"
    done = turnwise("train", config, *options, "training.steps=3", "name=halted")
    assert done.returncode == 0, done.stderr
    done = turnwise("train", "--resume", halted, "training.steps=6")
    assert done.returncode == 0, done.stderr

    kept = [row for row in timeless(halted) if row["step"] != 3]  # evaluated, as a last step is
    assert kept == [row for row in timeless(through) if row["step"] != 3]
    for step in range(1, 7):
        name = f"trajectories/step-{step:04}.jsonl"
        assert (halted / name).read_bytes() == (through / name).read_bytes()
    last = metrics_of(through)[-1]
    assert last["environments"].keys() == {"lottery", "sure"}
    assert last["environments"]["sure"]["heldout"]["accuracy"] == 1.0
    assert last["environments"]["sure"]["pools"]["mastered"] == 3
    assert last["pools"]["resting"] > 0
    files = [through / f"trajectories/step-{step:04}.jsonl" for step in range(1, 7)]
    shares = Counter(t.environment for path in files for t in read_jsonl(path))
    assert shares == {"lottery": 6 * PER_STEP / 3, "sure": 6 * PER_STEP * 2 / 3}
    said = turnwise("show", through)
    assert "environments: lottery " in said.stdout


@pytest.mark.slow  # the processes alone: rollouts/test_processes.py
def test_two_rollout_processes_sample_what_one_does(whole: Path) -> None:
    config = whole.parents[1] / "config.yaml"
    done = turnwise("train", config, *REPEATABLE, "rollout.processes=2", "name=processes")
    assert done.returncode == 0, done.stderr
    ours = whole.with_name("processes")
    assert (ours / "logs" / "rollout-1.log").exists()
    assert [row["loss"] for row in metrics_of(ours)] == [row["loss"] for row in metrics_of(whole)]
    for step in (1, 2, 3, 4):
        name = f"trajectories/step-000{step}.jsonl"
        assert (ours / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow  # ranks of a trainer alone: training/test_trainer_group.py
def test_a_run_on_two_ranks_has_the_metrics_of_one_rank(whole: Path) -> None:
    config = whole.parents[1] / "config.yaml"
    done = turnwise("train", config, *REPEATABLE, "training.ranks=2", "name=ranks")
    assert done.returncode == 0, done.stderr
    for one, two in zip(timeless(whole), timeless(whole.with_name("ranks")), strict=True):
        assert one.keys() == two.keys()
        for key, value in one.items():
            expected = pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
            assert two[key] == expected, (one["step"], key)


@pytest.mark.slow  # a killed rank alone: training/test_trainer_group.py
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_rank_ends_the_run_or_the_run_recovers_alone(
    file: Path, tmp_path: Path, restarts: int
) -> None:
    name, go = f"restarts{restarts}", tmp_path / "go"
    running = Running(
        file,
        *SHORT,
        "training.ranks=2",
        "training.threads=1",
        "training.steps=6",
        "training.checkpoint_every=1",
        f"training.restarts={restarts}",
        "training.max_staleness=2",  # groups wait while the rank is killed
        f"name={name}",
        steps=5,  # it does not end before the rank is killed
        go=go,
    )
    running.until("step    2/6")
    ranks = running.ranks()
    assert len(ranks) == 2
    ranks[1].kill()
    go.touch()
    killed = time.monotonic()
    stdout, stderr = running.process.communicate(timeout=1000)
    if restarts:
        assert running.process.returncode == 0, stderr
        assert "died; restart 1 of 1" in stdout
        rows = metrics_of(tmp_path / "runs" / name)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["weight_version"] for row in rows] == [1, 2, 3, 4, 5, 6]
        for step in range(1, 7):
            written = tmp_path / "runs" / name / "trajectories" / f"step-{step:04}.jsonl"
            of_turns = [turn.weight_versions for t in read_jsonl(written) for turn in t.turns]
            versions = {version for turn in of_turns for version in turn}
            assert versions <= {*range(max(0, step - 3), step)}, "the counter did not go on"
    else:
        assert time.monotonic() - killed < 200  # and not only after training.step_timeout, 1800 s
        assert running.process.returncode == 2
        assert "the process of policy rank " in stderr
        assert "died" in stderr
    assert running.mark.left() == []


@pytest.mark.slow  # the parts alone: serving/colocated/test_colocated.py
@pytest.mark.parametrize("shards", [1, 2])
def test_trainer_and_engine_take_turns_in_the_same_processes(
    file: Path, tmp_path: Path, shards: int
) -> None:
    """An engine of two shards spans both ranks of its trainer, which lends it memory."""
    sizes = (f"training.ranks={shards}", f"engine.tensor_parallel_size={shards}")
    done = turnwise(
        "train",
        file,
        "training.colocated=true",
        "training.threads=1",
        "training.offload=[params, optimizer]",
        "name=together",
        *sizes,
        *SHORT,
    )
    assert done.returncode == 0, done.stderr
    rows = metrics_of(tmp_path / "runs" / "together")
    assert [row["weight_version"] for row in rows] == [1, 2]
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows)
    assert all(row["canary_diff_max"] < 1e-4 for row in rows)
    weights = Path(load_config(file).model.path, "model.safetensors").stat().st_size
    assert all(row["offloaded_gib"] > 2.9 * weights / 2**30 for row in rows)


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """A Ray cluster of two nodes, one with `engines` and one with `trainers`; its address."""
    script = (
        "import sys; from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args="
        "{'num_cpus': 2, 'resources': {'engines': 2}})\n"
        "cluster.add_node(num_cpus=2, resources={'trainers': 2})\n"
        "cluster.wait_for_nodes(300)\n"
        "print(cluster.address, flush=True); sys.stdin.read(); cluster.shutdown()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**command_environment(), "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate("")


@pytest.mark.slow
def test_engines_and_trainer_on_two_nodes_by_collective(
    two_nodes: str, file: Path, tmp_path: Path
) -> None:
    """As far as one machine shows it."""
    done = turnwise(
        "train",
        file,
        f"ray_address={two_nodes}",
        "weights.transport=collective",
        "serving.resources={engines: 1}",
        "serving.workers=2",
        "training.resources={trainers: 1}",
        "training.ranks=2",
        "training.threads=1",
        "name=apart",
        *SHORT,
    )
    assert done.returncode == 0, done.stderr
    rows = metrics_of(tmp_path / "runs" / "apart")
    assert [row["weight_version"] for row in rows] == [1, 2]
    assert all(row["canary_diff_max"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_rollouts_that_run_ahead_outlive_a_crash(file: Path, tmp_path: Path) -> None:
    options = ("training.max_staleness=2", "training.checkpoint_every=1", *SHORT)
    running = Running(file, *options, "training.steps=500", "name=ahead", steps=7)
    running.until("step    3/500")
    running.kill()
    run = tmp_path / "runs" / "ahead"
    resumed = turnwise("train", "--resume", run, "training.steps=8")
    assert resumed.returncode == 0, resumed.stderr
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["staleness_max"] for row in rows) <= 2
    seen = [
        (t.problem_id, t.sample_index)
        for step in range(1, 9)
        for t in read_jsonl(run / "trajectories" / f"step-{step:04d}.jsonl")
    ]
    assert len(seen) == len(set(seen)) == 8 * 4 * 4  # every problem of the epoch once


BESIDE = (
    *("deterministic=true", "training.steps=4", "training.checkpoint_every=1"),
    *("sampling.n=4", "sampling.max_tokens=8", "eval.every=2", "eval.sampling.max_tokens=8"),
    *("data.eval_limit=16", "environment=tests.test_runs:HeldOut"),
)


@pytest.fixture
def held_out(file: Path, tmp_path: Path) -> str:
    """Held-out rows that say so."""
    rows = Path(load_config(file).data.eval_path or "").read_text().splitlines()
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(json.loads(row) | {"held_out": 1}) + "\n" for row in rows))
    return f"data.eval_path={path}"


def evaluated(run: Path, step: int) -> dict[Any, list[tuple[list[int], list[int]]]]:
    """The sampled ids and their weight versions of the turns of each held-out trajectory."""
    return {
        (t.problem_id, t.sample_index): [
            (turn.completion_token_ids, turn.weight_versions) for turn in t.turns
        ]
        for t in read_jsonl(run / "trajectories" / f"eval-{step:04d}.jsonl")
    }


@pytest.mark.slow
def test_background_evaluation_equals_blocking_despite_a_crash(
    file: Path, held_out: str, tmp_path: Path
) -> None:
    between, beside = (tmp_path / "runs" / name for name in ("between", "beside"))
    done = turnwise("train", file, *BESIDE, held_out, "name=between")
    assert done.returncode == 0, done.stderr

    options = (*BESIDE, held_out, "eval.background=true", "name=beside")
    environment = BESIDE[-1]
    running = Running(file, *options, steps=1, environment=environment)
    running.until("step    2/4", "held")
    ends = time.monotonic() + 300
    while not (beside / "checkpoints" / "step-0002").exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    running.kill()
    rows = metrics_of(beside)
    assert [row["accuracy_heldout"] is None for row in rows] == [False, True, True]

    running = Running("--resume", beside, steps=0, environment=environment)
    running.until("held")  # the evaluation of step 2, again
    running.process.send_signal(signal.SIGTERM)
    _, stderr = running.process.communicate(timeout=120)
    assert running.process.returncode in (130, 143), stderr
    assert running.mark.left() == []

    resumed = turnwise("train", "--resume", beside)
    assert resumed.returncode == 0, resumed.stderr
    assert "evaluated beside training" in resumed.stdout
    assert timeless(beside) == timeless(between)
    measured = [row["step"] for row in metrics_of(beside) if row["accuracy_heldout"] is not None]
    assert measured == [0, 2, 4]
    for step in measured:
        assert evaluated(beside, step) == evaluated(between, step)


AHEAD = ("training.max_staleness=1", "rollout.processes=2", "serving.workers=2")
TOGETHER = ("training.colocated=true", "training.threads=1")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [AHEAD, TOGETHER])
def test_background_evaluation_uses_one_version_in_every_layout(
    file: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    options = (
        *("training.steps=5", "eval.every=1", "eval.background=true", "data.eval_limit=16"),
        *("sampling.n=4", "eval.sampling.n=4", "eval.sampling.temperature=1"),
    )
    done = turnwise("train", file, *layout, *options)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        versions = {
            version
            for turns in evaluated(run, row["step"]).values()
            for _, each in turns
            for version in each
        }
        assert versions == {row["weight_version"]}
        assert row["heldout_dropped"] == {}
        assert row["heldout"].keys() >= {"pass@1", "pass@2", "pass@4", "mean@4"}
        assert row["heldout"]["pass@4"] >= row["heldout"]["pass@2"] >= row["heldout"]["pass@1"]
        assert row["heldout"]["pass@1"] == pytest.approx(row["accuracy_heldout"])
