"""The recorded runs of `turnwise view --demo`: they are whole, and can be recorded again."""

import asyncio
import zipfile
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from examples.calculator import recording
from tests.conftest import ROOT
from turnwise.cli import app as commands
from turnwise.viewer.run_files import RECORDING, ViewedRun, demo_runs, open_runs, parse
from turnwise.viewer.server import view


def check_run(run: ViewedRun, steps: int) -> set[str]:
    """Everything that the viewer shows of a run is there; return the reasons of its branches."""
    rows = run.rows()["rows"]
    assert [row["step"] for row in rows] == [*range(steps + 1)]
    assert run.alarms()["error"] is None
    assert run.config()["name"] == run.name
    trained = {f"step-{row['step']:04d}": row.get("trained_tokens", 0) for row in rows}
    files = run.files()
    assert {f"step-{steps:04d}", f"eval-{steps:04d}"} <= {*files}
    forks: set[str] = set()
    for file in files:
        summaries = run.index(file).summaries
        calls = run.timeline(file)["calls"]
        assert len(calls) == len(summaries)
        for index, summary in enumerate(summaries):
            forks |= {*summary["forks"]}
            assert run.audit(file, index)["violations"] == 0
            turns = parse(run.line(file, index))["turns"]
            assert [call[0] for call in calls[index]] == [*range(len(turns))] if calls else True
            known = {*map(int, run.vocabulary(file, index))}
            assert known >= {token for turn in turns for token in turn["completion_token_ids"]}
        values = sum(len(run.token_values(file, i).get("ratio", ())) for i in range(len(calls)))
        assert values == trained.get(file, 0)
    return forks


def check_comparison(run: ViewedRun) -> None:
    """The template renders the branches of the last step's first trajectory."""
    file = [name for name in run.files() if name.startswith("step")][-1]
    compared = run.compare_with_template(file, 0, 0)
    assert (compared["error"], compared["identical"]) == (None, True)


def test_the_recorded_runs_are_whole_and_small() -> None:
    assert RECORDING.stat().st_size < 300_000
    with demo_runs() as folders:
        runs = open_runs(folders)
        assert sorted(runs) == sorted(recording.RUNS)
        steps = 12
        assert check_run(runs["calculator"], steps) == set()
        assert check_run(runs["careful-agent"], steps) == {"history_changed"}
        for run in runs.values():
            check_comparison(run)
    assert not any(folder.exists() for folder in folders)


def left(folders: list[str]) -> list[str]:
    return [folder for folder in folders if Path(folder).exists()]


async def test_the_demo_is_served_and_leaves_nothing_behind() -> None:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(view([], 0, address.set_result, demo=True))
    async with httpx.AsyncClient(follow_redirects=True) as client:
        url = await asyncio.wait_for(address, 60)
        assert "<!doctype html>" in (await client.get(url)).text
        runs = (await client.get(f"{url.partition('?')[0]}api/runs")).json()["runs"]
    assert [run["name"] for run in runs] == sorted(recording.RUNS)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert left([run["path"] for run in runs]) == []


def test_without_a_run_the_command_names_the_demo() -> None:
    done = CliRunner().invoke(commands, ["view"])
    assert done.exit_code == 2
    assert "--demo" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_runs_can_be_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recording.record(tmp_path / "again.zip", 5, tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "again.zip") as archive:
        archive.extractall(tmp_path / "again")
    for run in open_runs([tmp_path / "again" / name for name in recording.RUNS]).values():
        assert check_run(run, 5) <= {"history_changed"}
        check_comparison(run)
