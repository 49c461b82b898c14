"""A program's own Ray is joined, and is afterwards as it was before."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray

from tests.conftest import ROOT, own_environment, python
from turnwise.config import Config, dump_config
from turnwise.core import ray as rays
from turnwise.core.ray import leave_ray, outlives_run, start_ray
from turnwise.errors import InputError
from turnwise.run.display import SILENT
from turnwise.run.fleet import ray_running


def test_a_programs_own_ray_runs_engines_and_stays_as_it_was(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """In a namespace of its own, also where `ray_address` is given, and where joining fails; the
    manager answers `generate_sequences` between `start` and `shutdown`."""
    config = make_config(
        output_dir=str(tmp_path),
        serving={"workers": 1},
        rollout={"prompts_per_step": 1},
        sampling={"n": 2, "max_tokens": 4},
        training={"steps": 1, "learning_rate": 1e-4},
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    done = subprocess.run(
        [*python(), "-m", "tests.run.joined_ray", str(path)],
        cwd=ROOT,
        env={**own_environment(), "RAY_raylet_start_wait_time_s": "300"},  # two cores for all
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    results = {name: told[name].pop("result") for name in told}
    assert "is connected to Ray at" in results.pop("elsewhere")
    assert results == {"manager": 2, "rollout": 2, "train": 1}
    untouched = {"answer": 1, "namespace": "mine", "actors": ["Owned"], "reserved": 0}
    assert told == dict.fromkeys(told, untouched)


class FakeRay:
    """Ray as `core.ray` sees it: connected or not, under an id that changes with each start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        self.connected, self.starts, self.address = False, 0, address
        process = uuid4()  # not id(self), which a later test's may have again
        context = SimpleNamespace(
            get_worker_id=lambda: f"{process}, worker {self.starts}",
            get_temp_dir=lambda: "/nowhere",
            get_session_name=lambda: "session",
            gcs_address=address,
        )
        for name, value in {
            "is_initialized": lambda: self.connected,
            "init": self.init,
            "shutdown": self.shutdown,
            "cluster_resources": lambda: {"GPU": 2.0},
            "get_runtime_context": lambda: context,
        }.items():
            monkeypatch.setattr(ray, name, value)

    def init(self, **_: object) -> None:
        assert not self.connected
        self.connected, self.starts = True, self.starts + 1

    def shutdown(self) -> None:
        self.connected = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rays, "report_to", lambda log: None)
    with socket.create_server(("127.0.0.1", 0)) as head:
        yield FakeRay(monkeypatch, f"127.0.0.1:{head.getsockname()[1]}")


async def test_the_last_of_several_runs_shuts_down_their_shared_ray(
    fake: FakeRay, make_config: Callable[..., Config]
) -> None:
    config = make_config()
    async with ray_running(config, SILENT) as (known, gpus):
        assert (known.model.dtype, gpus) == ("float32", 2.0)  # that of the model's files
        assert not outlives_run()
        async with ray_running(config, SILENT):
            assert outlives_run()
        assert fake.connected
    assert not fake.connected
    assert fake.starts == 1


async def test_a_ray_that_the_program_started_outlives_every_run(
    fake: FakeRay, make_config: Callable[..., Config]
) -> None:
    for address in (None, "auto", fake.address, fake.address.replace("127.0.0.1", "localhost")):
        fake.connected, fake.starts = True, fake.starts + 1
        async with ray_running(make_config(ray_address=address), SILENT):
            assert outlives_run()
        assert fake.connected
    with pytest.raises(RuntimeError, match="of the program's own"):
        async with ray_running(make_config(), SILENT):
            raise RuntimeError("an error of the program's own")
    assert fake.connected


async def test_a_join_that_fails_leaves_the_programs_ray_running(
    fake: FakeRay, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.init()
    with pytest.raises(InputError, match=r"ray_address is 10\.0\.0\.1:6379, and this program is"):
        async with ray_running(make_config(ray_address="10.0.0.1:6379"), SILENT):
            pass
    monkeypatch.setattr(rays, "_probe_port", lambda address: os.stat("/nowhere"))
    with pytest.raises(InputError, match=f"Ray cannot be reached at {fake.address}"):
        async with ray_running(make_config(), SILENT):
            pass
    assert fake.connected


async def test_a_start_that_fails_half_way_leaves_no_ray_behind(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(**_: object) -> None:
        fake.connected = True
        raise RuntimeError("no room")

    monkeypatch.setattr(ray, "init", half)
    with pytest.raises(InputError, match="cannot be reached on this machine: no room"):
        await asyncio.to_thread(start_ray, None)
    assert not fake.connected
    leave_ray()
