"""Images in requests of each API before a real engine, whose turns the trainer agrees with."""

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
import torch

from tests.serving.openai.test_image_requests import block, coded, shown, text
from tests.vision import vision_config
from turnwise.config import Config, SamplingConfig
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.batching import Columns
from turnwise.training.rank import TrainerRank
from turnwise.training.sample import Sample
from turnwise.trajectory import Trajectory, audit

pytestmark = pytest.mark.slow
SAMPLING = SamplingConfig(max_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def config(vision_path: str) -> Config:
    return vision_config(
        vision_path,
        serving={"port": 0},
        engine={"kv_cache_gib": 0.0625, "images_per_prompt": 3},
        sampling=SAMPLING.model_dump() | {"n": 1},
    )


@pytest.fixture(scope="module")
async def server(ray_started: None, config: Config) -> AsyncIterator[OpenAIServer]:
    engine = await WorkerHandle.start(config)
    server = OpenAIServer(config, engine)
    await server.start()
    yield server
    await server.stop()
    await engine.shutdown()


async def post(server: OpenAIServer, name: str, path: str, **body: object) -> dict[str, object]:
    base = server.session_url(name)
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(f"{base}/{path}", json={"model": "any", **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


async def converse(server: OpenAIServer, name: str, path: str) -> None:
    """Ask about one image, then about two others."""
    if path == "responses":
        image = "data:image/png;base64,"
        content = [
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "image_url": image + coded(0)},
        ]
        first = await post(server, name, path, input=[{"role": "user", "content": content}])
        more = [{"type": "input_image", "image_url": image + coded(seed)} for seed in (1, 2)]
        items = [{"role": "user", "content": more}]
        await post(server, name, path, input=items, previous_response_id=first["id"])
        return
    part, extra = (block, {"max_tokens": 12}) if path == "messages" else (shown, {})
    messages: list[object] = [{"role": "user", "content": [text("What?"), part(0)]}]
    answer = await post(server, name, path, messages=messages, **extra)
    if path == "messages":
        messages.append({"role": "assistant", "content": answer["content"]})
    else:
        messages.append(answer["choices"][0]["message"])  # type: ignore[index]
    messages.append({"role": "user", "content": [part(1), part(2)]})
    await post(server, name, path, messages=messages, **extra)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_turns_with_images_over_http_are_the_ones_trained(
    server: OpenAIServer, config: Config, path: str
) -> None:
    trajectory = Trajectory("p")
    session = server.sessions.open_private(trajectory, sampling=SAMPLING)
    await converse(server, session.id, path)
    server.sessions.close(session.id)
    session.finish()
    assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
    assert [len(turn.images) for turn in trajectory.turns] == [1, 2]
    report = audit(trajectory)
    assert (report.first_violation, report.percent, report.bridged) == (None, 100.0, 1)
    (branch,) = trajectory.samples()
    mask = branch.response_mask
    sample = Sample.of(branch.ids, mask, branch.logprobs, [0] * len(mask), 1.0, 0)
    with torch.no_grad():
        columns = Columns.of([sample], "padded", torch.device("cpu"))
        found, _ = TrainerRank(config)._models.score("policy", columns)
    apart = np.abs(found.numpy() - sample.logprobs_T[sample.response_mask_T])
    assert apart.max() < 1e-4
