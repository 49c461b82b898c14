"""The engine reads a prompt's images at the positions that we give, and the trainer agrees."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.vision import asked, picture, vision_config
from tests.weights.links import state_dict_info
from turnwise.chat.images import read_parts
from turnwise.chat.prompts import next_prompt
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config
from turnwise.engine.protocol import Completion, Generator, Request, generate
from turnwise.engine.vllm_images import ImageInputs
from turnwise.errors import InputError, TrajectoryError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.batching import Columns
from turnwise.training.rank import TrainerRank
from turnwise.training.sample import Sample
from turnwise.training.vision import vision_parameters
from turnwise.trajectory import ChatTemplate, Message, PlacedImage, Prompt, Trajectory, audit
from turnwise.trajectory.images import images_in
from turnwise.weights.sync import check_canary


@pytest.fixture(scope="module")
def config(vision_path: str) -> Config:
    return vision_config(vision_path, engine={"kv_cache_gib": 0.0625, "images_per_prompt": 3})


@pytest.fixture(scope="module")
async def seeing(ray_started: None, config: Config) -> AsyncIterator[WorkerHandle]:
    engine = await WorkerHandle.start(config)
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
def seeing_template(config: Config) -> ChatTemplate:
    return load_template(config.model, config.sampling, config.engine, load_tokenizer(config.model))


def read(*parts: object) -> Message:
    return read_parts(asked(*parts), "a message")


async def ask(engine: Generator, prompt: Prompt, config: Config, name: str) -> Completion:
    request = Request(prompt, config.sampling, name)
    return await generate(engine, request)


async def test_two_turns_with_images_are_exact_from_engine_to_trainer(
    seeing: WorkerHandle, seeing_template: ChatTemplate, config: Config
) -> None:
    trajectory, template = Trajectory("p"), seeing_template
    first = read("Look: ", picture(), " what is it?")
    prompt = template.render([first])
    one = await ask(seeing, prompt, config, "images-0")
    made = one.token_ids, one.logprobs, one.weight_versions, one.finish_reason
    trajectory.add_turn(prompt, *made)
    more = [read(picture(84, 56, 1), picture(28, 28, 2), " and these?")]
    # A sampled marker: it is a token, and no image.
    sampled = [*one.token_ids, template.images.marker]
    for ending in (one.token_ids, sampled):
        ids, why = await next_prompt(
            template,
            prompt_token_ids=prompt,
            completion_token_ids=ending,
            new_messages=more,
            conversation=[first, {"role": "assistant", "content": ""}, *more],
            tools=None,
        )
        assert why is None
        two = await ask(seeing, ids, config, f"images-{len(ending)}")
        if ending is sampled:
            trajectory = Trajectory("marker")
            trajectory.add_turn(prompt, ending, [*one.logprobs, -1.0], [0] * len(ending), "length")
        made = two.token_ids, two.logprobs, two.weight_versions, two.finish_reason
        trajectory.add_turn(ids, *made)
        again = Trajectory.from_json(trajectory.to_json(whole=True))
        report = audit(again)
        assert (report.violations, report.percent, report.bridged) == (0, 100.0, 1)
        assert two.cached_tokens > 0  # the first image and its text
        (branch,) = again.samples()
        mask = branch.response_mask
        sample = Sample.of(branch.ids, mask, branch.logprobs, [0] * len(mask), 1.0, 0)
        with torch.no_grad():
            columns = Columns.of([sample], "padded", torch.device("cpu"))
            found, _ = TrainerRank(config)._models.score("policy", columns)
        last = len(two.token_ids)
        apart = np.abs(found.numpy() - sample.logprobs_T[sample.response_mask_T])
        assert apart[-last:].max() < 1e-4
        assert apart[: len(one.token_ids)].max() < 1e-4


async def test_caches_tell_images_of_the_same_size_apart(
    seeing: WorkerHandle, seeing_template: ChatTemplate, config: Config
) -> None:
    greedy = config.model_copy(
        update={"sampling": config.sampling.model_copy(update={"temperature": 0.0})}
    )
    found = []
    for number, seed in enumerate((3, 4, 3)):
        prompt = seeing_template.render([read("x" * 200, picture(seed=seed), "?" * 100)])
        found.append(await ask(seeing, prompt, greedy, f"cache-{number}"))
    assert found[0].logprobs[0] == pytest.approx(found[2].logprobs[0], abs=1e-4)
    assert abs(found[0].logprobs[0] - found[1].logprobs[0]) > 1e-3
    assert found[2].cached_tokens > found[1].cached_tokens


async def test_a_pause_keeps_a_request_with_a_cached_image(
    seeing: WorkerHandle, seeing_template: ChatTemplate, config: Config
) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
    sampling = config.sampling.model_copy(update=greedy)
    prompt = seeing_template.render([read(picture(seed=8), "?" * 100)])
    whole, again = (Request(prompt, sampling, name) for name in ("whole", "again"))
    expected = await generate(seeing, whole)
    tokens = list[int]()
    async for chunk in seeing.stream(again):
        if not tokens:
            assert chunk.cached_tokens >= prompt.images[0].end, "the image is in the cache"
            await seeing.pause("keep")
            await seeing.resume()
        tokens += chunk.token_ids
    assert tokens == expected.token_ids


async def test_an_update_of_tower_and_text_reaches_engine_and_caches(
    seeing: WorkerHandle, config: Config
) -> None:
    rank = TrainerRank(config)
    published = rank.publish()
    canary = published.prompt
    assert len(canary.images) == 1
    assert (await check_canary(seeing, canary, published.logprobs, 1e-3, 0))[1] < 1e-4
    await seeing._call("prepare_refit_info", state_dict_info(rank._tensors()))
    tower = vision_parameters(rank._models.policy)
    before = [parameter.detach().clone() for parameter in tower]
    for version in (1, 2):  # the second brings the first weights back
        with torch.no_grad():
            for parameter, first in zip(tower, before, strict=True):
                parameter.copy_(first)
                if version == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        rank.version = version
        published = rank.publish()
        with pytest.raises(WeightUpdateError, match="weights are not the trainer's"):
            await check_canary(seeing, canary, published.logprobs, 1e-3, version - 1)
        await seeing.update_weights(published)
        assert (await check_canary(seeing, canary, published.logprobs, 1e-3, version))[1] < 1e-4


async def test_too_many_images_and_wrong_ids_are_refused(
    seeing: WorkerHandle, seeing_template: ChatTemplate, config: Config
) -> None:
    prompt = seeing_template.render([read(*(picture(28, 28, seed) for seed in range(4)))])
    with pytest.raises(TrajectoryError, match="images_per_prompt is 3"):
        await ask(seeing, prompt, config, "many")
    (one,) = seeing_template.render([read(picture())]).images
    wrong = Prompt([1, 2, 3, 4], [PlacedImage(one.image, 1, 2)])
    with pytest.raises(InputError, match="other tokens"):
        await ask(seeing, wrong, config, "wrong")


async def test_a_model_of_text_takes_no_image(
    engine: WorkerHandle, seeing_template: ChatTemplate, config: Config
) -> None:
    prompt = seeing_template.render([read(picture())])
    short = Prompt([5, 6], [each._replace(start=0, length=1) for each in prompt.images])
    with pytest.raises(InputError, match="this engine takes none"):
        await ask(engine, short, config, "text")


async def test_requests_at_the_same_time_process_an_image_once(
    seeing_template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that fails, or is given up, is processed again."""
    from turnwise.internals import vllm

    prompt = seeing_template.render([read(picture())])
    (one,) = prompt.images
    asked: list[str] = []

    async def process(llm: object, picture: object, name: str) -> dict[str, object]:
        asked.append(name)
        await asyncio.sleep(0.01)
        if len(asked) == 1:
            raise InputError("not today")
        item = SimpleNamespace(get_data=lambda: {"pixel_values": np.zeros(4, np.uint8)})
        ids = prompt.tolist()[one.start : one.end]
        return {"prompt_token_ids": ids, "mm_kwargs": {"image": [item]}}

    monkeypatch.setattr(vllm, "process_image", process)
    model = SimpleNamespace(supports_multimodal_inputs=True, is_mm_prefix_lm=False)
    inputs = ImageInputs(SimpleNamespace(model_config=model), 1)  # type: ignore[arg-type]
    first = [asyncio.create_task(inputs.prepare(prompt)) for _ in range(4)]
    while len(asked) < 2:  # one has failed
        await asyncio.sleep(0.001)
    first[1].cancel()
    failed, given_up, *made = await asyncio.gather(*first, return_exceptions=True)
    assert isinstance(failed, InputError)
    assert isinstance(given_up, asyncio.CancelledError)
    assert len(asked) == 3
    assert [list(each) for each in made] == [[one.image.hash]] * 2  # type: ignore[arg-type]
    monkeypatch.setattr("turnwise.engine.vllm_images._KEPT_BYTES", 11)  # two of them
    others = [one._replace(image=replace(one.image, hash=f"{n:032x}")) for n in range(3)]
    for other in (*others, others[2], others[1], others[0]):
        await inputs.prepare(Prompt(prompt.ids, [other]))
    assert asked[3:] == [other.image.hash for other in (*others, others[0])]
    model.is_mm_prefix_lm = True  # as Gemma's, which vLLM does not compute on a CPU
    with pytest.raises(InputError, match="whose tokens see each other in this model"):
        await inputs.prepare(prompt)


def test_an_image_has_another_cache_name_after_new_weights() -> None:
    """Updates may keep vLLM's caches, which know an image by its name: it has to be a new one."""
    from turnwise.internals import vllm

    (image,) = images_in([read(picture())])
    piece: dict[str, object] = {
        "mm_placeholders": {"image": [vllm.PlaceholderRange(offset=0, length=2)]},
        "mm_kwargs": {"image": [None]},
    }
    prompt, found = [1, 9, 9], set()
    for salt in (None, "weights 1", "weights 2"):
        given = vllm.tokens_input(prompt, cache_salt=salt)
        made = ImageInputs(SimpleNamespace(), 1).put_in(  # type: ignore[arg-type]
            given,
            [PlacedImage(image, 1, 2)],
            {image.hash: piece},  # type: ignore[dict-item]
        )
        assert made["mm_placeholders"]["image"][0].offset == 1
        (name,) = made["mm_hashes"]["image"]
        found.add(name)
    assert len(found) == 3
