"""Images of clients: the ids of the model's own processor, seen by engine and trainer alike."""

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tinker.bench import Client, logprobs_of, loss_of, opened
from tests.vision import encoded, picture, vision_config
from turnwise.chat.images import read_image
from turnwise.chat.vision import ModelImages
from turnwise.config import Config
from turnwise.engine.protocol import Request
from turnwise.tinker.service import TinkerService
from turnwise.tinker.wire import message_classes
from turnwise.training.batching import Columns
from turnwise.training.model import score_columns
from turnwise.training.sample import Sample
from turnwise.trajectory import Prompt, audit, read_jsonl
from turnwise.viewer.run_files import ViewedRun

FILE = encoded(picture())
LENGTH = 6
"""Number of ids of this image, 2 x 3 squares."""
BEFORE, AFTER = [5, 6, 7], [8, 9, 10, 11]


def config_of(path: str, **sections: Any) -> Config:
    return vision_config(
        path,
        model={"path": path, "max_length": 64, "lora": {"rank": 8}},
        weights={"lora": "adapter"},
        training={"threads": 1},
        serving={"served_model_name": "model"},
        **sections,
    )


@pytest.fixture
async def served(vision_path: str, tmp_path: Path) -> AsyncIterator[tuple[Client, TinkerService]]:
    async with opened(config_of(vision_path), tmp_path) as found:
        yield found


def datum(file: bytes = FILE, expected: int = LENGTH, length: int = LENGTH) -> dict[str, Any]:
    """Return a datum whose image has no weight and targets of 0, as the cookbook makes them."""
    return {
        "tokens": [*BEFORE, (file, expected), *AFTER[:-1]],
        "target_tokens": [*BEFORE[1:], *[0] * length, *AFTER],
        "weights": [*[1.0] * 2, *[0.0] * length, *[1.0] * 4],
    }


async def sampled(client: Client, seq: int, *chunks: dict[str, Any], **more: Any) -> Any:
    if not client.session:
        client.session = (await client.tree("create_session", {}))["session_id"]
    wanted = {"sampling_session_seq_id": 0, "base_model": "model", "session_id": client.session}
    sampler = (await client.tree("create_sampling_session", wanted))["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": chunks}}
    params = {"sampling_params": {"max_tokens": 4, "seed": 1}}
    return await client.result(await client.tree("asample", body | params | more))


def text(*ids: int) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": ids}


def image(file: bytes = FILE, expected: int | None = LENGTH) -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "image", "data": data, "format": "png", "expected_tokens": expected}


async def test_a_pass_scores_what_the_model_sees(
    served: tuple[Client, TinkerService],
) -> None:
    """Compare the SDK's `ImageChunk` with the same image in a sample of the trainer."""
    client, _ = served
    await client.open()
    other = encoded(picture(seed=1))
    reply = await client.trained(1, [datum(), datum(other), datum(expected=0)], "cross_entropy")
    first, second, third = logprobs_of(reply)
    rank = client.rank
    ids = ModelImages(rank._config.model).ids_of(read_image(FILE, "an image"))
    whole = Prompt.joined(BEFORE, ids, AFTER)
    sample = Sample.to_score(whole, [0, *[1] * (len(whole) - 1)])
    columns = Columns.of([sample], rank.layouts.allowed[0], rank.device)
    policy = rank._models.policy
    with torch.no_grad():  # a new adapter changes nothing
        expected, _ = score_columns(
            policy.model, columns, rank._config.sampling, images=policy.images
        )
    weighted = np.asarray(datum()["weights"]) != 0
    np.testing.assert_allclose(first[weighted], expected.numpy()[weighted], atol=1e-5)
    np.testing.assert_allclose(first, third, atol=1e-6)
    assert np.abs(first - second)[LENGTH + 2 :].min() > 1e-5
    total = sum(float(each[weighted].sum()) for each in (first, second, third))
    assert loss_of(reply) == pytest.approx(-total, rel=1e-5)
    assert (await client.step(2, learning_rate=1e-2))["metrics"]["grad_norm"] > 0


async def test_an_engine_gets_the_image_at_its_positions(
    served: tuple[Client, TinkerService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served
    asked = list[Request]()
    stream = service._generator.stream

    def noted(request: Request) -> Any:
        asked.append(request)
        return stream(request)

    monkeypatch.setattr(service._generator, "stream", noted)
    assert isinstance(await sampled(client, 0, text(*BEFORE), image(), text(*AFTER)), bytes)
    (request,) = asked
    (place,) = request.prompt.images
    assert (place.start, place.length, place.image.read()) == (len(BEFORE), LENGTH, FILE)
    ids = request.prompt.tolist()
    assert [*ids[: place.start], *ids[place.end :]] == BEFORE + AFTER
    assert len({*ids[place.start : place.end]}) == 1


async def test_trajectories_of_a_run_have_their_images(
    served: tuple[Client, TinkerService], tmp_path: Path
) -> None:
    client, _ = served
    await client.open()
    other, data = encoded(picture(seed=1)), list[dict[str, Any]]()
    for seq, file in enumerate((FILE, other)):  # prompts of the same ids
        read = message_classes()["SampleResponse"]()
        read.ParseFromString(await sampled(client, seq, text(*BEFORE), image(file), text(*AFTER)))
        (one,) = read.sequences
        ids = np.frombuffer(one.tokens, np.int32).tolist()
        unknown = [0] * (len(BEFORE) + LENGTH + len(AFTER) - 1)
        data.append(
            {
                "tokens": [*BEFORE, (file, LENGTH), *AFTER, *ids[:-1]],
                "target_tokens": unknown + ids,  # as the cookbook makes them
                "logprobs": [*unknown, *np.frombuffer(one.logprobs, np.float32)],
                "advantages": unknown + [1.0] * len(ids),
            }
        )
    await client.trained(1, data, "importance_sampling")
    await client.step(2, learning_rate=1e-3)
    await client.tree(f"sessions/{client.session}/finish", {})
    folder = tmp_path / "tinker" / client.model
    (row,) = ViewedRun(folder, "client").rows()["rows"]
    assert (row["exact_percent"], row["trajectories"]) == (100.0, 2)
    made = list(read_jsonl(folder / "trajectories" / "step-0001.jsonl"))
    assert [each.turns[0].images[0].image.read() for each in made] == [FILE, other]
    assert [audit(each).first_violation for each in made] == [None, None]


@pytest.mark.parametrize(
    ("file", "expected", "said"),
    [
        (FILE, 7, "expected_tokens of an image is 7, and the model makes 6 tokens of it"),
        (FILE[:60], 6, "an image is a broken png file"),
        (b"no image", 6, "an image is no image that can be read"),
    ],
)
async def test_an_image_that_is_wrong_fails_its_request_alone(
    served: tuple[Client, TinkerService], file: bytes, expected: int, said: str
) -> None:
    client, _ = served
    await client.open()
    failed = await client.trained(1, [datum(), datum(file, expected)], "cross_entropy")
    assert (failed["category"], "datum 1: " in failed["error"]) == ("user", True)
    assert said in failed["error"]
    failed = await sampled(client, 0, text(*BEFORE), image(file, expected))
    assert (failed["category"], said in failed["error"]) == ("user", True)
    assert logprobs_of(await client.trained(2, [datum()], "cross_entropy"))


async def test_what_no_server_reads_has_a_sentence(served: tuple[Client, TinkerService]) -> None:
    client, _ = served
    pointer = {"type": "image_asset_pointer", "location": "a/b", "format": "png"}
    failed = await sampled(client, 0, text(*BEFORE), pointer)
    assert (
        failed["error"] == "prompt: this server reads tokens and images, not 'image_asset_pointer'"
    )
    failed = await sampled(client, 1, *[image()] * 17)
    assert failed["error"] == "prompt: it has 17 images; engine.images_per_prompt is 16"
    failed = await sampled(client, 2, image() | {"data": "@"})
    assert failed["error"] == "prompt: an image is no data: URL in base64"


async def test_a_model_of_text_refuses_images(
    make_config: Callable[..., Config], model_path: str, tmp_path: Path
) -> None:
    config = make_config(
        model={"path": model_path, "max_length": 64, "lora": {"rank": 8}},
        weights={"lora": "adapter"},
        training={"threads": 1},
    )
    async with opened(config, tmp_path) as (client, _):
        await client.open()
        failed = await client.trained(1, [datum()], "cross_entropy")
        assert failed["category"] == "user"
        assert "datum 0: model.path: " in failed["error"]
        assert "takes text alone" in failed["error"]
        assert "takes text alone" in (await sampled(client, 0, image()))["error"]


async def test_a_server_without_room_for_images_refuses_them(
    vision_path: str, tmp_path: Path
) -> None:
    config = config_of(vision_path, engine={"images_per_prompt": 0})
    async with opened(config, tmp_path) as (client, _):
        await client.open()
        failed = await client.trained(1, [datum()], "cross_entropy")
        assert failed["error"] == "datum 0: it has 1 images; engine.images_per_prompt is 0"
