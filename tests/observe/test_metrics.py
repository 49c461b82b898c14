"""The record of a step's metrics."""

import re
from collections import Counter
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest

from docs.reference import TABLES, on_page_markdown
from tests.conftest import ROOT
from turnwise.engine.protocol import TurnTimes
from turnwise.observe.metrics import StepMetrics, series
from turnwise.rollouts import Batch, Group
from turnwise.training.reports import RECORDED, StepReport, SumName, UpdateReport, merge
from turnwise.trajectory import Outcome, Trajectory


def test_every_metric_is_documented_in_the_table() -> None:
    lines = TABLES["metrics"]().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [item.name for item in fields(StepMetrics)]
    assert all(len(line.split("|")[3].strip()) > 10 for line in lines)


def test_the_page_is_made_of_the_declarations() -> None:
    page = on_page_markdown((ROOT / "docs" / "reference" / "metrics.md").read_text())
    found = re.findall(r"^\| `(\w+)` \| (.*) \| [^|]+ \|$", page, re.M)
    named = {name: re.findall(r"`(turnwise_\w+)`(?: by (\w+))?", cell) for name, cell in found}
    assert named.keys() == StepMetrics.__dataclass_fields__.keys()
    assert [(of, *each) for of in named for each in named[of]] == [
        (of, each.name, each.label) for of, each in series()
    ]


def test_the_trainer_reports_only_documented_metrics() -> None:
    values = np.zeros((len(RECORDED), 2), np.float32)
    update = UpdateReport(tokens=2, sums={name: 1.0 for name in get_args(SumName)})
    report = StepReport(1, [update], values, Counter({0: 2}), Counter(padded=1), 4, 1.0, 0.5)
    (metrics := StepMetrics(step=1)).add(merge([report]))
    assert (metrics.ratio, metrics.trained_tokens) == (0.5, 2)
    with pytest.raises(AttributeError):
        metrics.add({"rato": 1.0})


def test_the_row_omits_unmeasured_metrics_except_the_core_ones() -> None:
    metrics = StepMetrics(step=3)
    assert metrics.to_json() == {
        "step": 3,
        "reward_mean": 0.0,
        "trajectories": 0,
        "logprob_diff_mean": None,
        "logprob_diff_max": None,
        "staleness_max": 0,
        "train_tokens_per_s": 0.0,
    }
    metrics.add_evaluation(None)
    metrics.add({"loss": 0.5, "logprob_diff_max": 0.25})
    row = metrics.to_json()
    assert (row["accuracy_heldout"], row["heldout"]) == (None, {})
    assert (row["loss"], row["logprob_diff_max"]) == (0.5, 0.25)


def test_lengths_and_deviations_are_those_of_the_trajectories() -> None:
    given = [(1.0, 2, "completed"), (0.0, 4, "completed"), (0.5, 6, "length")]
    trajectories = []
    for reward, tokens, status in given:
        trajectory = Trajectory("p", status=status, outcome=Outcome(reward))  # type: ignore[arg-type]
        trajectory.add_turn([1], [2] * tokens, [-0.5] * tokens, [0] * tokens, "stop")
        trajectory.set_outcome(parts={"few": 2 * reward} if reward else {})
        trajectories.append(trajectory)
    metrics = StepMetrics()
    metrics.add_trajectories(trajectories)
    assert metrics.reward_std == pytest.approx(0.5)
    assert metrics.reward_parts_std == pytest.approx({"few": 0.5**0.5})
    assert metrics.completion_tokens == {
        "mean": 4.0, "min": 2.0, "max": 6.0, "ended_mean": 3.0, "ended_min": 2.0, "ended_max": 4.0,
    }  # fmt: skip
    metrics.add_trajectories([])
    assert (metrics.reward_std, metrics.completion_tokens) == (None, {})


def test_a_workers_speed_leaves_out_the_time_in_its_queue() -> None:
    group = Group("p")
    for index, (worker, seconds, queued) in enumerate([("a", 2.0, 1.0), ("b", 4.0, None)]):
        trajectory = Trajectory("p", index, outcome=Outcome(0.0))
        versions = [0, 0, -1, 0, 0]  # a logits processor forced a token
        trajectory.add_turn([1], [2, 3, 9, 4, 5], [-0.5] * 5, versions, "stop")
        group.trajectories.append(trajectory)
        group.calls[index] = [TurnTimes(0, 100.0, None, 100.0 + seconds, worker, queued)]
    group.trajectories.append(
        Trajectory("p", 2, outcome=Outcome(0.0))
    )  # its agent's turns have no times
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(Batch([group], seconds=1.0), Counter())
    assert metrics.worker_tokens_per_s == {"a": 4.0, "b": 1.0}
    assert metrics.turns_mean == pytest.approx(2 / 3)
