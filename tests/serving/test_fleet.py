"""Two real workers: killed, stopped, updated under load, put to sleep a hundred times."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from tests.plain_scoring import token_logprobs
from tests.weights.links import state_dict_info
from tests.weights.trainer import OneRank, version_runs
from turnwise.config import Config, SamplingConfig, WeightsConfig
from turnwise.engine.protocol import Chunk, Request, collect, generate
from turnwise.errors import EngineError, WeightUpdateError
from turnwise.rollouts import Group, Runner
from turnwise.rollouts.data import load_training
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.openai.server import OpenAIServer
from turnwise.trajectory import audit
from turnwise.weights.sync import WeightSync, check_canary

SAMPLING = SamplingConfig(max_tokens=64)


@pytest.fixture(scope="module")
async def fleet(
    ray_started: None, make_config: Callable[..., Config]
) -> AsyncIterator[tuple[Config, AsyncLLMServerManager]]:
    """Two real workers."""
    config = make_config(
        serving={"workers": 2, "health_every": 0.5, "health_timeout": 20.0},
        engine={"metrics": True, "logits_processors": ["tests.forced_tokens:ForcedTokens"]},
        sampling={"n": 8, "max_tokens": 160, "ignore_eos": True},
        data={"path": str(make_config().data.path), "limit": 8},
    )
    async with make_manager(config, 0).running() as manager:
        yield config, manager


async def engine_process(worker: Any) -> psutil.Process:
    """The process that computes for a worker."""
    pid = await worker.actor.__ray_call__.remote(
        lambda self: self._engine._llm.engine_core.resources.engine_manager.processes[0].pid
    )
    return psutil.Process(pid)


def reference_logprobs(model: Any, token_ids: list[int], mask: list[int]) -> list[float]:
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        values = token_logprobs(model, ids, torch.tensor([mask]).bool(), SamplingConfig())
    return list(values.tolist())


async def test_metrics_show_every_engines_own_statistics(
    fleet: tuple[Config, AsyncLLMServerManager],
) -> None:
    """VLLM's counters by worker beside ours; a worker that hangs is named, not waited for."""
    config, manager = fleet
    server = OpenAIServer(config, manager.scheduler, port=0)
    root = (await server.start()).removesuffix("/v1")
    names = [engine.name for engine in manager.engines]

    async def values(
        http: httpx.AsyncClient, metric: str, answering: list[str]
    ) -> dict[str, float]:
        """The metric of each worker, as soon as these workers answer in time."""
        expected = {name: float(name in answering) for name in names}
        async with asyncio.timeout(60):
            while True:
                text = (await http.get("/metrics")).text
                families = {"turnwise_worker_metrics": {}, metric: {}}
                for family in text_string_to_metric_families(text):
                    if (told := families.get(family.name)) is not None:
                        assert not told, "a family stands once, whatever the number of workers"
                        told |= {
                            s.labels["worker"]: s.value
                            for s in family.samples
                            if s.name.removeprefix(family.name) in ("", "_total", "_count")
                        }
                if families["turnwise_worker_metrics"] == expected:
                    return families[metric]

    try:
        async with httpx.AsyncClient(base_url=root, timeout=60) as http:
            before = await values(http, "vllm:generation_tokens", names)
            assert sorted(before) == sorted(names)
            waits = await values(http, "vllm:inter_token_latency_seconds", names)
            for engine, count in zip(manager.engines, (7, 45), strict=True):
                exact = SamplingConfig(max_tokens=count, ignore_eos=True)
                counted = await generate(
                    engine, Request([5, 6, 7], exact, f"counted-{engine.name}")
                )
                assert counted.queued is not None
                assert counted.queued >= 0
            after = await values(http, "vllm:generation_tokens", names)
            assert [after[name] - before[name] for name in names] == [7, 45]
            waited = await values(http, "vllm:inter_token_latency_seconds", names)
            assert [waited[name] - waits[name] for name in names] == [6, 44]  # of every token
            assert sorted(await values(http, "turnwise_worker_up", names)) == sorted(names)
            os.kill(manager.engines[0].pid, signal.SIGSTOP)
            try:
                of_others = await values(http, "vllm:generation_tokens", names[1:])
            finally:
                os.kill(manager.engines[0].pid, signal.SIGCONT)
            assert list(of_others) == names[1:]
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("how", "why"),
    # Whether a request or a health check finds a death first is chance.
    [
        pytest.param(signal.SIGKILL, ("died during request", "is dead"), id="killed"),
        pytest.param(signal.SIGSTOP, ("no answer to",), id="stopped", marks=pytest.mark.slow),
    ],
)
async def test_trajectories_outlive_an_engine_to_the_token(
    fleet: tuple[Config, AsyncLLMServerManager],
    tokenizer: Any,
    model_path: str,
    caplog: pytest.LogCaptureFixture,
    how: signal.Signals,
    why: tuple[str, ...],
) -> None:
    config, manager = fleet
    runner = Runner(config, tokenizer)
    for attempt in range(20):
        known, victim = len(manager.failures), manager.engines[0]
        pid = (await engine_process(victim)).pid
        busy = manager.scheduler.workers[victim.name]
        groups: list[asyncio.Task[Group]] = [
            asyncio.create_task(
                runner.run_group(manager.scheduler, problem, config.sampling, f"{how}{attempt}")
            )
            for problem in load_training(config)
        ]
        while not (any(t.sampled for t in busy.running) or all(g.done() for g in groups)):
            await asyncio.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.05)  # what it had sent before arrives
        if not any(t.sampled for t in busy.running):
            os.kill(pid, signal.SIGCONT)  # those turns were over before it was stopped
            await asyncio.gather(*groups)
            continue
        os.kill(pid, how)
        async with asyncio.timeout(300):
            finished = await asyncio.gather(*groups)
        async with asyncio.timeout(300):
            while len(manager.failures) == known:
                await asyncio.sleep(0.05)
        if manager.failures[-1].turns["continued"]:
            break  # else the last tokens of those turns arrived late
    trajectories = [t for group in finished for t in group.trajectories]
    assert [group.dropped for group in finished] == [{}] * 8
    assert len(trajectories) == 64
    assert all(t.status != "running" for t in trajectories)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        for branch in trajectory.branches():
            expected = reference_logprobs(model, branch.token_ids, branch.response_mask)
            sampled = [p for p, m in zip(branch.logprobs, branch.response_mask, strict=True) if m]
            assert sampled == pytest.approx(expected, abs=1e-4)
    loss = manager.failures[-1]
    assert loss.worker == victim.name, loss
    assert any(words in loss.why for words in why), loss
    assert loss.turns["continued"] > 0, loss
    async with asyncio.timeout(60):
        while psutil.pid_exists(victim.pid):
            await asyncio.sleep(0.05)
    assert len(manager.engines) == 2
    completion = await generate(manager.engines[0], Request([5, 6, 7], SAMPLING, "back"))
    assert completion.token_ids


async def test_a_poison_request_is_refused_and_the_others_finish(
    fleet: tuple[Config, AsyncLLMServerManager],
) -> None:
    _, manager = fleet
    known, restarts = len(manager.failures), [one.restarts for one in manager._supervisors]
    poison = SamplingConfig(max_tokens=8, logits_processor_args={"poison": True})
    long = SamplingConfig(max_tokens=200, ignore_eos=True)
    honest = [
        asyncio.create_task(
            generate(manager.scheduler, Request([5 + i, 6, 7], long, f"honest-{i}"))
        )
        for i in range(8)
    ]
    workers = manager.scheduler.workers.values()
    async with asyncio.timeout(500):
        while sum(len(worker.running) for worker in workers) < 8:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"poison crashed [23] workers \(.*not retried"):
            await generate(manager.scheduler, Request([5, 6, 7], poison, "poison"))
        with pytest.raises(EngineError, match=r"again is refused for another \d+ s"):
            await generate(manager.scheduler, Request([5, 6, 7], poison, "again"))
        assert [len(c.token_ids) for c in await asyncio.gather(*honest)] == [200] * 8
        while len(manager.engines) < 2:
            await asyncio.sleep(0.05)
    ended = manager.failures[known:]
    assert 2 <= len(ended) <= 3, ended
    assert manager.given_up == {}
    for slot, most in zip(manager._supervisors, restarts, strict=True):
        assert slot.restarts <= most


@pytest.mark.parametrize(
    "in_flight", ["drain", pytest.param("abort", marks=pytest.mark.slow), "keep"]
)
async def test_every_token_carries_the_version_that_sampled_it(
    fleet: tuple[Config, AsyncLLMServerManager], model_path: str, in_flight: Any
) -> None:
    _, manager = fleet
    manager._weights = WeightsConfig(in_flight=in_flight)
    trainer = OneRank(model_path)
    sync = WeightSync(trainer, timeout=60, patience=60)
    model, versions = trainer.model.model, dict[int, dict[str, torch.Tensor]]()
    first = 100 * ["drain", "abort", "keep"].index(in_flight) + 1
    sampling = SamplingConfig(max_tokens=48, ignore_eos=True)
    completions: list[tuple[list[int], Any]] = []
    reached: set[int] = set()
    done = False

    async def load(index: int) -> None:
        turn = 0
        while not done:
            prompt = [5 + index, *range(6, 40), 5 + turn % 90]
            name = f"{in_flight}-{index}-{turn}"
            stream = manager.scheduler.stream(Request(prompt, sampling, name))
            completions.append((prompt, await collect(noted(stream), name)))
            turn += 1

    async def noted(stream: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in stream:
            reached.update(chunk.weight_versions)
            yield chunk

    tasks = [asyncio.create_task(load(index)) for index in range(16)]
    for version in range(first, first + 8):
        await asyncio.sleep(0.05)
        async with asyncio.timeout(120):
            while version > first and version - 1 not in reached:
                await asyncio.sleep(0.01)
        trainer.train(version)
        versions[version] = {k: v.clone() for k, v in model.state_dict().items()}
        await sync.publish()
        await manager.update_weights(sync)
    done = True
    await asyncio.gather(*tasks)
    seen = {version for _, c in completions for version in c.weight_versions}
    mixed = [c for _, c in completions if len(set(c.weight_versions)) > 1]
    assert len(seen) > 6
    assert bool(mixed) == (in_flight != "drain")
    checked = 0
    for prompt, completion in [
        *completions[::5],
        *((p, c) for p, c in completions if c in mixed[:8]),
    ]:
        for span in version_runs(completion):
            if span.version not in versions:
                continue  # from before this test
            model.load_state_dict(versions[span.version])
            ids = [*prompt, *completion.token_ids]
            mask = [0] * len(prompt) + [1] * len(completion.token_ids)
            expected = reference_logprobs(model, ids, mask)[span.start : span.end]
            assert completion.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-4)
            checked += span.end - span.start
    assert checked > 500
    trainer.sender.close()


async def serve(manager: AsyncLLMServerManager, trainer: OneRank, version: int) -> None:
    """Check that all workers do, with the trainer's weights under this version."""
    expected = trainer.model.logprobs(trainer.model.canary, 1)
    for engine in manager.engines:
        await check_canary(engine, trainer.model.canary, expected, 1e-4, version)
        completion = await generate(
            engine, Request([5, 6, 7], SAMPLING, f"{engine.name}-v{version}")
        )
        assert set(completion.weight_versions) == {version}


@pytest.mark.parametrize("transport", ["ipc", "collective", "disk"])
async def test_all_workers_move_or_none_does(
    fleet: tuple[Config, AsyncLLMServerManager], model_path: str, tmp_path: Path, transport: str
) -> None:
    _, manager = fleet
    trainer = OneRank(model_path, transport, tmp_path)
    sync = WeightSync(trainer, timeout=120, patience=120)
    for version in (1001, 1002):
        trainer.train(version)
        await sync.publish()
        await manager.update_weights(sync)
        await serve(manager, trainer, version)
    second: Any = manager.engines[1]
    await second._call("prepare_refit_info", {"weight": ((2, 2), "float32")})
    before = {k: v.clone() for k, v in trainer.model.model.state_dict().items()}
    trainer.train(1003)
    await sync.publish()
    with pytest.raises(WeightUpdateError, match=f"{second.name}: refused a weight update"):
        await manager.update_weights(sync)
    trainer.model.model.load_state_dict(before)
    await serve(manager, trainer, 1002)
    await second._call("prepare_refit_info", state_dict_info(trainer.model.tensors))
    trainer.sender.close()


async def test_a_worker_that_dies_in_a_broadcast_spares_the_others(
    fleet: tuple[Config, AsyncLLMServerManager], model_path: str
) -> None:
    _, manager = fleet
    trainer = OneRank(model_path, "collective")
    sync = WeightSync(trainer, timeout=40, patience=120)  # an eighth for the dead one
    trainer.train(2001)
    await sync.publish()
    await manager.update_weights(sync)
    known, victim = len(manager.failures), manager.engines[0]
    send = trainer.send

    computing = await engine_process(victim)

    async def die_and_send(devices: Any) -> None:
        if computing.is_running():
            computing.kill()
        await send(devices)

    trainer.send = die_and_send  # type: ignore[method-assign]
    trainer.train(2002)
    await sync.publish()
    await manager.update_weights(sync)
    assert [engine.name for engine in manager.engines] == ["worker-1"]
    await serve(manager, trainer, 2002)
    async with asyncio.timeout(300):
        while len(manager.failures) == known:
            await asyncio.sleep(0.05)
    assert len(manager.engines) == 2
    await serve(manager, trainer, 2002)
    trainer.sender.close()


@pytest.mark.slow
async def test_a_hundred_sleep_cycles_lose_no_actor_and_no_memory(
    fleet: tuple[Config, AsyncLLMServerManager],
) -> None:
    _, manager = fleet
    pids = [engine.pid for engine in manager.engines]  # type: ignore[attr-defined]
    computing = [(await engine_process(engine)).pid for engine in manager.engines]
    sizes: list[int] = []
    for number in range(100):
        turns = [
            generate(manager.scheduler, Request([5 + i, 6, 7, 8], SAMPLING, f"round{number}-{i}"))
            for i in range(8)
        ]
        assert len(await asyncio.gather(*turns)) == 8
        await manager.sleep()
        await manager.wake_up()
        sizes.append(sum(memory(pid) for pid in [os.getpid(), *pids, *computing]))
    assert [engine.pid for engine in manager.engines] == pids  # type: ignore[attr-defined]
    assert max(sizes[-10:]) < 1.05 * max(sizes[20:30]), sizes[::10]


def memory(pid: int) -> int:
    """Bytes that a process and its children hold for themselves."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends processes that are idle
            total += process.memory_full_info().uss
    return total
