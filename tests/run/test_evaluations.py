"""Evaluations between steps and beside training: when, of which weights, and that none is lost."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise.config import SamplingConfig, parse_config
from turnwise.core.admission import Priority
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.group import OTHER_WEIGHTS
from turnwise.rollouts.problems import Problems
from turnwise.rollouts.producer import RunGroup
from turnwise.run.display import SILENT, Display
from turnwise.run.evaluations import Evaluations
from turnwise.run.run_dir import Resume, RunDir
from turnwise.trajectory import FORCED, Outcome, Trajectory, read_jsonl

ROWS = [{"n": n} for n in range(4)]


class Engines:
    """Answers held-out problems with the weights of the moment, as soon as the test lets it."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.right = True

    def group_runner(
        self, sampling: SamplingConfig, priority: Priority = Priority.TRAINING
    ) -> RunGroup:
        return self.run_group

    async def run_group(self, problem: Problem, tag: str) -> Group:
        self.asked.append(tag)
        await self.gate.wait()
        trajectory = Trajectory(
            problem.id, 0, status="completed", outcome=Outcome(float(self.right))
        )
        trajectory.add_turn([1, 2], [3, 4], [-0.1, -0.1], [self.version] * 2, "stop")
        return Group(problem.id, [trajectory])


class Loop:
    """The training loop's calls, in their order, without a trainer."""

    def __init__(self, folder: Path, resumed_after: int | None = None, **keys: Any) -> None:
        tree = {
            "environment": "e:E",
            "output_dir": str(folder),
            "model": {"path": "m"},
            "data": {"path": "d", "eval_path": "h"},
            "training": {"steps": 7},
            "eval": {"every": 2, "background": True, **keys},
        }
        config = parse_config(tree)
        self.engines, self.asked = Engines(), asyncio.Event()
        resume = None if resumed_after is None else Resume(folder, resumed_after, {}, [])
        self.folder = RunDir(config, resume)
        heldout = Problems("h", ROWS)
        runtime: Any = self.engines

        async def ready() -> None:
            """Rollouts begin first."""

        self.evaluations = Evaluations(config, runtime, heldout, self.folder, SILENT, ready)
        self.tasks = asyncio.TaskGroup()

    def begin(self, step: int) -> None:
        self.evaluations.begin(self.tasks, step, self.engines.version)

    async def step(self, step: int) -> StepMetrics:
        """Update the weights, evaluate if that is awaited, write the line, begin the evaluation."""
        await self.evaluations.finish(self.asked)
        self.engines.version = step
        metrics = StepMetrics(step=step)
        metrics.add_evaluation(await self.evaluations.between(step))
        self.folder.metrics.write(metrics.to_json())
        if self.evaluations.due_beside(step):
            self.begin(step)
        return metrics

    def measured(self) -> dict[int, float]:
        """The accuracies in the file, by step."""
        lines = (self.folder.path / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        known = {row["step"]: row["accuracy_heldout"] for row in rows}
        assert [*known] == sorted(known)
        return {step: accuracy for step, accuracy in known.items() if accuracy is not None}


async def test_all_but_the_first_and_the_last_run_beside_training(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    async with loop.tasks:
        assert (await loop.step(0)).accuracy_heldout == 1.0
        loop.engines.gate.clear()
        assert (await loop.step(1)).heldout == {}
        assert (await loop.step(2)).accuracy_heldout is None
        await asyncio.sleep(0.01)
        assert loop.evaluations.running
        assert loop.measured() == {0: 1.0}
        next_step = asyncio.create_task(loop.step(3))
        await asyncio.sleep(0.01)
        assert loop.engines.version == 2, "the weights stay until the evaluation is over"
        loop.engines.gate.set()
        await next_step
        assert loop.measured() == {0: 1.0, 2: 1.0}
        for step in (4, 5, 6):
            await loop.step(step)
        assert (await loop.step(7)).accuracy_heldout == 1.0
    assert loop.measured() == dict.fromkeys((0, 2, 4, 6, 7), 1.0)
    held = [*read_jsonl(loop.folder.path / "trajectories" / "eval-0002.jsonl")]
    assert {v for t in held for turn in t.turns for v in turn.weight_versions} == {2}


async def test_without_the_key_every_evaluation_is_awaited(tmp_path: Path) -> None:
    loop = Loop(tmp_path, background=False)
    async with loop.tasks:
        measured = [(await loop.step(step)).accuracy_heldout for step in range(8)]
        assert not loop.evaluations.running
    assert [step for step, accuracy in enumerate(measured) if accuracy] == [0, 2, 4, 6, 7]


async def test_what_other_weights_sampled_is_dropped_and_counted(tmp_path: Path) -> None:
    """As after the restart of an engine, which gets the newest weights."""
    loop = Loop(tmp_path)
    async with loop.tasks:
        answer, asked = loop.engines.run_group, list[str]()

        async def restarted(problem: Problem, tag: str) -> Group:
            asked.append(tag)
            loop.engines.version = 2 + (len(asked) == 1)
            return await answer(problem, tag)

        loop.evaluations._run_beside = restarted
        await loop.step(2)
    row = loop.folder.metrics.rows[-1]
    assert row["heldout_dropped"] == {OTHER_WEIGHTS: 1}
    assert row["accuracy_heldout"] == 0.75, "what fails counts as wrong"
    assert row["heldout"]["pass@1"] == 0.75


def test_a_forced_token_is_of_every_version() -> None:
    trajectory = Trajectory("p", 0, outcome=Outcome(1.0))
    trajectory.add_turn([1], [2, 3], [-0.1, 0.0], [5, FORCED], "stop")
    group = Group("p", [trajectory])
    group.pin(5)
    assert len(group.trajectories) == 1
    group.pin(6)
    assert group.dropped == {OTHER_WEIGHTS: 1}
    assert "version 6" in group.causes[OTHER_WEIGHTS]


async def test_a_target_reached_beside_training_is_measured_again(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path, target=0.5)
    async with loop.tasks:
        loop.engines.right = False
        await loop.step(0)
        loop.engines.right = True
        await loop.step(2)
        assert loop.evaluations.heldout is None
        await loop.evaluations.finish(loop.asked)
        loop.engines.right = False
        assert (await loop.step(3)).accuracy_heldout == 0.0, "the model of this step is worse"
        assert (await loop.step(4)).accuracy_heldout is None
        await loop.evaluations.finish(loop.asked)
        loop.engines.right = True
        assert (await loop.step(5)).accuracy_heldout is None, "one that misses it changes nothing"
        await loop.step(6)
        assert (await loop.step(7)).accuracy_heldout == 1.0
    assert loop.measured() == {0: 0.0, 2: 1.0, 3: 0.0, 4: 0.0, 6: 1.0, 7: 1.0}


async def test_one_that_was_cut_short_is_run_again_after_a_resume(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    async with loop.tasks:
        await loop.step(0)
        await loop.step(1)
        loop.engines.gate.clear()
        await loop.step(2)
        await asyncio.sleep(0.01)
        loop.asked.set()
        await loop.evaluations.finish(loop.asked)
    assert loop.measured() == {0: 1.0}
    loop.folder.metrics.close()
    again = Loop(tmp_path, resumed_after=2)
    async with again.tasks:
        assert again.evaluations.cut_short(2)
        again.engines.version = 2
        again.begin(2)
        await again.step(3)
        assert again.measured() == {0: 1.0, 2: 1.0}
    again.folder.metrics.close()
    assert not Loop(tmp_path, resumed_after=2).evaluations.cut_short(2)
    assert not Loop(tmp_path, resumed_after=1).evaluations.cut_short(1), "step 2 comes again"


async def test_a_waiting_step_is_saved_and_its_weights_are_evaluated(
    tmp_path: Path,
) -> None:
    """A run that is asked to end waits for no evaluation."""
    loop = Loop(tmp_path)
    async with loop.tasks:
        await loop.step(0)
        loop.engines.gate.clear()
        await loop.step(2)
        waits = asyncio.create_task(loop.step(3))
        await asyncio.sleep(0.05)
        assert not waits.done(), "nobody has asked"
        loop.asked.set()
        await waits
    assert loop.engines.version == 3
    assert loop.measured() == {0: 1.0}
    loop.folder.metrics.close()
    again = Loop(tmp_path, resumed_after=3)
    async with again.tasks:
        assert again.evaluations.cut_short(3)
        again.engines.version = 3
        again.begin(3)
        await again.evaluations.finish(again.asked)
    assert again.measured() == {0: 1.0, 3: 1.0}


async def test_an_evaluation_that_fails_ends_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    async def fail(problem: Problem, tag: str) -> Group:
        group = Group(problem.id)
        group.dropped["engine_error"] = 1
        group.note("engine_error", "worker-0 died")
        return group

    loop.evaluations._run_beside = fail

    async def play() -> None:
        async with loop.tasks:
            await loop.step(2)
            await asyncio.sleep(600)

    with pytest.raises(ExceptionGroup) as failed:
        await play()
    assert "evaluation: 4 of 4 trajectories failed (4 engine_error" in str(failed.value.exceptions)


def test_the_display_names_the_step_and_what_was_dropped() -> None:
    out = io.StringIO()
    with Display("demo", 7, Console(file=out, width=200, color_system=None), 1.0) as display:
        dropped = {OTHER_WEIGHTS: 1}
        display.evaluated(StepMetrics(step=2, accuracy_heldout=0.75, heldout_dropped=dropped))
    assert out.getvalue() == (
        "step    2/7  held-out accuracy (reward ≥ 1) 0.750  "
        "held-out dropped: 1  evaluated beside training\n"
    )
