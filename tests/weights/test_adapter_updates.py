"""Updates that bring an adapter: every transport, requests in flight, the bound, and the canary."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.adapters import Tensors, adapter_config, adapter_tensors, merged, write_adapter
from tests.weights.trainer import PROMPT, Model, version_runs
from turnwise.config import Config, SamplingConfig, ServingConfig
from turnwise.engine.adapters import VERSIONS, EngineAdapters
from turnwise.engine.protocol import Chunk, Completion, Generator, Request, Route, collect, generate
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.errors import WeightUpdateError
from turnwise.run.fleet import make_manager
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights.manifest import Manifest
from turnwise.weights.process_group import free_address
from turnwise.weights.sync import WeightSync, check_canary
from turnwise.weights.transport import make_sender

RANK = 4
GREEDY = SamplingConfig(max_tokens=12, temperature=0.0, ignore_eos=True)
SHORT = SamplingConfig(max_tokens=32, ignore_eos=True)
LONG = SamplingConfig(max_tokens=1500, ignore_eos=True)  # none ends before it is paused
"""A request that an update meets."""
Completed = asyncio.Task[Completion]


class AdapterTrainer:
    """A trainer of an adapter, as `WeightSync` sees one; version N is made from seed N."""

    def __init__(self, path: str, transport: str = "shm", folder: Path | str = "") -> None:
        self.model = Model(path)
        self.path, self.version = path, 1
        self.sender = make_sender(transport, self.tensors(1), folder=folder, timeout=240)

    def tensors(self, version: int) -> Sequence[tuple[str, torch.Tensor]]:
        return list(self._tensors(version).items())

    def _tensors(self, version: int) -> Tensors:
        return adapter_tensors(self.path, RANK, seed=version)

    def at(self, version: int) -> Model:
        """Return the model with the adapter of a version added to its weights."""
        config = adapter_config(self.path, RANK)
        self.model.take(merged(self.model.original, self._tensors(version), config))
        return self.model

    async def publish(self) -> Manifest:
        canary = self.model.canary
        expected = self.at(self.version).logprobs(canary, 1)
        manifest = self.sender.publish(self.version, self.tensors(self.version))
        return replace(manifest, prompt=canary, logprobs=expected)

    async def send(self, devices: Sequence[str]) -> None:
        tensors = self.tensors(self.version)
        await asyncio.to_thread(self.sender.send, self.version, tensors, devices)

    async def rendezvous(self) -> tuple[str, int]:
        return free_address()

    async def join(self, ip: str, port: int, engine_workers: int, timeout: float) -> None:
        await asyncio.to_thread(self.sender.join, ip, port, engine_workers, timeout)


class Updates:
    """Brings versions of an adapter to one engine."""

    def __init__(self, engine: WorkerHandle, trainer: AdapterTrainer) -> None:
        self.engine, self.trainer = engine, trainer
        self._sync = WeightSync(trainer, timeout=240, patience=240)

    async def to(self, version: int, in_flight: str = "keep") -> Manifest:
        self.trainer.version = version
        published = await self._sync.publish()
        results = await self._sync.update([self.engine], in_flight)  # type: ignore[arg-type]
        if isinstance(outcome := results[self.engine], Exception):
            raise outcome
        assert outcome.version == version
        return published


@pytest.fixture(scope="module")
def config(
    make_config: Callable[..., Config],
    model_path: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Config:
    opponent = write_adapter(
        tmp_path_factory.mktemp("opponent"),
        adapter_tensors(model_path, RANK, seed=99),
        adapter_config(model_path, RANK),
    )
    return make_config(
        model={"path": model_path, "max_length": 2048, "lora": {"rank": RANK}},
        weights={"lora": "adapter"},
        serving={"adapters": {"opponent": opponent}},
    )


@pytest.fixture(scope="module")
async def engine(ray_started: None, config: Config) -> AsyncIterator[WorkerHandle]:
    engine = await WorkerHandle.start(config, name="adapted")
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def trainer(model_path: str) -> AdapterTrainer:
    return AdapterTrainer(model_path)


@pytest.fixture
def updates(engine: WorkerHandle, trainer: AdapterTrainer) -> Updates:
    return Updates(engine, trainer)


def differences(model: Model, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
    expected = model.logprobs(prompt + ids, len(prompt))
    return max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("disk", "ipc", "collective")),
    ],
)
async def test_an_adapter_arrives_by_every_transport_and_samples(
    engine: WorkerHandle, model_path: str, tmp_path: Path, transport: str
) -> None:
    updates = Updates(engine, AdapterTrainer(model_path, transport, tmp_path))
    for version in (1, 2, 3):
        published = await updates.to(version)
        _, worst = await check_canary(engine, published.prompt, published.logprobs, 1e-4, version)
        assert worst < 1e-4
        sampled = await generate(engine, Request(PROMPT, SHORT, f"{transport}-{version}"))
        greedy = await generate(engine, Request(PROMPT, GREEDY, f"{transport}-{version}-greedy"))
        model = updates.trainer.at(version)
        assert greedy.token_ids == model.greedy(PROMPT, 12)
        assert set(sampled.weight_versions) == {version}
        assert differences(model, PROMPT, sampled.token_ids, sampled.logprobs) < 1e-4
    updates.trainer.sender.close()


@asynccontextmanager
async def frozen(engine: WorkerHandle, generator: Generator, name: str) -> AsyncIterator[Completed]:
    """Begin a request, freeze the engine in the middle of it, and go on at the end of the block."""
    chunks: list[Chunk] = []
    begun = asyncio.Event()

    async def read() -> Completion:
        async def noted() -> AsyncIterator[Chunk]:
            async for chunk in generator.stream(Request(PROMPT, LONG, name)):
                chunks.append(chunk)
                begun.set()
                yield chunk

        return await collect(noted(), name)

    task = asyncio.create_task(read())
    await begun.wait()
    await engine.pause("keep")
    assert not task.done()
    try:
        yield task
    finally:
        await engine.resume()


async def test_an_update_reaches_new_requests_but_not_running_ones(
    engine: WorkerHandle, updates: Updates
) -> None:
    await updates.to(1)
    async with frozen(engine, engine, "kept") as kept:
        await updates.to(2)
    new = await generate(engine, Request(PROMPT, GREEDY, "new"))
    other = await generate(
        engine, Request(PROMPT, GREEDY, "other", route=Route(adapter="opponent"))
    )
    old = await kept
    assert other.token_ids == updates.trainer.at(99).greedy(PROMPT, 12)
    assert set(new.weight_versions) == {2}
    assert new.token_ids == updates.trainer.at(2).greedy(PROMPT, 12)
    assert (old.finish_reason, set(old.weight_versions)) == ("length", {1})
    model = updates.trainer.at(1)
    assert differences(model, PROMPT, old.token_ids, old.logprobs) < 1e-4


@pytest.mark.slow
async def test_an_update_pauses_no_request(engine: WorkerHandle, updates: Updates) -> None:
    await updates.to(1)
    requests = [
        asyncio.create_task(generate(engine, Request(PROMPT, LONG, f"running-{index}")))
        for index in range(8)
    ]
    for version in (2, 3):
        published = await updates.to(version)
        # Scored in a batch with other requests, of other versions.
        await check_canary(engine, published.prompt, published.logprobs, 1e-4, version)
    for completion in await asyncio.gather(*requests):
        assert completion.finish_reason == "length"
        (version,) = set(completion.weight_versions)
        model = updates.trainer.at(version)
        assert differences(model, PROMPT, completion.token_ids, completion.logprobs) < 1e-4


@pytest.mark.slow
async def test_beyond_the_bound_turns_of_the_oldest_version_move_on(
    engine: WorkerHandle, updates: Updates
) -> None:
    scheduler = Scheduler(ServingConfig(), turn_timeout=60.0)
    scheduler.add("worker-0", engine)
    await updates.to(1)
    async with AsyncExitStack() as stack:
        tasks = []
        for version in range(1, VERSIONS + 1):
            if version > 1:
                await engine.resume()
            name = f"bound-{version}"
            tasks.append(await stack.enter_async_context(frozen(engine, scheduler, name)))
            assert not any(task.done() for task in tasks)
            await updates.to(version + 1)
    first, *others = await asyncio.gather(*tasks)
    assert scheduler.events["aborted_by_update"] == 1
    for version, completion in enumerate(others, start=2):
        assert set(completion.weight_versions) == {version}
    runs = [(run.version, run.end - run.start) for run in version_runs(first)]
    assert [version for version, _ in runs] == [1, VERSIONS + 1]
    assert sum(tokens for _, tokens in runs) == LONG.max_tokens
    split = runs[0][1]
    model = updates.trainer.at(1)
    assert differences(model, PROMPT, first.token_ids[:split], first.logprobs[:split]) < 1e-4
    model, prompt = updates.trainer.at(VERSIONS + 1), PROMPT + first.token_ids[:split]
    assert differences(model, prompt, first.token_ids[split:], first.logprobs[split:]) < 1e-4


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
async def test_each_request_uses_one_adapter_and_none_stays_loaded(
    engine: WorkerHandle, updates: Updates, count: int
) -> None:
    sampling = SamplingConfig(max_tokens=48, temperature=0.0, ignore_eos=True)
    completions: list[tuple[list[int], Completion]] = []
    await updates.to(1)

    async def sample(place: int) -> None:
        for number in range(100_000):
            prompt = [*PROMPT, 5 + place, 5 + number % 300]
            name = f"steady-{count}-{place}-{number}"
            completions.append((prompt, await generate(engine, Request(prompt, sampling, name))))

    tasks = [asyncio.create_task(sample(place)) for place in range(2)]
    memory: list[int] = []
    for version in range(2, count + 2):
        await updates.to(version)
        memory.append(psutil.Process(engine.pid).memory_info().rss)
        while len(completions) < version // 2:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await updates.to(count + 2)  # drops those of the requests that were cancelled
    held = await engine.actor.__ray_call__.remote(
        lambda self: [len(self._engine._adapters.older), len(self._engine._adapters._by_name)]
    )
    assert held == [0, 2]  # the policy and the opponent
    assert max(memory[count // 2 :]) < max(memory[: count // 2]) + 64 * 2**20
    by_version = {done.weight_versions[0]: (prompt, done) for prompt, done in completions}
    assert len(by_version) > 1
    for version, (prompt, done) in [*by_version.items()][-20:]:
        assert set(done.weight_versions) == {version}
        model = updates.trainer.at(version)
        assert differences(model, prompt, done.token_ids, done.logprobs) < 1e-4
        assert done.token_ids[:8] == model.greedy(prompt, 8)


@pytest.mark.slow
async def test_requests_go_on_under_the_newest_version_if_asked_to(
    engine: WorkerHandle, updates: Updates
) -> None:
    scheduler = Scheduler(ServingConfig(), turn_timeout=60.0)
    scheduler.add("worker-0", engine)
    await updates.to(1)
    async with frozen(engine, scheduler, "aborted") as task:
        await updates.to(2, in_flight="abort")
    completion = await task
    assert [run.version for run in version_runs(completion)] == [1, 2]


@pytest.mark.slow
async def test_a_version_never_reads_what_another_one_cached(
    engine: WorkerHandle, updates: Updates
) -> None:
    prompt = [9, *PROMPT * 3]
    cached = []
    for version in (1, 1, 2, 2, 1):  # the last one is version 1 again, as after a resumed run
        await updates.to(version)
        completion = await generate(engine, Request(prompt, GREEDY, f"cached-{len(cached)}"))
        again = await generate(engine, Request(prompt, GREEDY, f"again-{len(cached)}"))
        cached.append(completion.cached_tokens)
        assert again.cached_tokens >= 96
    assert cached == [0] * 5


@pytest.mark.slow
async def test_an_adapter_lasts_through_sleep(engine: WorkerHandle, updates: Updates) -> None:
    await updates.to(3)
    await engine.sleep()
    await engine.wake_up()
    completion = await generate(engine, Request(PROMPT, GREEDY, "woken"))
    assert completion.token_ids == updates.trainer.at(3).greedy(PROMPT, 12)
    assert set(completion.weight_versions) == {3}


@pytest.mark.slow
async def test_a_misfit_adapter_is_refused_and_the_old_one_stays(
    engine: WorkerHandle, updates: Updates
) -> None:
    await updates.to(1)
    tensors = [
        (name.replace("self_attn.q_proj", "self_attn.elsewhere"), tensor)
        for name, tensor in updates.trainer.tensors(2)
    ]
    await engine._call("prepare_refit_info", {n: (tuple(t.shape), t.dtype) for n, t in tensors})
    sender = make_sender("shm", tensors)
    with pytest.raises(WeightUpdateError, match=r"applies no adapter to .*elsewhere"):
        await engine.update_weights(sender.publish(2, tensors))
    sender.close()
    completion = await generate(engine, Request(PROMPT, GREEDY, "stayed"))
    assert completion.token_ids == updates.trainer.at(1).greedy(PROMPT, 12)
    assert set(completion.weight_versions) == {1}
    kept = updates.trainer.tensors(1)
    await engine._call("prepare_refit_info", {n: (tuple(t.shape), t.dtype) for n, t in kept})


@pytest.mark.slow
async def test_the_canary_finds_an_adapter_that_is_not_applied(
    config: Config, model_path: str
) -> None:
    engine = VllmEngine(
        config.model,
        config.engine,
        adapters=EngineAdapters.of(config),
        worker_extension="tests.weights.forgetful.Forgetful",
    )
    try:
        trainer = AdapterTrainer(model_path)
        published = await trainer.publish()
        await engine.update_weights(published)
        with pytest.raises(WeightUpdateError, match="its weights are not the trainer's"):
            await check_canary(engine, published.prompt, published.logprobs, 1e-3, 1)
        base = Model(model_path).logprobs(published.prompt, 1)
        assert (await check_canary(engine, published.prompt, base, 1e-3, 1))[1] < 1e-4
        trainer.sender.close()
    finally:
        await engine.shutdown()


@pytest.mark.slow
async def test_a_restarted_engine_gets_base_and_adapter_before_serving(
    ray_started: None, config: Config, model_path: str
) -> None:
    trainer = AdapterTrainer(model_path)
    sync = WeightSync(trainer, timeout=240, patience=240)
    async with make_manager(config, 0.0).running() as manager:
        trainer.version = 1
        await sync.publish()
        await manager.update_weights(sync)
        running = asyncio.create_task(generate(manager.scheduler, Request(PROMPT, LONG, "running")))
        trainer.version = 2
        await sync.publish()
        await manager.update_weights(sync)
        (engine,) = manager.engines
        assert isinstance(engine, WorkerHandle)
        os.kill(engine.pid, signal.SIGKILL)
        new = await generate(manager.scheduler, Request(PROMPT, GREEDY, "new"))
        old = await running
        assert len(manager.failures) == 1
    assert new.token_ids == trainer.at(2).greedy(PROMPT, 12)
    assert set(new.weight_versions) == {2}
    assert len(old.token_ids) == LONG.max_tokens
    for version, start, end in version_runs(old):
        prompt, tokens = PROMPT + old.token_ids[:start], old.token_ids[start:end]
        assert differences(trainer.at(version), prompt, tokens, old.logprobs[start:end]) < 1e-4
    trainer.sender.close()
