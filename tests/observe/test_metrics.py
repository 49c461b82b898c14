"""The record of a step's metrics."""

from collections import Counter
from dataclasses import fields
from typing import get_type_hints

from turnwise.engine.protocol import TurnTimes
from turnwise.observe.metrics import StepMetrics, UpdateMetrics, table
from turnwise.rollout import Batch, Group
from turnwise.training.reports import TrainMetrics
from turnwise.trajectory import Trajectory


def test_every_metric_is_documented_in_the_table() -> None:
    lines = table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [item.name for item in fields(StepMetrics)]
    assert all(len(line.split("|")[2].strip()) > 10 for line in lines)


def test_the_parts_have_no_metric_that_the_record_does_not_document() -> None:
    known = get_type_hints(StepMetrics)
    for part in (TrainMetrics, UpdateMetrics):
        assert part.__annotations__.keys() <= known.keys()


def test_what_was_not_measured_is_left_out_but_for_what_a_reader_looks_for() -> None:
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
    metrics.add_training({"loss": 0.5, "logprob_diff_max": 0.25})
    row = metrics.to_json()
    assert (row["accuracy_heldout"], row["heldout"]) == (None, {})
    assert (row["loss"], row["logprob_diff_max"]) == (0.5, 0.25)


def test_a_workers_speed_is_that_of_its_turns_without_their_time_in_the_queue() -> None:
    group = Group("p")
    for index, (worker, seconds, queued) in enumerate([("a", 2.0, 1.0), ("b", 4.0, None)]):
        trajectory = Trajectory("p", index, reward=0.0)
        trajectory.add_turn([1], [2, 3, 4, 5], [-0.5] * 4, [0] * 4, "stop")
        group.trajectories.append(trajectory)
        group.calls[index] = [TurnTimes(0, 100.0, None, 100.0 + seconds, worker, queued)]
    group.trajectories.append(Trajectory("p", 2, reward=0.0))  # its agent's turns have no times
    metrics = StepMetrics(step=1)
    metrics.add_rollouts(Batch([group], seconds=1.0), Counter())
    assert metrics.worker_tokens_per_s == {"a": 4.0, "b": 1.0}
