"""`turnwise stuck`: of a run that waits, of one that does not answer, of one that has ended."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.core.stacks import REPORT, ask, register, report_request, write_report
from turnwise.core.watchdog import waiting, watching_progress
from turnwise.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    register(tmp_path, "turnwise")
    return tmp_path


async def test_a_live_run_says_who_waits_for_whom_and_shows_its_stacks(run: Path) -> None:
    async with watching_progress(3600.0, lambda line: None, run):
        with waiting("the trainer to train"):
            text = await asyncio.to_thread(lambda: ask(run, 60.0))
    first, *_ = text.splitlines()
    assert "no progress for " in first
    assert "the trainer to train (" in first
    assert "== turnwise: " in text
    assert "in ask" in text, "the stack of this very process"
    assert text == (run / REPORT).read_text()
    assert not report_request(run).exists()


def test_a_run_that_does_not_answer_still_shows_its_stacks(run: Path) -> None:
    text = ask(run, 0.3)
    assert text.startswith("the run did not answer within 0.3 s: ")
    assert "in test_a_run_that_does_not_answer_still_shows_its_stacks" in text
    assert not report_request(run).exists(), "the request is withdrawn"


def test_the_last_report_of_a_run_that_has_ended_is_shown(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(InputError, match=r"is running here, and it has no stuck\.txt"):
        ask(tmp_path)
    write_report(tmp_path, "no progress for 60 s; waiting for: 4 tools")
    done = CliRunner().invoke(app, ["stuck", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"no process of {tmp_path} is running; its last report:\n")
    assert "waiting for: 4 tools" in done.stdout


def test_a_folder_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stuck", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "there is no run in" in done.stderr
