"""The values of trained tokens: made by a rank, matched with trajectories, written and read."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.plain_scoring import token_logprobs
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import TurnTimes
from turnwise.rollouts import Group
from turnwise.run.run_dir import RunDir
from turnwise.run.token_values import columns_of, read_columns, write_columns
from turnwise.training.batching import plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import RECORDED, StepReport, by_sample
from turnwise.training.samples import SampleBatch, make_samples
from turnwise.trajectory import Outcome, Trajectory

LOGPROBS = [-6.0, -6.5, -7.0]


def a_group() -> Group:
    """Four trajectories, each of two turns; the third has another branch."""
    group = Group("rows:1")
    for index in range(4):
        trajectory = Trajectory(
            "rows:1", index, status="completed", outcome=Outcome(float(index % 2))
        )
        first = [20 + index, 21, 22]
        trajectory.add_turn(first, [30, 31, 32], LOGPROBS, [4, 4, 4], "stop")
        second = [*first, 30, 31, 32, 40]
        trajectory.add_turn(second, [50, 51, 52], LOGPROBS, [4, 5, 5], "stop")
        if index == 2:
            trajectory.add_turn([*first, 60], [61], [-5.0], [5], "stop", fork_reason="edited")
        group.trajectories.append(trajectory)
    return group


def a_batch(make_config: Callable[..., Config]) -> tuple[Config, Group, SampleBatch]:
    training = {"learning_rate": 1e-3, "threads": 1, "max_staleness": 2}
    config, group = make_config(training=training), a_group()
    return config, group, make_samples([group], config, version=5)


def test_each_trained_token_has_the_values_of_its_training(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config, group, batch = a_batch(make_config)
    rank = TrainerRank(config)
    rank.version = 5
    model = rank._scorer.get_submodule("model")
    expected = {}
    for number, trajectory in enumerate(group.trajectories):
        for branch in trajectory.branches():
            mask_1T = torch.tensor([branch.response_mask], dtype=torch.bool)
            with torch.no_grad():
                scored = token_logprobs(
                    model, torch.tensor([branch.token_ids]), mask_1T, SamplingConfig()
                ).tolist()
            turns = [turn for turn in branch.turns if turn >= 0]
            places = [turns[:n].count(turn) for n, turn in enumerate(turns)]
            expected |= {(number, *at): s for *at, s in zip(turns, places, scored, strict=True)}
    shares = plan_micro_batches(batch.samples, 1, 1, 12, "padded")
    trained = by_sample(shares, [rank.train(shares[0])])
    path = tmp_path / "training" / "step-0001.safetensors"
    write_columns(path, columns_of(trained, batch.origins, group.trajectories, 5))
    rows = 0
    for number, trajectory in enumerate(group.trajectories):
        columns = read_columns(path, number)
        for row in range(len(columns["turn"])):
            turn, at = int(columns["turn"][row]), int(columns["at"][row])
            value = {name: float(column[row]) for name, column in columns.items()}
            engine = trajectory.turns[turn].logprobs[at]
            assert value["trainer_logprob"] == pytest.approx(expected[number, turn, at], abs=1e-4)
            assert value["ratio"] == pytest.approx(
                math.exp(value["trainer_logprob"] - engine), rel=1e-3
            )
            assert value["advantage"] == pytest.approx(2 * (number % 2) - 1, abs=1e-4)
            assert value["weight"] == pytest.approx(1 / 25)
            assert value["staleness"] == 5 - trajectory.turns[turn].weight_versions[at]
            assert value["clipped"] in (0, 1)
            assert value["entropy"] > 0
            rows += 1
    assert rows == len(expected) == 25
    assert len(read_columns(path, 9)["turn"]) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_find_their_samples_on_any_number_of_ranks(
    make_config: Callable[..., Config], ranks: int
) -> None:
    _, _, batch = a_batch(make_config)
    shares = plan_micro_batches(batch.samples, 2, ranks, 12, "padded")
    reports = []
    for share in shares:
        mine = [s for update in share for own in update.micro_batches for s in own]
        ids = [s.token_ids_T[s.response_mask_T] for s in mine]
        row = np.concatenate([np.zeros(0), *ids]).astype(np.float32)
        values_KN = np.tile(row, (len(RECORDED), 1))
        reports.append(StepReport(5, [], values_KN, {}, {}, 0, 1.0, 0.0))  # type: ignore[arg-type]
    trained = by_sample(shares, reports)
    assert len(trained) == len(batch.samples) == 5
    for sample, values_KN in trained:
        assert values_KN[0].tolist() == sample.token_ids_T[sample.response_mask_T].tolist()
    empty = StepReport(5, [], np.zeros((len(RECORDED), 0), np.float32), {}, {}, 0, 1.0, 0.0)  # type: ignore[arg-type]
    assert by_sample(shares[:1], [empty]) == [], "only the value model was trained"


def test_the_times_of_turns_go_through_a_checkpoint() -> None:
    group = a_group()
    group.calls = {0: [TurnTimes(0, 1.0, None, 3.0, "worker-1")], 2: []}
    again = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    assert again.calls == group.calls
    assert again.calls[0][0].worker == "worker-1"


@pytest.mark.parametrize(("keep", "left"), [(None, 4), (2, 2)])
def test_only_the_files_of_the_latest_steps_are_kept(
    make_config: Callable[..., Config], tmp_path: Path, keep: int | None, left: int
) -> None:
    config = make_config(output_dir=str(tmp_path), trajectories={"keep": keep})
    folder = RunDir(config)
    steps = (8, 9, 10, 10_000)
    for step in steps:
        calls = [[TurnTimes(0, 1.0, 2.0, 3.0, "worker-0")], []]
        folder.write_trajectories(step, [Trajectory("rows:1")])
        folder.write_timeline(step, calls)
        both = [Trajectory("rows:1", 0), Trajectory("rows:1", 1)]
        group = Group("rows:1", both, calls=dict(enumerate(calls)))
        asyncio.run(folder.group_log("eval", step).keep(0, group))
        folder.write_token_values(step, {"turn": np.zeros(1, np.int32)})
    folder.metrics.close()
    lines = (folder.path / "timeline" / "step-10000.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        [[0, 1.0, 2.0, 3.0, "worker-0", None, None]],
        [],
    ]
    kinds = ("trajectories/step", "trajectories/eval", "training/step")
    for kind in (*kinds, "timeline/step", "timeline/eval"):
        names = {path.stem for path in folder.path.glob(f"{kind}-*")}
        assert names == {f"{kind.rpartition('/')[2]}-{step:04d}" for step in steps[-left:]}
