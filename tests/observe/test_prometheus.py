"""/metrics of a training run: what its steps count, who is left out, and Grafana's dashboard."""

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.serving.openai.test_engine_metrics import Hung, Told
from turnwise.config import ServingConfig
from turnwise.errors import InputError
from turnwise.observe import prometheus
from turnwise.observe.metrics import StepMetrics, series
from turnwise.observe.prometheus import serving_metrics, step_families
from turnwise.serving.openai.metrics import Families
from turnwise.serving.scheduler import Scheduler

DASHBOARD = ROOT / "examples" / "grafana" / "turnwise.json"
_NAME = re.compile(r"(?:turnwise_|vllm:)\w+")


def step(number: int, **values: Any) -> dict[str, Any]:
    row = StepMetrics(step=number, trajectories=8)
    for name, value in values.items():
        assert hasattr(row, name)
        setattr(row, name, value)
    return row.to_json()


def values(text: str) -> dict[str, float]:
    """Each sample's value by its name and labels' values."""
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exported(steps: Callable[[], Iterator[Metric]]) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families(steps))
    return values(generate_latest(registry).decode())


def queries(dashboard: Mapping[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def names_asked() -> set[str]:
    """The metrics that the dashboard's queries name."""
    dashboard = json.loads(DASHBOARD.read_text())
    return {name for query in queries(dashboard) for name in _NAME.findall(query)}


def test_gauges_have_the_last_value_and_counters_the_sum() -> None:
    events = {"tool_call": 10, "tool_error": 2, "tool_timeout": 1, "tool_malformed": 4}
    phases = {"train": 1.5, "tools": 3.0}
    rows = [
        step(0, reward_mean=0.1, accuracy_heldout=0.25, heldout={"accuracy": 0.25}),
        step(1, reward_mean=0.2, events=events, phase_seconds=phases, dropped={"stalled": 1}),
        step(2, reward_mean=0.3, events={"tool_call": 5}, forked={"tool_calls": 3}),
    ]
    steps = step_families(rows)
    first = exported(steps)
    assert first["turnwise_reward"] == 0.3
    assert first["turnwise_step"] == 2
    assert first["turnwise_accuracy_heldout"] == 0.25, "the last measured one"
    assert first["turnwise_trajectories_total"] == 16, "without those of step 0"
    calls = {k: v for k, v in first.items() if k.startswith("turnwise_tool_calls_total")}
    assert calls == {
        "turnwise_tool_calls_total error": 2,
        "turnwise_tool_calls_total timeout": 1,
        "turnwise_tool_calls_total malformed": 4,
        "turnwise_tool_calls_total ok": 12,
    }
    assert first["turnwise_tool_seconds_total"] == 3.0
    assert first["turnwise_phase_seconds_total train"] == 1.5
    assert first["turnwise_dropped_total stalled"] == 1
    assert first["turnwise_forks_total tool_calls"] == 3
    assert "turnwise_forks_total " not in first, "a step without forks has no part"
    assert "turnwise_kl" not in first, "nothing is shown as 0 that was not measured"
    rows.append(step(3, reward_mean=0.5, dropped={"stalled": 2}))
    second = exported(steps)
    assert second["turnwise_reward"] == 0.5
    assert second["turnwise_dropped_total stalled"] == 3
    assert exported(steps) == second, "each step is counted once"


def test_an_evaluation_that_comes_late_is_the_last_one() -> None:
    rows = [step(1, accuracy_heldout=0.25, dropped={"stalled": 1}), step(2, heldout={}), step(3)]
    steps = step_families(rows)
    assert exported(steps)["turnwise_accuracy_heldout"] == 0.25
    rows[1] = {**rows[1], "accuracy_heldout": 0.5, "judges": {"requests": 7}}
    again = exported(steps)
    assert again["turnwise_accuracy_heldout"] == 0.5
    assert again["turnwise_step"] == 3
    assert again["turnwise_judges_total requests"] == 7
    assert again["turnwise_dropped_total stalled"] == 1, "nothing is counted twice"


def test_steps_of_an_earlier_program_are_not_counted() -> None:
    rows = [step(1, dropped={"stalled": 1})]
    assert "turnwise_dropped_total stalled" not in exported(step_families(rows, skipped=1))


def get(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


async def test_a_run_serves_its_metrics_beside_those_of_its_engines() -> None:
    scheduler, rows = Scheduler(ServingConfig(), 1.0), [step(1, reward_mean=0.5)]
    scheduler.add("worker-0", Told())
    async with serving_metrics("127.0.0.1", 0, rows, lambda: 3, scheduler) as port:
        rows.append(step(2, reward_mean=0.75))
        found = values(await asyncio.to_thread(get, port))
        assert found["turnwise_step"] == 2
        assert found["turnwise_trajectories_total"] == 8, "the first step was there before"
        assert found["turnwise_groups_in_flight"] == 3
        assert found["vllm:tokens_total 0 worker-0"] == 3.0
        assert found["turnwise_worker_up worker-0"] == 1
        with pytest.raises(InputError, match=r"choose another metrics\.port"):
            async with serving_metrics("127.0.0.1", port, rows, lambda: 3, scheduler):
                pass
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(get, port)


async def test_a_run_whose_loop_is_stuck_still_shows_its_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "_ENGINE_SECONDS", 0.1)
    scheduler = Scheduler(ServingConfig(), 1.0)
    scheduler.add("worker-0", Hung())
    rows = [step(1)]
    async with serving_metrics("127.0.0.1", 0, rows, lambda: 0, scheduler) as port:
        rows.append(step(2))
        found = values(get(port))  # on the loop, which therefore answers nobody
        assert found["turnwise_step"] == 2
        assert found["turnwise_worker_metrics worker-0"] == 0, "and says what is missing"


async def test_without_a_port_nothing_is_served() -> None:
    async with serving_metrics(
        "127.0.0.1", None, [], lambda: 0, Scheduler(ServingConfig(), 1.0)
    ) as p:
        assert p is None


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert (dashboard["uid"], dashboard["title"]) == ("turnwise", "Turnwise")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) == 23
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__rate_interval"} == variables
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)
            assert all(
                target["expr"].count("(") == target["expr"].count(")")
                for target in panel["targets"]
            )


@pytest.mark.slow  # makes a virtual environment
def test_grafanas_own_types_know_all_of_the_dashboard() -> None:
    """Unknown fields would be gone after reading and writing."""
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=ROOT, check=True, timeout=900)
    read_and_write = """
import json, sys
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
plugins.register_default_plugins()
print(json.dumps(Dashboard.from_json(json.load(sys.stdin)), cls=encoder.JSONEncoder))
"""
    python = ROOT / ".venv-interop" / "bin" / "python"
    text = DASHBOARD.read_text()
    done = subprocess.run(
        [python, "-c", read_and_write], input=text, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert lost(json.loads(text), json.loads(done.stdout)) == []
    wrong = {"title": "Turnwise", "panels": [{"type": "row", "titel": "Training"}]}
    assert lost(wrong, {"title": "Turnwise", "panels": [{"type": "row"}]}) == ["/panels/0/titel"]


def lost(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """The places of values that are not in `theirs`, which may have more keys."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        gone = [f"{place}/{key}" for key in ours.keys() - theirs.keys()]
        kept = ours.keys() & theirs.keys()
        return gone + [p for key in kept for p in lost(ours[key], theirs[key], f"{place}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [p for i, pair in pairs for p in lost(*pair, f"{place}/{i}")]
    return [] if ours == theirs else [place]


def test_the_page_names_metrics_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "trackers.md").read_text()
    counted = {each.name for _, each in series()}
    others = set(re.findall(r"`(turnwise_\w+)`", page)) - counted
    assert others == {
        "turnwise_groups_in_flight",
        "turnwise_turns_total",
        "turnwise_worker_load",
        "turnwise_worker_metrics",
        "turnwise_worker_up",
    }


def test_what_the_dashboard_asks_of_steps_is_counted() -> None:
    """`test_live_run.py` asks a real run for everything."""
    counted = {each.name for _, each in series()}
    asked = {
        name
        for query in queries(json.loads(DASHBOARD.read_text()))
        for name in _NAME.findall(query)
    }
    others = {name for name in asked - counted if not name.startswith("vllm:")}
    assert others == {
        "turnwise_groups_in_flight",
        "turnwise_turns_total",
        "turnwise_worker_load",
        "turnwise_worker_metrics",
        "turnwise_worker_up",
    }
    assert counted - asked == {
        "turnwise_judges_total",  # of runs with judges only
        "turnwise_teacher_kl",  # of runs with a teacher only
        "turnwise_update_bytes",
        "turnwise_sampled_tokens_total",
        "turnwise_trained_tokens_total",
        "turnwise_trajectories_total",
    }
