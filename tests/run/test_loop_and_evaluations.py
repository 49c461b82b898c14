"""The training loop with evaluations beside it: a trainer and engines that only count versions."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from turnwise.config import SamplingConfig, parse_config
from turnwise.core.admission import Priority
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.problems import Problems
from turnwise.rollouts.producer import RunGroup
from turnwise.run.display import SILENT
from turnwise.run.run_dir import Resume, RunDir, find_resume
from turnwise.run.trainer import TrainingLoop
from turnwise.trajectory import Outcome, Trajectory, read_jsonl

TRAINING = Problems("train", [{"n": n} for n in range(12)])
HELD_OUT = Problems("held", [{"n": n} for n in range(5)])


class Fleet:
    """A trainer and the engines: each step adds one version, and an update takes it along."""

    def __init__(self) -> None:
        self.version = self.loaded = 0
        self.dtype = "float32"
        self.trained_tokens: list[Any] = []
        self.held: Callable[[str], bool] = lambda tag: False
        self.began: list[str] = []
        self.pause = asyncio.Event()
        self.right_from = 0  # the first version whose answers to held-out problems are right

    # The trainer.
    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def train(self, samples: Any) -> dict[str, Any]:
        self.version += 1
        await asyncio.sleep(0.01)
        return {"loss": 0.5, "trained_tokens": len(samples)}

    async def publish(self) -> Any:
        return SimpleNamespace(version=self.version, sent_bytes=0, changed=None)

    async def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text(str(self.version))

    async def holds(self, version: int, seconds: float) -> bool:
        return self.version == version

    async def load(self, folder: Path) -> None:
        self.version = int((folder / "model.safetensors").read_text())

    # The engines.
    async def update_weights(self, sync: Any) -> list[Any]:
        self.loaded = self.version
        return []

    def group_runner(
        self, sampling: SamplingConfig, priority: Priority = Priority.TRAINING
    ) -> RunGroup:
        async def run_group(problem: Problem, tag: str) -> Group:
            self.began.append(tag)
            if self.held(tag):
                await self.pause.wait()
            await asyncio.sleep(0.002)
            group = Group(problem.id)
            for index in range(sampling.n):
                right = self.loaded >= self.right_from if tag.startswith("eval") else index % 2
                reward = float(right)
                made = Trajectory(problem.id, index, status="completed", outcome=Outcome(reward))
                made.add_turn([1, 2], [3, 4], [-0.5, -0.5], [self.loaded] * 2, "stop")
                group.trajectories.append(made)
                group.judging["requests"] += 1
            return group

        return run_group


class Run:
    def __init__(self, folder: Path, fleet: Fleet, resume: bool = False, **keys: Any) -> None:
        self.config = parse_config(
            {
                "environment": "e:E",
                "output_dir": str(folder),
                "model": {"path": "m"},
                "data": {"path": "d", "eval_path": "h"},
                "sampling": {"n": 2},
                "rollout": {"prompts_per_step": 4},
                "eval": {"every": 2, "background": True},
                "training": {"steps": 6, "checkpoint_every": 1},
                **keys,
            }
        )
        start: Resume | None = find_resume(folder / "run") if resume else None
        self.folder = RunDir(self.config, start)
        runtime: Any = SimpleNamespace(
            policy=fleet,
            manager=fleet,
            teachers=None,
            group_runner=fleet.group_runner,
            training_runner=fleet.group_runner,
        )
        self.loop = TrainingLoop(
            self.config, runtime, TRAINING, HELD_OUT, self.folder, SILENT, start
        )

    async def play(self, until: Callable[[], bool] | None = None) -> None:
        """Run to the end, or until something is so; then cancel it, as a kill would end it."""
        task = asyncio.create_task(self.loop.run())
        async with asyncio.timeout(60):
            while until is not None and not until():
                assert not task.done(), task
                await asyncio.sleep(0.005)
            if until is None:
                await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.folder.metrics.close()

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.folder.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def measured(self) -> list[int]:
        return [row["step"] for row in self.rows() if row["accuracy_heldout"] is not None]

    def versions(self, step: int) -> set[int]:
        path = self.folder.path / "trajectories" / f"eval-{step:04d}.jsonl"
        return {v for t in read_jsonl(path) for turn in t.turns for v in turn.weight_versions}


async def test_each_evaluation_measures_its_step_after_rollouts_begin(
    tmp_path: Path,
) -> None:
    for ahead in (0, 2):
        fleet = Fleet()
        training = {"steps": 6, "max_staleness": ahead, "checkpoint_every": 1}
        run = Run(tmp_path / str(ahead), fleet, training=training)
        await run.play()
        rows = run.rows()
        assert [row["step"] for row in rows] == list(range(7))
        assert run.measured() == [0, 2, 4, 6]
        for step in run.measured():
            assert run.versions(step) == {rows[step]["weight_version"]} == {step}
        assert all(row["heldout_dropped"] == {} for row in rows if row["heldout"])
        judged = [row["judges"]["requests"] for row in rows[1:]]
        assert judged == [8, 13, 8, 13, 8, 13], "those of an evaluation, early or late, are counted"
        first = fleet.began.index("eval2")
        assert {f"group{n}" for n in range(12)} <= set(fleet.began[:first])


async def test_a_run_that_is_killed_beside_an_evaluation_runs_it_again(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.held = lambda tag: tag == "eval2"
    run = Run(tmp_path, fleet)
    await run.play(until=lambda: "eval2" in fleet.began and fleet.version == 3)
    assert fleet.loaded == 2, "the step is trained, but the engines keep what is measured"
    assert run.measured() == [0]
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    again = Fleet()
    resumed = Run(tmp_path, again, resume=True)
    await resumed.play()
    assert [row["step"] for row in resumed.rows()] == list(range(7))
    assert resumed.measured() == [0, 2, 4, 6]
    assert resumed.versions(2) == {2}


async def test_a_run_that_is_asked_to_end_saves_and_runs_it_again(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.held = lambda tag: tag == "eval2" or tag in ("group8", "group9")  # of step 3
    run = Run(tmp_path, fleet, training={"steps": 6, "checkpoint_every": 0})
    task = asyncio.create_task(run.loop.run())
    async with asyncio.timeout(60):
        while "eval2" not in fleet.began:
            await asyncio.sleep(0.005)
        run.loop._ending.asked.set()
        while run.loop._saved != 2:
            assert not task.done(), task
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    run.folder.metrics.close()
    assert run.measured() == [0]
    resumed = Run(tmp_path, Fleet(), resume=True)
    await resumed.play()
    assert resumed.measured() == [0, 2, 4, 6]


async def test_a_target_ends_the_run_with_a_model_that_was_measured(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.right_from = 2
    run = Run(tmp_path, fleet, eval={"every": 2, "background": True, "target": 0.5})
    await run.play()
    assert run.measured() == [0, 2, 3]
    assert [row["accuracy_heldout"] for row in run.rows()] == [0.0, None, 1.0, 1.0]
    assert run.versions(3) == {3}
    assert (run.folder.path / "checkpoints" / "step-0003").exists()
