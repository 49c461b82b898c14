"""What is saved before an error ends a run: the last step whose weights are whole."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_loop_and_evaluations import Fleet, Run
from turnwise.config import SamplingConfig
from turnwise.core.admission import Priority
from turnwise.errors import EngineError, InputError, StepError, TrainerError, TurnwiseError
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.producer import RunGroup
from turnwise.run.run_dir import find_resume

NEVER = {"steps": 6, "checkpoint_every": 0, "checkpoint_minutes": 0}


class Failing(Fleet):
    """A fleet of which something fails once the trainer has made a version."""

    def __init__(self, what: str, version: int = 3) -> None:
        super().__init__()
        self.what, self.last = what, version

    @property
    def over(self) -> bool:
        return self.version >= self.last

    def group_runner(
        self, sampling: SamplingConfig, priority: Priority = Priority.TRAINING
    ) -> RunGroup:
        sampled = super().group_runner(sampling, priority)

        async def run_group(problem: Problem, tag: str) -> Group:
            group = await sampled(problem, tag)
            if self.over and self.what == ("evaluation" if tag.startswith("eval") else "judge"):
                group.drop(group.trajectories[:], "judge_error", "the judge is away")
            if self.over and self.what == "row" and tag.startswith("group"):
                raise InputError("rows:9 cannot be read")
            return group

        return run_group

    async def update_weights(self, sync: Any) -> list[Any]:
        if self.over and self.what == "engines":
            raise EngineError("all engines are dead")
        return await super().update_weights(sync)


def ending_in(error: type[TurnwiseError]) -> Callable[[Run], Awaitable[None]]:
    async def play(run: Run) -> None:
        with pytest.raises(error):
            await run.loop.run()
        run.folder.metrics.close()

    return play


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("judge", StepError),
        ("row", InputError),
        ("engines", EngineError),
        ("evaluation", StepError),
    ],
)
async def test_an_error_ends_a_run_after_its_last_whole_step_is_saved(
    tmp_path: Path, what: str, error: type[TurnwiseError], ahead: int
) -> None:
    keys: dict[str, Any] = {
        "training": {**NEVER, "max_staleness": ahead},
        "eval": {"every": 3, "background": False},
    }
    await ending_in(error)(Run(tmp_path, Failing(what), **keys))
    saved = find_resume(tmp_path / "run").step
    assert saved == 3 if ahead == 0 else 3 <= saved < 6, "what was sampled before is trained first"
    resumed = Run(tmp_path, fleet := Fleet(), resume=True, **keys)
    assert [row["step"] for row in resumed.rows()] == list(range(saved + 1))
    await resumed.play()
    assert [row["step"] for row in resumed.rows()] == list(range(7))
    assert resumed.measured() == [0, 3, 6]
    assert fleet.version == 6
    trained = [row["trajectories"] for row in resumed.rows()[1:]]
    assert trained == [8] * 6, "groups that failed were sampled again"


async def test_half_a_step_is_never_saved(tmp_path: Path) -> None:
    class HalfWay(Fleet):
        async def train(self, samples: Any) -> dict[str, Any]:
            trained = await super().train(samples)
            if self.version == 4:
                raise TrainerError("policy rank 0 has no memory left")
            return trained

    await ending_in(TrainerError)(Run(tmp_path, HalfWay(), training=NEVER))
    with pytest.raises(InputError, match="no "):
        find_resume(tmp_path / "run")


async def test_a_failure_to_save_does_not_hide_the_error(tmp_path: Path) -> None:
    class FullDisk(Failing):
        async def save(self, folder: Path) -> None:
            raise TurnwiseError("the disk is full")

    await ending_in(StepError)(Run(tmp_path, FullDisk("judge"), training=NEVER))
