"""Weights from the trainer's memory into the real engine."""

import copy
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.weights.trainer import PROMPT, Model, completed_across, version_runs
from turnwise.config import SamplingConfig
from turnwise.engine import Completion, Request, generate
from turnwise.engine.protocol import InFlight
from turnwise.errors import InputError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights.manifest import Manifest
from turnwise.weights.shm import ShmSender
from turnwise.weights.sync import check_canary

LONG = 440
"""Tokens of a request that an update meets."""


class Trainer(Model):
    """With the transport that publishes its weights."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sender = ShmSender(self.tensors)

    def write(self, version: int) -> Manifest:
        return self.sender.publish(version, self.tensors)


@pytest.fixture(scope="module")
def trainer(model_path: str) -> Iterator[Trainer]:
    trainer = Trainer(model_path)
    yield trainer
    trainer.sender.close()


@pytest.fixture(autouse=True)
async def original_weights_after(engine: WorkerHandle, trainer: Trainer) -> AsyncIterator[None]:
    yield
    trainer.perturb(0.0)
    await engine.update_weights(trainer.write(0))


async def test_an_update_lands_whole_and_its_tokens_carry_its_version(
    engine: WorkerHandle, trainer: Trainer
) -> None:
    """By `weights.transport`."""
    assert trainer.model.config.tie_word_embeddings  # the case that a plain reload gets wrong
    for version in (1, 2, 3):
        trainer.perturb(0.05)
        await engine.update_weights(trainer.write(version))
        completion = await generate(
            engine, Request(PROMPT, SamplingConfig(max_tokens=16), f"v{version}")
        )
        expected = trainer.logprobs([*PROMPT, *completion.token_ids], len(PROMPT))
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert set(completion.weight_versions) == {version}


async def test_the_canary_sings_only_when_engine_and_trainer_agree(
    engine: WorkerHandle, trainer: Trainer
) -> None:
    trainer.perturb(0.05)
    await engine.update_weights(trainer.write(4))
    expected = trainer.logprobs(trainer.canary, 1)
    assert (await check_canary(engine, trainer.canary, expected, 1e-3, 4))[1] < 1e-4
    with torch.no_grad():  # one head of one layer that the engine never got
        trainer.model.model.layers[1].self_attn.o_proj.weight[:, :8] += 0.5
    expected = trainer.logprobs(trainer.canary, 1)
    with pytest.raises(WeightUpdateError, match=r"version 4 .* differ .* by up to \d") as error:
        await check_canary(engine, trainer.canary, expected, 1e-3, 4)
    now = (
        await generate(
            engine,
            Request(trainer.canary, SamplingConfig(max_tokens=1, prompt_logprobs=True), "now"),
        )
    ).prompt_logprobs
    assert now is not None
    largest = max(abs(a - b) for a, b in zip(now[1:], expected, strict=True) if a is not None)
    assert f"by up to {largest:.3g}" in str(error.value)


async def in_flight(
    engine: WorkerHandle, trainer: Trainer, mode: InFlight
) -> tuple[Completion, int]:
    """A request of `LONG` tokens that an update to the trainer's weights meets; their version."""
    weights = trainer.state()
    for attempt in range(20):
        manifest = trainer.write(5 + attempt)  # what is cached goes by versions
        completion = await completed_across(
            engine, LONG, f"in-flight-{attempt}", partial(engine.update_weights, manifest, mode)
        )
        if len(version_runs(completion)) > 1:
            return completion, manifest.version
        trainer.perturb(0.0)  # it ended before the update came: once more from the old weights
        await engine.update_weights(trainer.write(0))
        trainer.take(weights)
    pytest.fail("no update met a request")


async def test_requests_in_flight_go_on_under_the_new_weights(
    engine: WorkerHandle, trainer: Trainer
) -> None:
    trainer.perturb(0.05)
    completion, version = await in_flight(engine, trainer, "keep")
    first, second = version_runs(completion)
    assert (first.version, first.start, second.version, second.end) == (0, 0, version, LONG)
    assert first.end == second.start > 0
    expected = trainer.logprobs([*PROMPT, *completion.token_ids], len(PROMPT))
    assert completion.logprobs[second.start :] == pytest.approx(expected[second.start :], abs=1e-3)
    assert max(map(abs, map(lambda a, b: a - b, completion.logprobs, expected))) > 1e-2


async def test_requests_may_continue_on_the_old_weights_cache(
    engine: WorkerHandle, trainer: Trainer
) -> None:
    await generate(
        engine, Request(PROMPT, SamplingConfig(max_tokens=1), "leaves its prefix in the cache")
    )
    trainer.perturb(0.0)
    old = copy.deepcopy(trainer.model)
    trainer.perturb(0.05)
    completion, version = await in_flight(engine, trainer, "keep_cache")
    first, second = version_runs(completion)
    assert (first.version, first.start, second.version, second.end) == (0, 0, version, LONG)

    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    known = len(PROMPT) + first.end - 1  # the last sampled token is the new weights' first input
    with torch.no_grad():
        cache = old(ids[:, :known], use_cache=True).past_key_values
        logits = trainer.model(ids[:, known:-1], past_key_values=cache).logits
    chosen = logits.log_softmax(-1).gather(-1, ids[:, known + 1 :, None]).flatten().tolist()
    assert completion.logprobs[second.start :] == pytest.approx(chosen, abs=1e-3)

    for cached in (0, 32):  # a later request is given nothing of the old weights'
        later = await generate(
            engine, Request(PROMPT, SamplingConfig(max_tokens=16), f"later-{cached}")
        )
        assert later.cached_tokens == cached
        expected = trainer.logprobs([*PROMPT, *later.token_ids], len(PROMPT))
        assert later.logprobs == pytest.approx(expected, abs=1e-4)


async def test_the_next_version_can_be_written_while_one_is_read(
    engine: WorkerHandle, trainer: Trainer
) -> None:
    trainer.perturb(0.05)
    manifest = trainer.write(6)
    expected = trainer.logprobs(trainer.canary, 1)
    trainer.perturb(0.05)
    following = trainer.write(7)
    assert following.path != manifest.path
    await engine.update_weights(manifest)
    assert (await check_canary(engine, trainer.canary, expected, 1e-3, 6))[1] < 1e-4


@pytest.mark.parametrize("damage", ["twice", "beyond", "gone", "other", "short"])
async def test_old_weights_serve_after_a_manifest_that_does_not_fit(
    engine: WorkerHandle, trainer: Trainer, damage: str
) -> None:
    trainer.perturb(0.05)
    manifest = trainer.write(8)
    first, *others, last = manifest.tensors
    if damage == "twice":
        manifest = replace(manifest, tensors=(first, *others, last, first))
    elif damage == "beyond":
        last = replace(last, offset=manifest.nbytes)
        manifest = replace(manifest, tensors=(first, *others, last))
    elif damage == "gone":
        manifest = replace(manifest, path="/proc/self/fd/999")
    elif damage == "other":  # as in a container that numbers its processes itself
        another = ShmSender([("weight", torch.zeros(manifest.nbytes // 4))])
        address = another.publish(8, [("weight", torch.zeros(manifest.nbytes // 4))]).path
        place, identity = address.partition("#")[0], manifest.path.partition("#")[2]
        manifest = replace(manifest, path=f"{place}#{identity}")
    else:
        manifest = replace(manifest, nbytes=2 * manifest.nbytes)
    words = {
        "twice": "listed twice",
        "beyond": "beyond",
        "gone": "cannot",
        "other": "is another file here; trainer and engine must share",
        "short": "bytes, not",
    }
    with pytest.raises(WeightUpdateError, match=words[damage]):
        await engine.update_weights(manifest)
    completion = await generate(
        engine, Request(PROMPT, SamplingConfig(max_tokens=4), f"after-{damage}")
    )
    assert completion.weight_versions == [0] * len(completion.token_ids)


def test_the_buffers_have_no_name_that_could_stay_behind(trainer: Trainer) -> None:
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("turnwise")]


def test_too_little_shared_memory_says_how_much_is_needed() -> None:
    huge = torch.empty(2**50, device="meta", dtype=torch.float32)
    with pytest.raises(InputError, match=r"/dev/shm has \d+ MiB free, .* 4294967296 MiB each"):
        ShmSender([("weight", huge)])


def test_a_tensor_that_changes_its_shape_or_name_is_refused() -> None:
    sender = ShmSender([("a", torch.zeros(4))])
    with pytest.raises(WeightUpdateError, match="the shape of a changed"):
        sender.publish(1, [("a", torch.zeros(5))])
    with pytest.raises(WeightUpdateError, match="tensors changed: got b instead of a"):
        sender.publish(1, [("b", torch.zeros(4))])
    sender.close()
