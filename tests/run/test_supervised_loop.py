"""The loop of supervised training, with the real trainer in this process."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.training.test_supervised import solutions
from turnwise.config import Config
from turnwise.config.supervised import supervised_config
from turnwise.core.aio import run_in_thread
from turnwise.errors import InputError, StepError, TrainerError
from turnwise.observe.alarms import alarms_of_run
from turnwise.rollouts.data import load_training
from turnwise.rollouts.problems import Problem, Problems
from turnwise.run import commands, supervised
from turnwise.run.display import SILENT
from turnwise.run.run_dir import RunDir, find_resume
from turnwise.run.supervised import SupervisedLoop
from turnwise.run.token_values import read_columns
from turnwise.training.rank import TrainerRank
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import read_jsonl
from turnwise.viewer.run_files import ViewedRun

MUTE = {"messages": [{"role": "user", "content": "2 + 2?"}]}
TIMES = ("_seconds", "_per_s", "_gib")


class LocalRank:
    """A rank in this process, with the face of its actor's handle, and a thread of its own."""

    name = "policy rank 0"

    def __init__(self, config: Config, folder: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.rank = self._thread.submit(TrainerRank, config, folder).result()

    async def call(self, method: str, *arguments: Any, **_: object) -> Any:
        if method == "ping":
            return None
        name, *own = arguments
        work = partial(getattr(self.rank, name), *own)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def local_group(config: Config, folder: Path) -> TrainerGroup:
    rank: Any = LocalRank(config, folder)
    group = TrainerGroup(config, [rank])
    group.layouts = rank.rank.layouts
    return group


@pytest.fixture
def config(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    return supervised_config(
        make_config(
            output_dir=str(tmp_path),
            data={"path": "rows"},
            rollout={"prompts_per_step": 4},
            eval={"every": 2},
            training={"steps": 4, "learning_rate": 1e-4, "threads": 1, "checkpoint_every": 1},
            samples_every=2,
        )
    )


async def play(
    config: Config,
    problems: Sequence[Problem],
    heldout: Sequence[Problem] = (),
    resume: bool = False,
    end_after: int | None = None,
) -> Path:
    """Run the loop; it is asked to end once a step is finished."""
    start = find_resume(Path(config.output_dir, config.name)) if resume else None
    folder = RunDir(config, start)
    group = local_group(config, folder.path)
    loop = SupervisedLoop(config, group, problems, heldout, folder, SILENT, start)
    running = asyncio.ensure_future(loop.run())
    while end_after is not None and loop._finished < end_after:
        await asyncio.sleep(0.01)
    if end_after is None:
        await running
    else:
        loop._ending.asked.set()
        await run_in_thread(lambda: loop._ending.wait(60))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return folder.path


def timeless(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in rows]


async def test_a_run_writes_the_viewers_files_and_measures_the_loss(config: Config) -> None:
    rows = solutions(20)
    run = await play(config, Problems("rows", rows[:10]), Problems("held", rows[10:]))
    metrics = timeless(run)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in metrics if "loss_heldout" in row] == [0, 2, 4]
    assert metrics[-1]["loss_heldout"] < metrics[0]["loss_heldout"]
    assert metrics[-1]["heldout"] == {"loss": metrics[-1]["loss_heldout"]}
    assert [row["epoch"] for row in metrics[1:]] == [0.4, 0.8, 1.2, 1.6]
    assert all(row["exact_percent"] == 100.0 and row["trajectories"] == 4 for row in metrics[1:])
    assert not {"reward_mean", "ratio", "clip_fraction", "staleness"} & set(metrics[1])
    assert alarms_of_run(run) == []
    files = ViewedRun(run, "run")
    assert list(files.files()) == ["step-0001", "step-0002", "step-0004"]
    shown = list(read_jsonl(run / "trajectories/step-0002.jsonl"))
    assert len(shown) == 4
    assert files.audit("step-0002", 0)["violations"] == 0
    values = read_columns(run / "training/step-0002.safetensors", 0)
    assert len(values["trainer_logprob"]) == shown[0].sampled_tokens
    assert set(values["advantage"].tolist()) == {1.0}
    assert find_resume(run).step == 4


async def test_a_run_that_ended_early_goes_on_bit_for_bit(config: Config, tmp_path: Path) -> None:
    problems = Problems("rows", solutions(10))
    whole = await play(config, problems)
    other = config.model_copy(update={"name": "other"})
    assert timeless(await play(other, problems, end_after=2))[-1]["step"] < 4
    assert timeless(await play(other, problems, resume=True)) == timeless(whole)


async def test_rows_that_cannot_be_exact_are_left_out_and_named(config: Config) -> None:
    rows = solutions(9)
    rows[4:4] = [MUTE, {"question": "2 + 2?"}]
    run = await play(config, Problems("rows", rows))
    refused = [json.loads(line) for line in (run / "refused.jsonl").read_text().splitlines()]
    assert {(each["row"], each["reason"]) for each in refused} == {
        ("rows:5", "nothing_to_train"),
        ("rows:6", "unknown_form"),
    }
    counts = [sum(row["dropped"].values()) for row in timeless(run)]
    assert sum(counts) == 2
    assert all(row["trajectories"] == 4 for row in timeless(run))


async def test_a_run_ends_if_most_rows_are_refused(config: Config) -> None:
    with pytest.raises(
        StepError, match=r"data.path: \d+ of \d+ .* failed \(\d+ nothing_to_train: r"
    ):
        await play(config, Problems("rows", [MUTE] * 10 + solutions(2)))
    other = config.model_copy(update={"name": "other"})
    with pytest.raises(
        StepError, match=r"data.eval_path: 1 of 1 .* failed \(1 nothing_to_train: h"
    ):
        await play(other, Problems("rows", solutions(4)), Problems("held", [MUTE]))


async def test_a_runs_rewarded_trajectories_train_the_next_run(
    config: Config,
) -> None:
    run = await play(config, Problems("rows", solutions(10)))
    step = run / "trajectories/step-0002.jsonl"
    trees = [json.loads(line) for line in step.read_text().splitlines()]
    for tree, reward in zip(trees, (1.0, 0.0, 1.0, None), strict=True):
        tree["reward"] = reward
    step.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    data = {"path": str(run), "filter": "reward >= 1"}
    again = config.model_copy(
        update={
            "name": "again",
            "data": config.data.model_copy(update=data),
            "training": config.training.model_copy(update={"steps": 1}),
        }
    )
    chosen = load_training(again)
    assert [problem.id for problem in chosen] == ["run:1", "run:2"]
    made = await play(again, chosen)
    assert timeless(made)[-1]["epoch"] == 2.0
    shown = {t.problem_id for t in read_jsonl(made / "trajectories/step-0001.jsonl")}
    assert shown == {trees[0]["problem_id"], trees[2]["problem_id"]}


async def test_the_command_goes_on_after_the_trainer_died(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but Ray: the rows, the run folder, restarts, and a resumed run."""
    deaths = [2]

    class Mortal(LocalRank):
        async def call(self, method: str, *arguments: Any, **more: object) -> Any:
            if arguments[:1] == ("train",) and deaths and self.rank.version == deaths[0]:
                raise TrainerError(f"policy rank 0 died at step {deaths.pop() + 1}")
            return await super().call(method, *arguments, **more)

    @asynccontextmanager
    async def opened(*given: object) -> AsyncIterator[tuple[object, float]]:
        yield given[0], 0.0

    async def started(config: Config, folder: Path, *_: object) -> TrainerGroup:
        return local_group(config, folder)

    monkeypatch.setattr(supervised, "ray_running", opened)
    monkeypatch.setattr(supervised, "watching_ray", opened)
    monkeypatch.setattr(supervised, "start_policy", started)
    monkeypatch.setitem(globals(), "LocalRank", Mortal)
    console, rows = Console(file=io.StringIO(), width=400), solutions(12)
    inputs = commands.ProgramInputs(rows=rows[:8], eval_rows=rows[8:])
    config = config.model_copy(update={"data": type(config.data)()})
    done = await commands.train(config, console, inputs=inputs, supervised=True)
    assert not deaths
    assert [row["step"] for row in done.metrics] == [0, 1, 2, 3, 4]
    assert done.exactness.percent == 100.0
    assert done.checkpoint == done.folder / "checkpoints/step-0004"
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.endswith(f"{done.exactness}\nrun folder {done.folder}\n"), "programs see it too"

    longer = config.training.model_copy(update={"steps": 5})
    more = config.model_copy(update={"training": longer})
    resumed = await commands.train(more, console, done.folder, inputs, supervised=True)
    assert resumed.metrics[:-1] == done.metrics
    with pytest.raises(InputError, match="is a run of another command: turnwise sft --resume"):
        await commands.train(more, console, done.folder, inputs)
    adapted = config.model.model_copy(update={"adapter": "a"})
    with pytest.raises(InputError, match=r"model.adapter: training starts from a whole model"):
        supervised_config(config.model_copy(update={"model": adapted}))


async def test_an_error_ends_a_run_after_its_last_whole_step_is_saved(config: Config) -> None:
    """Also the ranks say which weights they have whole."""
    config = config.changed({"training": {"checkpoint_every": 0}, "eval": {"every": 0}})
    rows = solutions(8)
    start = RunDir(config, None)
    group = local_group(config, start.path)
    loop = SupervisedLoop(config, group, Problems("rows", rows), (), start, SILENT, None)
    own, taken = loop._make_samples, list[int]()

    async def make_samples(batch: Any, metrics: Any) -> Any:
        taken.append(metrics.step)
        if metrics.step == 3:
            raise StepError("too many rows are refused")
        return await own(batch, metrics)

    loop._make_samples = make_samples  # type: ignore[method-assign]
    with pytest.raises(StepError, match="too many rows"):
        await loop.run()
    start.metrics.close()
    assert find_resume(start.path).step == 2
    assert await group.holds(2, 10)
    assert not await group.holds(3, 10)
