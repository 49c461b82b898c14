"""The policy's ranks as Ray actors, sharded by FSDP2 over gloo."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.test_rank import samples_for, score
from turnwise.config import Config
from turnwise.errors import DeadlineError, InputError, TrainerError
from turnwise.training import Sample, checkpoint, trainer_group
from turnwise.training.trainer_group import TrainerGroup

EXACT = (
    *("loss", "entropy", "kl", "value_loss", "grad_norm", "ratio", "logprob_diff_mean"),
    *("policy_loss", "entropy_coef", "off_policy_masked", "low_entropy_masked"),
)
HARD = {
    "advantage": {"name": "gae", "learning_rate": 0.001},
    "correction": {"name": "token_tis"},
    "kl": {"coef": 0.05, "where": "reward"},
}


TERMS = {
    "entropy": {"coef": 0.1, "adaptive": True, "target": 20.0, "top_quantile": 0.3},
    "kl": {"coef": 0.05, "sync_steps": 2},
    "off_policy_mask_threshold": 1e-3,
}


@pytest.fixture(scope="module")
def batch(build: Path) -> list[Sample]:
    model = AutoModelForCausalLM.from_pretrained(build / "model", dtype=torch.float32).eval()
    return samples_for(model, 11)


@pytest.fixture
def make_policy(
    ray_started: None, make_config: Callable[..., Config], tmp_path: Path
) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(
        algorithm: dict[str, Any] | None = None, start_timeout: float = 300.0, **training: Any
    ) -> AsyncIterator[TrainerGroup]:
        values = {"learning_rate": 1e-3, "threads": 1, "updates_per_step": 2, **training}
        engine = {"start_timeout": start_timeout}
        config = make_config(training=values, algorithm=algorithm or {}, engine=engine)
        policy = await TrainerGroup.start(config, tmp_path)
        try:
            yield policy
        finally:
            policy.kill()

    return make


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="grpo", marks=pytest.mark.slow),
        pytest.param(HARD, id="ppo"),
        pytest.param(TERMS, id="terms"),
    ],
)
async def test_two_ranks_do_what_one_does(
    make_policy: Callable[..., Any], batch: list[Sample], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    hosts = {1: None, 2: "127.0.0.1"}
    metrics: dict[int, list[dict[str, Any]]] = {}
    exported: dict[int, Any] = {}
    scored: dict[int, Any] = {1: [], 2: []}
    for ranks in (1, 2):
        async with make_policy(algorithm, ranks=ranks, micro_batch_tokens=150) as policy:
            assert len(set(policy.pids)) == ranks
            store = await policy._ranks[0].actor.__ray_call__.remote(
                lambda rank: rank._store.host if hasattr(rank, "_store") else None
            )
            assert store == hosts[ranks]
            if algorithm is HARD:
                scored[ranks] = [await policy.forward(n, batch) for n in ("reference", "value")]
            metrics[ranks] = [await policy.train(batch) for _ in range(3)]
            assert policy.version == 6
            folder = tmp_path / f"step-000{ranks}"
            await policy.save(checkpoint.begin(folder))
            checkpoint.commit(folder)
            exported[ranks] = AutoModelForCausalLM.from_pretrained(folder).eval()
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key in EXACT:
            assert two.get(key, 0) == pytest.approx(one.get(key, 0), abs=1e-5, rel=1e-5), key
        assert two["staleness"] == one["staleness"]
    for one, two in zip(scored[1], scored[2], strict=True):
        for sample, ours, theirs in zip(batch, one, two, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-5)
            assert len(ours) == sample.length
    ids = list(range(3, 40))
    assert score(exported[2], ids, 1) == pytest.approx(score(exported[1], ids, 1), abs=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(HARD, id="ppo"), pytest.param(TERMS, id="terms", marks=pytest.mark.slow)],
)
async def test_a_checkpoint_of_two_ranks_is_taken_up_by_two_and_by_one(
    make_policy: Callable[..., Any], batch: list[Sample], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    folder = tmp_path / "step-0001"
    async with make_policy(algorithm, ranks=2) as policy:
        await policy.train(batch)
        await policy.save(checkpoint.begin(folder))
        checkpoint.commit(folder)
        expected = await policy.train(batch)
    known = [key for key in EXACT if key in expected]
    async with make_policy(algorithm, ranks=2) as policy:
        assert await policy.load(folder) == 2
        same = await policy.train(batch)
    for key in known:
        assert same[key] == expected[key], key
    async with make_policy(algorithm, ranks=1) as policy:
        await policy.load(folder)
        alone = await policy.train(batch)
    for key in known:
        assert alone[key] == pytest.approx(expected[key], abs=1e-5), key


async def test_a_killed_rank_is_named_while_idle_and_in_training(
    make_policy: Callable[..., Any], batch: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray may take a while to notice a death, after the other rank's failure.
    monkeypatch.setattr(trainer_group, "_GRACE_SECONDS", 60.0)
    async with make_policy(ranks=2) as policy:
        watching = asyncio.create_task(policy.watch())
        os.kill(policy.pids[1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TrainerError, match="the process of policy rank 1 died"):
            await watching
        assert time.monotonic() - started < 120
    async with make_policy(ranks=2) as policy:
        os.kill(policy.pids[1], signal.SIGSTOP)  # so that the other one does not end before
        training = asyncio.create_task(policy.train(batch))
        await asyncio.sleep(0.05)
        assert not training.done()
        os.kill(policy.pids[0], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(TrainerError, match="the process of policy rank 0 died"):
            await training
        assert time.monotonic() - started < 120


async def test_a_rank_that_does_not_answer_is_named(
    make_policy: Callable[..., Any], batch: list[Sample]
) -> None:
    async with make_policy() as policy:
        os.kill(policy.pids[0], signal.SIGSTOP)
        policy._timeout = 1.0
        with pytest.raises(DeadlineError, match="policy rank 0 did not train within 1 s"):
            await policy.train(batch)


async def test_ranks_that_find_no_room_are_told(make_policy: Callable[..., Any]) -> None:
    with pytest.raises(DeadlineError, match=r"1 unobtainium for each of 2 ranks of the trainer"):
        async with make_policy(start_timeout=2.0, ranks=2, resources={"unobtainium": 1}):
            pass


async def test_a_checkpoint_of_another_model_is_refused(
    make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "step-0001" / "state").mkdir(parents=True)
    async with make_policy() as policy:
        with pytest.raises(InputError, match=r"step-0001 cannot be loaded"):
            await policy.load(tmp_path / "step-0001")
