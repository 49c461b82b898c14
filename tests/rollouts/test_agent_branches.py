"""Branches of an agent's session that are left out of training."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.errors import TrajectoryError
from turnwise.rollouts import Group, Runner
from turnwise.rollouts.agent_branches import leave_out_branches
from turnwise.rollouts.data import load_training
from turnwise.serving.openai.server import OpenAIServer
from turnwise.training.samples import make_samples
from turnwise.trajectory import Branch, Trajectory, audit

HERE = "tests.rollouts.test_agent_branches"


def session() -> Trajectory:
    """A task of two turns, a title between them, and a second way on from the first turn."""
    trajectory = Trajectory("p")
    trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.1], [0, 0], "stop")
    trajectory.add_turn([9, 8], [7], [-0.1], [0], "stop")
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 6, 6], [-0.1] * 3, [0] * 3, "stop")
    trajectory.add_turn([1, 2, 3, 4, 9], [6], [-0.1], [0], "stop")
    return trajectory


def short(trajectory: Trajectory, branches: list[Branch]) -> list[bool]:
    return [len(branch.token_ids) < 7 for branch in branches]


def titles(trajectory: Trajectory, branches: list[Branch]) -> list[bool]:
    return [branch.token_ids[0] == 9 for branch in branches]


def nothing(trajectory: Trajectory, branches: list[Branch]) -> list[bool]:
    return []


def numbers(trajectory: Trajectory, branches: list[Branch]) -> list[int]:
    return [1] * len(branches)


def broken(trajectory: Trajectory, branches: list[Branch]) -> list[bool]:
    raise LookupError("no such branch")


@pytest.mark.parametrize(
    ("rule", "untrained", "left"),
    [
        ("all", [False, False, False, False], 0),
        ("longest", [False, True, False, True], 2),
        (f"{HERE}:short", [False, False, True, False], 1),
        (f"{HERE}:titles", [True, False, True, True], 2),
    ],
)
async def test_turns_of_no_kept_branch_are_context(
    rule: str, untrained: list[bool], left: int, make_config: Callable[..., Config]
) -> None:
    trajectory = session()
    await leave_out_branches(trajectory, rule, 5.0)
    assert [turn.untrained == "left_out_branch" for turn in trajectory.turns] == untrained
    assert trajectory.events["left_out_branch"] == left
    trajectory.set_outcome(reward=1.0)
    batch = make_samples([Group("p", trajectories=[trajectory, session()])], make_config(), 0)
    assert batch.report.first_violation is None
    sampled = [len(turn.completion_token_ids) for turn in trajectory.turns]
    context = sum(n for n, left_out in zip(sampled, untrained, strict=True) if left_out)
    assert batch.report.masked["left_out_branch"] == context
    assert sum(sum(sample.response_mask) for sample in trajectory.samples()) == 7 - context


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("nothing", r"a bool for each of 3 branches: \[\]"),
        ("numbers", r"a bool for each of 3 branches: \[1, 1, 1\]"),
        ("broken", "no such branch"),
    ],
)
async def test_a_rule_that_fails_fails_its_trajectory(rule: str, why: str) -> None:
    with pytest.raises(TrajectoryError, match=why) as caught:
        await leave_out_branches(session(), f"{HERE}:{rule}", 5.0)
    assert caught.value.reason == "agent_branches"


async def test_an_agents_session_is_trained_by_the_configured_rule(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    rollout = {"loop": "agent", "agent": "tests.plain_agents:team", "agent_branches": "longest"}
    config = make_config(rollout=rollout, serving={"port": 0}, sampling={"n": 2, "max_tokens": 8})
    engine = SimulatedEngine(vocab_size=len(tokenizer))
    runner = Runner(config, tokenizer)
    runner.loops["agent"].server = server = OpenAIServer(config, engine)
    await server.start()
    try:
        problem = load_training(config)[0]
        group = await runner.run_group(engine, problem, config.sampling, "g")
    finally:
        await server.stop()
    for trajectory in group.trajectories:
        assert len(trajectory.branches()) > 1
        assert len(trajectory.samples()) == 1
        assert audit(trajectory).first_violation is None
        assert trajectory.events["left_out_branch"] == len(trajectory.branches()) - 1
