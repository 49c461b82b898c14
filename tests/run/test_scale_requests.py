"""`turnwise scale`: what a run answers to it, and does, on simulated engines."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.serving.test_manager import simulated
from turnwise.cli import app
from turnwise.config import Config
from turnwise.core.stacks import register
from turnwise.errors import DeadlineError, InputError, TrainerError
from turnwise.run import scaling
from turnwise.run.scaling import ask, request_file
from turnwise.serving.manager import AsyncLLMServerManager


@pytest.fixture
def config(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    monkeypatch.setattr(scaling, "_LOOK_SECONDS", 0.05)
    config = make_config(output_dir=str(tmp_path), name="run")
    register(tmp_path / "run", "turnwise")
    return config


@pytest.fixture
def run(config: Config) -> Path:
    return Path(config.output_dir, config.name)


async def engines(manager: Any, count: int) -> None:
    async with asyncio.timeout(60):
        while len(manager.engines) != count or manager._leaving:
            await asyncio.sleep(0.02)


async def test_a_run_gets_as_many_engines_as_it_is_asked_for(config: Config, run: Path) -> None:
    manager = simulated(1, startup_seconds=0.2)
    with pytest.raises(TrainerError):
        await _ask_often(config, run, manager)
    manager = simulated(1, startup_seconds=0.2)
    async with manager.running(), scaling.scaling(config, manager):
        await engines(manager, 2)  # as after a restart of the trainer
    assert scaling._wanted == {}


async def _ask_often(config: Config, run: Path, manager: AsyncLLMServerManager) -> None:
    """Ask for several numbers, one after another, until the trainer dies."""
    async with manager.running(), scaling.scaling(config, manager):
        said = await asyncio.to_thread(ask, run, 3, 60.0)
        assert said.startswith("engines: 1 now, 3 wanted; they join once the cluster has room")
        assert request_file(run).read_text() == said
        await engines(manager, 3)
        said = await asyncio.to_thread(ask, run, 2, 60.0)
        assert said.startswith("engines: 3 now, 2 wanted; ")
        await engines(manager, 2)
        command = [sys.executable, "-m", "turnwise.cli", "scale", str(run), "--workers", "2"]
        done = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        stdout, _ = await done.communicate()
        assert stdout.decode().startswith("engines: 2 now, 2 wanted; ")
        raise TrainerError("the process of policy rank 0 died")


async def test_a_range_of_workers_grows_by_itself(config: Config, run: Path) -> None:
    serving = config.serving.model_copy(update={"workers": "2-4"})
    config = config.model_copy(update={"serving": serving})
    manager = simulated("2-4", startup_seconds=0.2)
    async with manager.running(), scaling.scaling(config, manager):
        assert len(manager.engines) == 2
        await engines(manager, 4)
        await asyncio.to_thread(ask, run, 1, 60.0)
        await engines(manager, 1)


async def test_what_a_run_refuses_is_said_in_a_sentence(
    config: Config, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    take = scaling._take_request

    def counted(*arguments: Any) -> int | None:
        looks.append(arguments)
        return take(*arguments)

    monkeypatch.setattr(scaling, "_take_request", counted)
    training = config.training.model_copy(update={"colocated": True})
    together = config.model_copy(update={"training": training})
    async with simulated(1, startup_seconds=0.2).running() as manager:
        async with scaling.scaling(together, manager):
            with pytest.raises(InputError, match="refuses: its engines run in the trainer"):
                await asyncio.to_thread(ask, run, 3, 60.0)
        async with scaling.scaling(config, manager):
            for wrong in (0, 10**9, 10**99):
                with pytest.raises(InputError, match="refuses: a number of engines is from 1"):
                    await asyncio.to_thread(ask, run, wrong, 60.0)
            for other in ("{", "", "-1", "\udcff", "engines: 1 now"):  # no request
                request_file(run).write_text(other, errors="surrogateescape")
                seen = len(looks)
                async with asyncio.timeout(60):
                    while len(looks) < seen + 3:  # the first may have begun before
                        await asyncio.sleep(0.02)
                said = request_file(run).read_text(errors="surrogateescape")
                assert said == other
        assert len(manager.engines) == 1


def test_a_run_that_does_not_answer_or_is_none_is_said_so(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"may still be starting, did not answer within 0\.2 s"):
        ask(run, 2, 0.2)
    assert not request_file(run).exists(), "the request is withdrawn"
    (tmp_path / "ended" / "logs").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no process of a run in .*ended is running here"):
        ask(tmp_path / "ended", 2)
    done = CliRunner().invoke(app, ["scale", str(tmp_path / "none"), "--workers", "2"])
    assert done.exit_code == 2
    assert "no process of a run in" in done.stderr
