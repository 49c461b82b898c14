"""A vLLM worker inside an actor that trains: one process, one model in two forms."""

import asyncio
import gc
import hashlib
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.plain_scoring import token_logprobs
from turnwise.config import Config, SamplingConfig
from turnwise.engine import Completion, Request, generate
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.errors import EngineError, InputError, WeightUpdateError
from turnwise.serving.colocated.host import WorkerHost, on_actors
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights import WORKER_EXTENSION
from turnwise.weights.in_process import InProcessSender
from turnwise.weights.manifest import Manifest

PROMPT = list(range(5, 45))
SHORT = SamplingConfig(max_tokens=16, ignore_eos=True)
SCORED = SamplingConfig(max_tokens=1, prompt_logprobs=True)


@ray.remote(num_cpus=0)
class Trainer(WorkerHost):
    """A model in training on random sequences, in a process group with `world` members."""

    def __init__(self, path: str, rank: int = 0, world: int = 1, meeting: str = "") -> None:
        torch.set_num_threads(2)
        store = dist.FileStore(meeting, world) if meeting else dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(rank)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sender = InProcessSender()
        self.version = 0

    def pid(self) -> int:
        return os.getpid()

    def train(self) -> float:
        """One step; returns the norm of its gradient."""
        ids_BT = torch.from_numpy(np.random.randint(5, 400, (2, 32)))
        weights_B1 = torch.rand(2, 1) + random.random()
        logprobs_BTV = self.model(ids_BT).logits[:, :-1].log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        (-(weights_B1 * logprobs_BT).mean()).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return norm

    def publish(self) -> Manifest:
        return self.sender.publish(self.version, self.model.named_parameters())

    def logprobs(self, ids: list[int], start: int) -> list[float]:
        ids_1T = torch.tensor([ids])
        mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
        mask_1T[:, start:] = True
        with torch.no_grad():
            values: list[float] = token_logprobs(
                self.model, ids_1T, mask_1T, SamplingConfig()
            ).tolist()
        return values

    def fingerprint(self) -> tuple[int, str]:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return self.version, digest.hexdigest()

    def settings(self) -> dict[str, Any]:
        """What vLLM changes in a process of its own."""
        return {
            "threads": torch.get_num_threads(),
            "set_num_threads": torch.set_num_threads.__name__,
            "dtype": torch.get_default_dtype(),
            "precision": torch.get_float32_matmul_precision(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "world": dist.get_world_size(),
            "random": [random.getstate(), str(np.random.get_state()), str(torch.get_rng_state())],
        }

    def busy(self, folder: Path) -> None:
        """Make the folder, and compute until it is gone."""
        folder.mkdir()
        while folder.exists():
            time.sleep(0.01)


def keep_busy(actor: Any, folder: Path) -> None:
    """Return when an actor is busy, which it stays until this folder is gone."""
    actor.busy.remote(folder)
    while not folder.exists():
        time.sleep(0.01)


@contextmanager
def training(actor: Any, folder: Path) -> Iterator[None]:
    """Keep an actor busy during the block."""
    keep_busy(actor, folder)
    try:
        yield
    finally:
        folder.rmdir()


def memory(pid: int, kind: str) -> float:
    """MiB of a process: `VmRSS`, or the part of it that is shared or its own alone."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


@pytest.fixture(scope="module", autouse=True)
def quiet_vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        yield


@pytest.fixture(scope="module")
def trainer(ray_started: None, model_path: str) -> Iterator[Any]:
    actor = Trainer.remote(model_path)
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def build_engine(make_config: Callable[..., Config]) -> Callable[..., VllmEngine]:
    def build(actors: dict[str, Any], **engine: Any) -> VllmEngine:
        config = make_config(engine=engine)
        return VllmEngine(
            config.model,
            on_actors(config.engine, actors),
            worker_extension=WORKER_EXTENSION,
            name=f"engine in {', '.join(actors)}",
        )

    return build


@pytest.fixture(scope="module")
async def engine(trainer: Any, build_engine: Callable[..., VllmEngine]) -> AsyncIterator[Any]:
    engine = build_engine({"trainer-0": trainer})
    yield engine
    await engine.shutdown()


async def assert_same_model(engine: Any, trainer: Any, version: int) -> Completion:
    completion: Completion = await generate(
        engine, Request(PROMPT, SHORT, f"same-{version}-{time.time()}")
    )
    expected = await trainer.logprobs.remote([*PROMPT, *completion.token_ids], len(PROMPT))
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert completion.weight_versions == [version] * 16
    return completion


async def test_the_worker_leaves_its_process_as_it_was(
    trainer: Any, build_engine: Callable[..., VllmEngine]
) -> None:
    before = await trainer.settings.remote()
    assert before["threads"] == 2
    engine = build_engine({"trainer-0": trainer})
    await assert_same_model(engine, trainer, 0)
    assert await trainer.settings.remote() == before
    await engine.shutdown()
    assert await trainer.settings.remote() == before


async def test_weights_move_within_the_process_and_memory_stays_flat(
    engine: VllmEngine, trainer: Any
) -> None:
    pid = await trainer.pid.remote()
    resident: list[float] = []
    shared: list[float] = []
    for version in range(1, 12):
        assert await trainer.train.remote() > 0
        await engine.update_weights(await trainer.publish.remote())
        await assert_same_model(engine, trainer, version)
        resident.append(memory(pid, "RssAnon"))  # what is mapped from files comes and goes
        shared.append(memory(pid, "RssShmem"))
    assert resident[-1] < 1.02 * resident[0]
    assert shared[-1] <= shared[0] + 0.1


async def test_training_goes_as_it_would_without_vllm(
    engine: VllmEngine, trainer: Any, model_path: str
) -> None:
    await trainer.train.remote()
    await generate(engine, Request(PROMPT, SHORT, "between"))
    await trainer.train.remote()
    alone = Trainer.remote(model_path)
    version, _ = await trainer.fingerprint.remote()
    for _ in range(version):
        await alone.train.remote()
    assert await trainer.fingerprint.remote() == await alone.fingerprint.remote()
    assert await trainer.settings.remote() == await alone.settings.remote()
    ray.kill(alone)


async def test_the_engine_keeps_its_weights_until_it_is_given_others(
    engine: VllmEngine, trainer: Any
) -> None:
    await engine.update_weights(await trainer.publish.remote())
    version, _ = await trainer.fingerprint.remote()
    before = await generate(engine, Request(PROMPT, SCORED, "before"))
    stale = await trainer.publish.remote()
    await trainer.train.remote()
    with pytest.raises(WeightUpdateError, match=rf"has changed since version {version} was"):
        await engine.update_weights(stale)
    await trainer.publish.remote()
    with pytest.raises(WeightUpdateError, match=rf"version {version} is not published"):
        await engine.update_weights(stale)
    after = await generate(engine, Request(PROMPT, SCORED, "after"))
    assert after.prompt_logprobs == before.prompt_logprobs
    assert after.weight_versions == [version]


async def test_a_request_waits_while_its_actor_trains(
    engine: VllmEngine, trainer: Any, tmp_path: Path
) -> None:
    with training(trainer, tmp_path / "training"):
        waiting = asyncio.create_task(generate(engine, Request(PROMPT, SHORT, "waiting")))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done
    assert len((await waiting).token_ids) == 16


async def test_a_paused_engine_is_well_while_its_actor_trains(
    engine: VllmEngine, trainer: Any, tmp_path: Path
) -> None:
    await engine.pause("keep")
    with training(trainer, tmp_path / "training"):
        async with asyncio.timeout(60):
            await engine.check_health()
    await engine.resume()


async def test_an_actor_hosts_one_engine_after_the_other(
    trainer: Any, build_engine: Callable[..., VllmEngine]
) -> None:
    pid = await trainer.pid.remote()
    first = build_engine({"trainer-0": trainer}, kv_cache_gib=0.2)
    second = build_engine({"trainer-0": trainer}, kv_cache_gib=0.2)
    with pytest.raises(EngineError, match="engine in trainer-0 died during request late"):
        await generate(first, Request(PROMPT, SHORT, "late"))
    await first.shutdown()
    version, _ = await trainer.fingerprint.remote()
    await second.update_weights(await trainer.publish.remote())
    await assert_same_model(second, trainer, version)
    hosting = memory(pid, "VmRSS")
    await second.shutdown()
    end = time.monotonic() + 60
    while memory(pid, "VmRSS") > hosting - 150:  # until the KV cache, for one, is gone
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert await trainer.train.remote() > 0


async def test_actors_of_an_engine_outlive_all_other_handles(
    ray_started: None, model_path: str, build_engine: Callable[..., VllmEngine]
) -> None:
    """The engine holds them, while it is used and while it sleeps."""
    engine = build_engine({"trainer-9": Trainer.options(name="kept").remote(model_path)})
    try:
        for index in range(3):
            gc.collect()
            await asyncio.sleep(1.0)  # in which Ray would end an actor without handles
            completion = await generate(engine, Request(PROMPT, SHORT, f"kept-{index}"))
            assert len(completion.token_ids) == 16
            await engine.sleep()
            await engine.wake_up()
    finally:
        await engine.shutdown()
        ray.kill(ray.get_actor("kept"))


async def test_the_death_of_an_actor_is_told_at_once(
    ray_started: None, model_path: str, build_engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    doomed = Trainer.remote(model_path)
    engine = build_engine({"trainer-7": doomed})
    pid = await doomed.pid.remote()
    keep_busy(doomed, tmp_path / "training")  # so that the request does not end before
    running = asyncio.create_task(generate(engine, Request(PROMPT, SHORT, "doomed")))
    await asyncio.wait([running], timeout=0.3)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="engine in trainer-7 died during request doomed"):
        async with asyncio.timeout(60):  # and not the two minutes of engine.request_timeout
            await running
    with pytest.raises(EngineError, match="engine in trainer-7 is dead"):
        await engine.check_health()
    await engine.shutdown()


async def test_two_actors_hold_an_engine_and_their_own_process_group(
    ray_started: None, model_path: str, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    actors = {
        f"trainer-{rank}": Trainer.remote(model_path, rank, 2, str(tmp_path / "meeting"))
        for rank in range(2)
    }
    first, second = actors.values()
    config = make_config(engine={"kv_cache_gib": 0.1})
    config = config.model_copy(update={"engine": on_actors(config.engine, actors)})
    engine = await WorkerHandle.start(config)
    await asyncio.gather(first.train.remote(), second.train.remote())
    manifest, _ = await asyncio.gather(first.publish.remote(), second.publish.remote())
    await engine.update_weights(manifest)
    await assert_same_model(engine, first, 1)
    await engine.shutdown()
    await asyncio.gather(first.train.remote(), second.train.remote())
    assert await first.fingerprint.remote() == await second.fingerprint.remote()
    ray.kill(second)
    with pytest.raises(InputError, match=r"cannot serve .*: the process of trainer-1 died"):
        await WorkerHandle.start(config)
    ray.kill(first)
