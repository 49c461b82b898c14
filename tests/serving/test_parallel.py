"""Two engines of two tensor-parallel shards each: exact, updated everywhere, restarted whole."""

import asyncio
import importlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.rollouts.test_loops import END, call
from tests.serving.test_fleet import reference_logprobs, serve
from tests.weights.trainer import OneRank, Sparse
from turnwise.config import Config, SamplingConfig
from turnwise.engine import Request, generate
from turnwise.engine.vllm_start import engine_arguments
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.data import load_training
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.trajectory import FORCED, ChatTemplate, audit
from turnwise.weights.sync import WeightSync

TRANSPORTS = ["shm", "ipc", "collective", "disk"]
CALLS: list[int] = []
Fleet = tuple[Config, AsyncLLMServerManager]


class Counted:
    """An environment whose tool remembers each of its calls."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = [self.count]

    def count(self, number: int) -> int:
        """Remember a number.

        Args:
            number: The number.
        """
        CALLS.append(number)
        return number

    def reward(self, trajectory: Any) -> float:
        return 1.0


@pytest.fixture(scope="module")
async def fleet(ray_started: None, make_config: Callable[..., Config]) -> AsyncIterator[Fleet]:
    engine = make_config().engine.model_dump() | {
        "tensor_parallel_size": 2,
        "logits_processors_allowed": "tests[.]engine[.]callables:writer",
    }
    config = make_config(
        engine=engine,
        serving={"workers": 2, "health_every": 0.5, "health_timeout": 20.0},
        sampling={"n": 4, "max_tokens": 96, "ignore_eos": True},
        data={"path": str(make_config().data.path), "limit": 8},
    )
    async with make_manager(config, 0).running() as manager:
        yield config, manager


async def shards(worker: Any) -> list[psutil.Process]:
    """The processes that compute for a worker."""
    devices = await worker._call("device_ids")
    return [psutil.Process(int(device.rpartition("-")[2])) for device in devices]


async def test_a_sharded_engine_computes_what_transformers_does(
    fleet: Fleet, model_path: str
) -> None:
    """By `engine.tensor_parallel_size`."""
    _, manager = fleet
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    for worker in manager.engines:
        assert len(await shards(worker)) == 2
        prompts = [[5 + i, *range(6, 40)] for i in range(8)]
        sampling = SamplingConfig(max_tokens=24, ignore_eos=True)
        completions = await asyncio.gather(
            *(generate(worker, Request(p, sampling, f"tp-{p[0]}")) for p in prompts)
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            mask = [0] * len(prompt) + [1] * 24
            expected = reference_logprobs(model, [*prompt, *completion.token_ids], mask)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "transport",
    # The others deliver in one of these two ways.
    [pytest.param(t, marks=[pytest.mark.slow] * (t in ("ipc", "disk"))) for t in TRANSPORTS],
)
async def test_every_transport_brings_every_shard_its_part(
    fleet: Fleet, model_path: str, tmp_path: Path, transport: str
) -> None:
    _, manager = fleet
    trainer = OneRank(model_path, transport, tmp_path)
    sync = WeightSync(trainer, timeout=60, patience=60)
    first = 10 * TRANSPORTS.index(transport)
    for version in (first + 1, first + 2):
        trainer.train(version)
        await sync.publish()
        await manager.update_weights(sync)
        await serve(manager, trainer, version)
    trainer.sender.close()


@pytest.mark.slow  # without a death: weights/test_delta.py
@pytest.mark.parametrize("transport", ["collective", "disk"])
async def test_deltas_reach_every_shard_and_a_restarted_engine(
    fleet: Fleet, model_path: str, tmp_path: Path, transport: str
) -> None:
    _, manager = fleet
    trainer = Sparse(model_path, transport, tmp_path, delta=True)
    sync = WeightSync(trainer, timeout=120, patience=120)
    first = 100 + 10 * TRANSPORTS.index(transport)

    async def update(version: int) -> None:
        trainer.train(version)
        assert bool((await sync.publish()).deltas) == (version > first)
        await manager.update_weights(sync)
        await serve(manager, trainer, version)

    await update(first)
    await update(first + 1)
    known, victim = len(manager.failures), manager.engines[0]
    (await shards(victim))[1].send_signal(signal.SIGKILL)
    async with asyncio.timeout(300):
        while len(manager.failures) == known or len(manager.engines) < 2:
            await asyncio.sleep(0.05)
    await serve(manager, trainer, first + 1)
    await update(first + 2)
    trainer.sender.close()


async def test_a_tool_runs_once_whatever_the_number_of_shards(
    fleet: Fleet, make_config: Callable[..., Config], tokenizer: Any, template: ChatTemplate
) -> None:
    _, manager = fleet
    config = make_config(environment="tests.serving.test_parallel:Counted")
    calls = importlib.import_module("tests.serving.test_parallel").CALLS  # as its name has it
    turns = [call("count", number=1) + call("count", number=2) + END, "Counted." + END]
    sampling = SamplingConfig(
        n=4, max_tokens=200, logits_processor_args={"script": [template.encode(t) for t in turns]}
    )
    problem = Problem("counted:1", {"question": "Go."})
    group = await Runner(config, tokenizer).run_group(
        manager.scheduler, problem, sampling, "counted"
    )
    assert [t.events for t in group.trajectories] == [{"tool_call": 2}] * 4
    assert sorted(calls) == [1] * 4 + [2] * 4


async def test_a_function_in_an_answer_runs_once_for_all_shards(
    fleet: Fleet, tokenizer: Any, tmp_path: Path
) -> None:
    """Its result, which each shard would have another of, is the same for all. As with a
    `FunctionProcessor`."""

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    _, manager = fleet
    file = tmp_path / "calls"
    said = ids("<call>write()</call>")
    script = [*said, *[1] * 60]  # ones, but for the result's tokens
    sampling = SamplingConfig(
        max_tokens=len(script),
        ignore_eos=True,
        logits_processor_args={"script": [script]},
        logits_processors=[
            {"qualname": "tests.engine.callables:writer", "kwargs": {"path": str(file)}}
        ],
    )
    worker = manager.engines[0]
    completion = await generate(worker, Request([5, 6, 7], sampling, "written"))
    (pid,) = file.read_text().split()
    assert int(pid) in {shard.pid for shard in await shards(worker)}
    result = [*ids("<r>"), *ids(pid), *ids("</r>")]
    assert completion.token_ids[: len(said) + len(result)] == [*said, *result]
    forced = [place for place, v in enumerate(completion.weight_versions) if v == FORCED]
    assert forced == [*range(len(said), len(said) + len(result))]


@pytest.mark.slow  # deaths of engines: test_fleet.py, test_deaths.py
async def test_a_killed_shard_ends_its_engine_and_loses_nothing(
    fleet: Fleet, model_path: str, tokenizer: Any, tmp_path: Path
) -> None:
    config, manager = fleet
    trainer = OneRank(model_path, "disk", tmp_path)  # the engine that restarts reads its files
    sync = WeightSync(trainer, timeout=60, patience=60)
    trainer.train(100)
    await sync.publish()
    await manager.update_weights(sync)
    runner, known = Runner(config, tokenizer), len(manager.failures)
    victim = manager.engines[0]
    before = await shards(victim)
    groups: list[asyncio.Task[Group]] = [
        asyncio.create_task(runner.run_group(manager.scheduler, problem, config.sampling, "shard"))
        for problem in load_training(config)
    ]
    busy = manager.scheduler.workers[victim.name]
    begun = busy.tokens
    while busy.tokens < begun + 200:
        await asyncio.sleep(0.01)
    before[1].send_signal(signal.SIGKILL)
    async with asyncio.timeout(300):
        finished = await asyncio.gather(*groups)
    assert [group.dropped for group in finished] == [{}] * 8
    trajectories = [t for group in finished for t in group.trajectories]
    assert len(trajectories) == 32
    assert all(audit(trajectory).first_violation is None for trajectory in trajectories)
    async with asyncio.timeout(300):
        while len(manager.failures) == known:
            await asyncio.sleep(0.05)
    assert manager.failures[-1].worker == victim.name
    assert len(manager.engines) == 2
    assert psutil.wait_procs(before, timeout=60)[1] == []
    assert len(await shards(manager.engines[0])) == 2


async def test_shards_may_be_actors_in_bundles_of_their_own(
    ray_started: None, make_config: Callable[..., Config], model_path: str
) -> None:
    """`bundle_indices` says where each shard of an engine computes."""
    config = make_config(engine={"tensor_parallel_size": 2}, serving={"spread": True})
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    async with make_manager(config, 0).running() as manager:
        (worker,) = manager.engines
        names = [process.cmdline()[0] for process in await shards(worker)]
        assert all(name.startswith("ray::WorkerHost") for name in names), names
        prompt, sampling = list(range(5, 40)), SamplingConfig(max_tokens=8, ignore_eos=True)
        completion = await generate(worker, Request(prompt, sampling, "spread"))
        ids, mask = [*prompt, *completion.token_ids], [0] * 35 + [1] * 8
        assert completion.logprobs == pytest.approx(reference_logprobs(model, ids, mask), abs=1e-4)
        gone = await shards(worker)
    assert psutil.wait_procs(gone, timeout=60)[1] == []


def test_vllm_has_no_pipeline_parallelism_on_a_cpu(make_config: Callable[..., Config]) -> None:
    config = make_config(engine={"pipeline_parallel_size": 2})
    with pytest.raises(InputError, match=r"on a CPU set it to 1 and raise engine\.tensor_parallel"):
        engine_arguments(config.model, config.engine, deterministic=False)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"training": {"colocated": True}, "engine": {"tensor_parallel_size": 2}},
            r"serving.workers 1 \* engine.tensor_parallel_size 2 is not training.ranks 1",
        ),
        (
            {"training": {"colocated": True}, "engine": {"pipeline_parallel_size": 2}},
            "engine.pipeline_parallel_size above 1 requires engines in separate processes",
        ),
        (
            {"engine": {"vllm_args": {"tensor_parallel_size": 2}}},
            "engine.vllm_args.tensor_parallel_size has its own key: set "
            "engine.tensor_parallel_size",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    make_config: Callable[..., Config], sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        make_config(**sections)
