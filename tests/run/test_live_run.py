"""A training run that is looked at from beside: its metrics, its stacks, and its turns' times."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT, command_environment, python
from tests.observe.test_prometheus import get, names_asked
from tests.test_cli import write_config
from turnwise.config import Config
from turnwise.core.stacks import REPORT, ask
from turnwise.observe.timeline import write_timeline

pytestmark = pytest.mark.slow  # one training run for all


@dataclass
class Run:
    folder: Path
    process: "subprocess.Popen[bytes]"
    said: Path
    """The file of what it prints; a pipe that nobody reads would stop it after some steps."""

    def metrics(self) -> str:
        """The metrics, as soon as the run has made two steps."""
        while True:
            assert self.process.poll() is None, self.said.read_text()
            text = get(port) if (port := self._port()) is not None else ""
            if text and "turnwise_step 0" not in text and "turnwise_step 1.0" not in text:
                return text
            time.sleep(0.05)

    def _port(self) -> int | None:
        """The port of the metrics; None as long as they are not served."""
        log = self.folder / "logs" / "turnwise.log"
        text = log.read_text() if log.exists() else ""
        served = re.search(r"metrics: http://127\.0\.0\.1:(\d+)/metrics", text)
        return int(served[1]) if served else None


@pytest.fixture(scope="module")
def run(
    make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """A run that goes on for as long as it is looked at."""
    folder = tmp_path_factory.mktemp("live")
    file = write_config(make_config, folder)
    said = folder / "said.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [
                *(*python(), "-m", "turnwise.cli", "train", str(file), "training.steps=100000"),
                *("metrics.port=0", "algorithm.kl.coef=0.001", "name=live"),
            ],
            cwd=ROOT,
            env=command_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield Run(folder / "runs" / "live", process, said)
    process.terminate()
    process.wait(300)


def test_every_metric_of_the_dashboard_is_served(run: Run) -> None:
    families = [*text_string_to_metric_families(run.metrics())]
    names = {sample.name for family in families for sample in family.samples}
    names |= {f"{family.name}_total" for family in families if family.type == "counter"}
    names |= {family.name for family in families}
    assert names_asked() - names == set()


def test_every_process_shows_its_stacks(run: Run) -> None:
    run.metrics()
    text = ask(run.folder, 120.0)
    headers = [line for line in text.splitlines() if line.startswith("== ")]
    assert text == (run.folder / REPORT).read_text()
    assert "no progress for " in text.splitlines()[0]
    for name in ("== turnwise: ", "== policy-0: ", "== worker-0: "):
        assert any(header.startswith(name) for header in headers), headers
    engine = next(part for part in text.split("\n== ") if "EngineCore" in part.splitlines()[0])
    assert "in run_engine_core" in engine


def test_the_times_of_its_turns_are_a_timeline(run: Run, tmp_path: Path) -> None:
    run.metrics()
    target = tmp_path / "step.json"
    count = write_timeline(run.folder, 1, target)
    spans = [e for e in json.loads(target.read_text())["traceEvents"] if e["ph"] == "X"]
    turns = [e for e in spans if e["pid"] == 1 and e["name"].startswith("turn ")]
    assert len(turns) == count >= 16, "a turn for each trajectory"
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    assert {turn["args"]["worker"] for turn in turns} == {"worker-0"}
    assert all(turn["args"]["sampled"] > 0 for turn in turns)
