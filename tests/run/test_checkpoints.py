"""The checkpoints of a run, by number, through crashes and beyond ten thousand steps."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.config import Config, parse_config
from turnwise.errors import CompleteError, InputError
from turnwise.observe.conversations import trajectory_file
from turnwise.observe.metrics import StepMetrics
from turnwise.run.commands import TrainingResult, config_of_run, train
from turnwise.run.run_dir import RunDir, find_resume
from turnwise.training import checkpoint
from turnwise.trajectory import ExactnessReport
from turnwise.viewer.run_files import ViewedRun, find_tokenizer


def a_config(folder: Path, **sections: Any) -> Config:
    tree = {
        "environment": "e:E",
        "output_dir": str(folder),
        "model": {"path": "m"},
        "data": {"path": "d"},
    }
    return parse_config(tree | sections)


def save(run: RunDir, step: int) -> None:
    """Save as the training loop does, in the place of a trainer that writes one file."""
    place = run.begin_checkpoint(step)
    (place / "model.safetensors").write_text(f"the weights of step {step}")
    (place / "tokenizer.json").touch()
    run.commit_checkpoint(step, {"step": step})


def test_10050_steps_keep_the_last_checkpoints_and_the_best(
    tmp_path: Path,
) -> None:
    training = {"steps": 10_050, "keep_last": 2}
    config = a_config(tmp_path, training=training, trajectories={"keep": 3})
    run = RunDir(config)
    best = 9_950
    kept: list[int] = []
    for step in (*range(500, 9_500, 500), *range(9_500, 10_051)):
        run.metrics.write(StepMetrics(step=step, accuracy_heldout=float(step == best)).to_json())
        run.write_trajectories(step, [])
        if step % 50:
            continue
        save(run, step)
        saved = checkpoint.list_checkpoints(run.path / "checkpoints")
        assert TrainingResult(run.path, [], ExactnessReport()).checkpoint == saved[-1]
        kept = sorted({*kept[-1:], step} | ({best} if step >= best else set()))
        assert [path.name for path in saved] == [f"step-{one:04d}" for one in kept]
        assert find_resume(run.path).step == step
    run.metrics.close()
    assert trajectory_file(run.path).name == "step-10050.jsonl"
    assert trajectory_file(run.path, 10_049).name == "step-10049.jsonl"
    files = [*ViewedRun(run.path, "run").files()]
    assert files == ["step-10048", "step-10049", "step-10050"]
    assert find_tokenizer(run.path, {}) == (
        run.path / "checkpoints" / "step-10050" / "tokenizer.json"
    )


def test_a_new_checkpoint_stays_beside_damaged_later_ones(tmp_path: Path) -> None:
    run = RunDir(a_config(tmp_path, training={"keep_last": 1}))
    for step in (8, 10):
        save(run, step)
    (run.path / "checkpoints" / "step-0010" / "model.safetensors").unlink()
    save(run, 9)  # of the run that was resumed
    names = [path.name for path in checkpoint.list_checkpoints(run.path / "checkpoints")]
    assert names == ["step-0009", "step-0010"]
    assert find_resume(run.path).step == 9
    run.metrics.close()


def test_the_next_checkpoint_removes_half_written_ones(
    tmp_path: Path,
) -> None:
    run = RunDir(a_config(tmp_path))
    run.begin_checkpoint(3)
    run.begin_checkpoint(7)
    save(run, 4)
    left = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert left == ["step-0004", "step-0007.tmp"]
    run.metrics.close()


def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(a_config(tmp_path, training={"keep_last": 1}))
    save(run, 1)
    flushed: set[int] = set()
    removed: list[str] = []
    fsync, rmtree = os.fsync, shutil.rmtree

    def seen_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def seen_rmtree(path: Path, **options: Any) -> None:
        if Path(path).exists():
            removed.append(Path(path).name)
            new = run.path / "checkpoints" / "step-0002"
            missing = [p for p in (new, *new.rglob("*")) if p.stat().st_ino not in flushed]
            assert missing == []
            assert new.parent.stat().st_ino in flushed
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(shutil, "rmtree", seen_rmtree)
    save(run, 2)
    assert removed == ["step-0001"]
    run.metrics.close()


def dies_at(call: int, work: Callable[[], None]) -> bool:
    """Do some work in a process that is killed at its so many-th rename or removal.

    Returns:
        Whether it was killed; False if it had ended before.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def counted(function: Any) -> Any:
            def call_or_die(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return call_or_die

        Path.rename = counted(Path.rename)  # type: ignore[method-assign]
        shutil.rmtree = counted(shutil.rmtree)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def write(folder: Path, text: str) -> None:
    place = checkpoint.begin(folder)
    (place / "model.safetensors").write_text(text)
    checkpoint.write_loop(folder, {"step": 1})
    checkpoint.commit(folder)


def test_a_crash_in_a_replacement_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "my_model"
    seen = set()
    call, dies = 1, True
    while dies:
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, "old")
        dies = dies_at(call, lambda: write(folder, "new"))
        assert checkpoint.incomplete_reason(folder) == ""
        seen.add((folder / "model.safetensors").read_text())
        write(folder, "next")  # and the next one is written as if nothing had happened
        assert [path.name for path in tmp_path.iterdir()] == ["my_model"]
        call += 1
    assert call > 5
    assert seen == {"old", "new"}


def test_a_crash_in_a_runs_save_leaves_a_checkpoint_to_resume(tmp_path: Path) -> None:
    call, dies, steps = 1, True, set()
    while dies:
        config = a_config(tmp_path, name=f"run{call}", training={"keep_last": 1})
        run = RunDir(config)
        save(run, 1)
        save(run, 2)
        (run.path / "checkpoints" / "step-0002" / "tokenizer.json").unlink()
        dies = dies_at(call, lambda run=run: save(run, 2))  # type: ignore[misc]
        try:
            steps.add(find_resume(run.path).step)
        except InputError:
            # Only the damaged one was there before, and the new one is not whole yet.
            assert call <= 3
        run.metrics.close()
        call += 1
    assert steps == {2}


def test_a_runs_configuration_survives_a_crash_during_its_write(tmp_path: Path) -> None:
    run = RunDir(a_config(tmp_path))
    save(run, 1)
    before = (run.path / "config.yaml").read_text()

    def resume() -> None:
        Path.replace = lambda *_: os._exit(9)  # type: ignore[method-assign,assignment,return-value]
        RunDir(a_config(tmp_path, seed=7), find_resume(run.path))

    child = os.fork()
    if child == 0:
        resume()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 9
    assert (run.path / "config.yaml").read_text() == before
    run.metrics.close()


def test_changes_of_a_moved_run_are_checked_when_it_resumes(
    tmp_path: Path,
) -> None:
    run = RunDir(a_config(tmp_path, name="first"))
    run.metrics.close()
    moved = run.path.rename(tmp_path / "moved")
    assert config_of_run(moved, ["training.learning_rate=0.5"]).training.learning_rate == 0.5
    assert config_of_run(moved, ["training.steps=7"]).name == "moved"
    for change in ("seed=1", "name=other", "model.lora.rank=4"):
        with pytest.raises(InputError, match=f"{change.partition('=')[0]} cannot change from"):
            config_of_run(moved, [change])
    with pytest.raises(InputError, match="seed cannot change from 0 to 5"):
        config_of_run(moved, settings={"seed": 5})


def test_the_command_of_a_run_that_is_complete_ends_well(tmp_path: Path) -> None:
    """A launcher that repeats it is done."""
    run = RunDir(a_config(tmp_path / "runs", training={"steps": 5}))
    save(run, 5)
    run.metrics.close()
    again = CliRunner().invoke(app, ["train", "--resume", str(run.path)])
    assert (again.exit_code, "the run is complete" in again.output) == (0, True)


async def test_a_program_that_resumes_has_its_own_config_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(a_config(tmp_path / "runs", training={"steps": 5}))
    save(run, 5)
    run.metrics.close()
    monkeypatch.chdir(tmp_path)
    same = a_config(Path("runs"), training={"steps": 5, "learning_rate": 1e-3})
    with pytest.raises(CompleteError, match="the run is complete; set training"):
        await train(same, Console(quiet=True), run.path)
    with pytest.raises(InputError, match="seed cannot change from 0 to 7 when a run is resumed"):
        await train(a_config(Path("runs"), seed=7), Console(quiet=True), run.path)
