"""Values of single tokens: from what writes them on a turn to the loss, at the right tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.test_samples import config
from turnwise.rollouts import Group
from turnwise.training.algorithms.advantages import WithinGroup, grpo
from turnwise.training.batching import make_micro_batch
from turnwise.training.samples import make_samples
from turnwise.trajectory import FORCED, Outcome, Trajectory

CREDIT = "examples.step03_own_loss.credit:CreditCalls"


def played(index: int, results: Sequence[str]) -> Trajectory:
    """A trajectory whose calls had these results; the last turn is an answer."""
    made, prompt = Trajectory("p", index, status="completed", outcome=Outcome(float(index))), [1]
    for number, result in enumerate([*results, ""]):
        made.add_turn(prompt, [5, 6, 7], [-0.5] * 3, [0] * 3, "stop")
        made.messages.append({"role": "assistant", "content": ""})
        if result:
            made.messages.append({"role": "tool", "content": result})
        prompt = [*prompt, 5, 6, 7, 8 + number]
    return made


def test_a_users_credit_is_spread_over_the_calls_that_worked() -> None:
    group = Group("p", [played(0, ["4", "Error: no"]), played(1, ["Error: no", "4"])])
    settings = config(algorithm={"advantage": {"name": CREDIT, "decay": 0.5}})
    batch = make_samples([group], settings, 0)
    assert (batch.report.violations, batch.report.tokens_exact) == (0, 18)
    of_call, none = [0.25, 0.5, 1.0], [0.0] * 3
    expected = [[*of_call, *none, *of_call], [*none, *of_call, *of_call]]
    for sample, sign, shares in zip(batch.samples, (-1, 1), expected, strict=True):
        found = sample.advantages_T[sample.response_mask_T].tolist()
        assert found == pytest.approx([sign * share for share in shares], abs=1e-5)


class Weighted(WithinGroup):
    """Gives the loss a weight of its own for each token."""

    def __init__(self) -> None:
        super().__init__(grpo)

    def annotate(self, trajectory: Trajectory, advantages: Sequence[float]) -> None:
        super().annotate(trajectory, advantages)
        for index, turn in enumerate(trajectory.turns):
            places = np.arange(len(turn.completion_token_ids), dtype=np.float32)
            turn.streams["weight"] = places + 10 * index


def test_what_an_algorithm_adds_reaches_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a retry that shares a prompt, and a forced token."""
    group = Group("p", [played(0, ["4"]), played(1, ["4"])])
    for trajectory in group.trajectories:
        trajectory.add_turn([1], [9, 9, 9], [-0.5] * 3, [0, FORCED, 0], "stop", fork_reason="retry")
    settings = config(algorithm={"advantage": {"name": f"{__name__}:Weighted"}})
    batch = make_samples([group], settings, 0)
    tokens: Any = make_micro_batch(
        batch.samples, dict.fromkeys(range(9), 1), 0, "padded", torch.device("cpu")
    ).tokens
    own = [0.0, 1, 2, 10, 11, 12, 20, 22]
    assert tokens.streams["weight"].tolist() == own * 2
    assert {*tokens.streams} == {"weight"}
