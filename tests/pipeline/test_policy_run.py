"""The policy's own class in the run that a pipeline's file describes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.pipeline.page import PagePolicy
from tests.simulated import SimulatedEngine
from tests.test_cli import metrics_of, turnwise
from turnwise.compat.chatlearn import VLLMModule
from turnwise.compat.chatlearn.pipeline_file import PipelineFile
from turnwise.compat.chatlearn.policy_run import PolicyRun
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner

HERE = "tests.pipeline.test_policy_run"
PROMPTS = ["Seven plus eight", "What is a group?", "Two times two"]
ROWS = [Problem(f"rows.jsonl:{n}", {"prompt": text}) for n, text in enumerate(PROMPTS, 1)]


class Broken(VLLMModule):
    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        raise ValueError("no such answer")


class Dropping(VLLMModule):
    def forward_step(self, data: Any, iteration: int = 0) -> Any:
        return super().forward_step(data[:1])


class Saving(VLLMModule):
    def setup(self) -> None:
        self.load_checkpoint("somewhere")


class Numbers(VLLMModule):
    def build_dataset(self, train_prompts: Any, is_eval: bool = False) -> Any:
        return [len(prompt) for prompt in train_prompts]


@pytest.fixture
def file(tmp_path: Path, model_path: str) -> Path:
    """ChatLearn's file, and one of its policy with flat keys."""
    (tmp_path / "policy.yaml").write_text(
        f"load: {model_path}\nn: 2\nseq_length: 96\nmax_new_tokens: 12\nmax_paddings: 512"
    )
    tree = {
        "models": {"policy": {"model_config_file": "policy.yaml"}},
        "runtime": {"data_path": "rows.jsonl", "output_dir": str(tmp_path / "runs")},
    }
    (tmp_path / "rlhf.yaml").write_text(json.dumps(tree))  # JSON is YAML too
    return tmp_path / "rlhf.yaml"


Begin = Callable[..., Any]


@pytest.fixture
async def begin(file: Path, tokenizer: Any) -> AsyncIterator[Begin]:
    """Joins a class to a run on a simulated engine."""

    stack = AsyncExitStack()

    async def begin(kind: type[VLLMModule], module: str = HERE, *overrides: str) -> Any:
        run = PolicyRun(file, overrides, f"{module}:{kind.__name__}")
        runner = Runner(run.pipeline.config, tokenizer)
        engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=8)
        runtime: Any = SimpleNamespace(
            policy=object(), runner=runner, generator=engine, grouping=None
        )
        joined = run.join(runtime, (ROWS, ROWS[:1]))
        train, heldout = await stack.enter_async_context(joined)
        return run, runtime, train, heldout

    async with stack:
        yield begin


async def test_the_policys_class_makes_the_runs_groups_in_batches(begin: Begin) -> None:
    """One call of its forward_step for groups that begin together, with its rewards; evaluation by
    its eval_forward."""
    run, runtime, train, heldout = await begin(PagePolicy, "tests.pipeline.page")
    config, policy = run.pipeline.config, run._policy
    assert [problem.row["prompt"] for problem in train] == PROMPTS
    run_group = runtime.grouping(config.sampling)
    groups = await asyncio.gather(*(run_group(problem, "group") for problem in train))
    assert policy.batches == [3]
    for group, problem in zip(groups, train, strict=True):
        assert group.problem_id == problem.id
        assert [t.problem_id for t in group.trajectories] == [problem.id] * 2
        for trajectory in group.trajectories:
            assert trajectory.prompt_token_ids(0) == problem.row["input_ids"]
            assert (
                trajectory.reward
                == sum(map(sum, (t.completion_token_ids for t in trajectory.turns))) % 2
            )
    evaluate = runtime.grouping(config.eval.sampling)
    (group,) = await asyncio.gather(*(evaluate(problem, "eval") for problem in heldout))
    assert (group.problem_id, policy.batches) == ("policy-eval:1", [3, 1])


async def test_a_batch_is_at_most_a_step(begin: Begin) -> None:
    """Where groups of several steps are in flight."""
    few = "rollout.prompts_per_step=2"
    run, runtime, train, _ = await begin(PagePolicy, "tests.pipeline.page", few)
    run_group = runtime.grouping(run.pipeline.config.sampling)
    groups = await asyncio.gather(*(run_group(problem, "group") for problem in train))
    assert [group.problem_id for group in groups] == [problem.id for problem in train]
    assert run._policy.batches == [2, 1]


async def test_a_group_that_is_no_longer_needed_holds_up_no_other(begin: Begin) -> None:
    run, runtime, train, _ = await begin(PagePolicy, "tests.pipeline.page")
    run_group = runtime.grouping(run.pipeline.config.sampling)
    first, second = (asyncio.create_task(run_group(problem, "g")) for problem in train[:2])
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).problem_id == train[1].id
    assert run._policy.batches == [1]


async def test_sampling_stops_when_nobody_waits_for_it(begin: Begin) -> None:
    run, runtime, train, _ = await begin(PagePolicy, "tests.pipeline.page")
    calls = run.pipeline._calls
    await runtime.generator.pause()
    run_group = runtime.grouping(run.pipeline.config.sampling)
    waiting = [asyncio.create_task(run_group(problem, "g")) for problem in train]
    async with asyncio.timeout(60):
        while not calls:
            await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        while calls:
            await asyncio.sleep(0.01)
    await runtime.generator.resume()


@pytest.mark.parametrize(
    "change",
    [
        *("rollout.processes=2", "deterministic=true", "eval.background=true"),
        "data.eval_sets={easy: easy.jsonl}",
    ],
)
def test_what_a_class_of_the_policys_cannot_do_is_refused(file: Path, change: str) -> None:
    with pytest.raises(InputError, match=f"leave out {change.partition('=')[0]}"):
        PolicyRun(file, [change], "tests.pipeline.page:PagePolicy")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Broken, "models.policy.module: forward_step failed: ValueError: no such answer"),
        (Dropping, "forward_step returned groups of 1 of 3 prompts: it must answer all of a batch"),
        (Saving, "`turnwise pipeline` trains, saves and resumes by itself .*: leave out load"),
        (Numbers, "build_dataset made 16, which is neither a problem nor a mapping with token ids"),
    ],
)
async def test_a_class_that_the_run_cannot_use_gives_one_sentence(
    begin: Begin, kind: type[VLLMModule], message: str
) -> None:
    async def attempt() -> None:
        run, runtime, train, _ = await begin(kind)
        run_group = runtime.grouping(run.pipeline.config.sampling)
        await asyncio.gather(*(run_group(problem, "group") for problem in train))

    with pytest.raises(InputError, match=message):
        await attempt()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.pipeline.page:print_rank_0", "is no subclass of VLLMModule"),
        ("no.such:Class", "models.policy.module"),
    ],
)
def test_a_path_that_is_no_class_of_a_policy_is_named(file: Path, path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PolicyRun(file, [], path)


def test_only_the_policy_may_have_a_class_in_the_file(file: Path) -> None:
    change = "models.policy.module=tests.pipeline.page:PagePolicy"
    assert PipelineFile(file, [change]).module == "tests.pipeline.page:PagePolicy"
    with pytest.raises(InputError, match=r"models\.reference\.module: only the policy may have"):
        PipelineFile(file, ["models.reference={module: a:B}"])


@pytest.mark.slow  # two starts of the command, with engines
def test_the_command_trains_with_the_policys_class_and_resumes(file: Path, build: Path) -> None:
    """ChatLearn's three files: the pipeline's, the policy's, and the module with the page's
    bodies."""
    rows = [{"prompt": f"What is {n} plus {n}?"} for n in range(8)]
    (file.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = [
        "models.policy.module=tests.pipeline.page:PagePolicy",
        f"runtime.data_path={file.parent}/rows.jsonl",
        f"runtime.eval_data_path={file.parent}/rows.jsonl",
        *("runtime.eval_episode_interval=1", "runtime.sample_per_episode=8"),
        *("engine.kv_cache_gib=0.0625", "training.learning_rate=1e-3"),
    ]
    for episodes in (1, 2):
        done = turnwise("pipeline", file, *changes, f"runtime.num_episode={episodes}")
        assert done.returncode == 0, done.stderr
        assert "max_paddings: no effect; vLLM packs batches without padding" in done.stderr
        assert "the model of 96 tokens" in done.stdout
    run = file.parent / "runs" / "run"
    steps = [row for row in metrics_of(run) if row["step"]]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["trajectories"] == 8
        assert row["logprob_diff_max"] < 1e-3
        assert row["accuracy_heldout"] is not None
