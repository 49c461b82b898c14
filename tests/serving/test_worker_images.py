"""Images in the batches of NeMo-RL's worker: the prompt holds their ids already."""

from typing import Any

import pytest
import torch

from tests.serving.test_worker import Held, held
from tests.vision import asked, encoded, picture, vision_config
from turnwise.chat.images import read_parts
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.errors import InputError
from turnwise.trajectory.images import placed


async def test_a_rows_images_are_at_their_ids(vision_path: str) -> None:
    config = vision_config(vision_path)
    template = load_template(config, load_tokenizer(config))
    images = [picture(), picture(28, 28, 1)]
    prompt = template.render([read_parts(asked("What?", *images), "a message")])
    ids = [[*prompt], [5, 6, 7] + [0] * (len(prompt) - 3)]
    batch: dict[str, Any] = {
        "input_ids": torch.tensor(ids),
        "input_lengths": torch.tensor([len(prompt), 3]),
        "vllm_images": [[images[0], encoded(images[1])], []],
    }
    engine = Held(2)
    for ready in engine.ready:
        ready.set()
    worker = held(config, engine)
    rows = dict([row async for row in worker.generate_async(batch)])
    assert sorted(rows) == [0, 1]
    asked_by_length = {len(request.prompt): request for request in engine.asked}
    assert [*asked_by_length[len(prompt)].images] == [*placed(prompt)]
    assert asked_by_length[3].images == ()
    engine = Held(2)
    for ready in engine.ready:
        ready.set()
    batch["vllm_images"] = [[images[0], images[0]], []]
    with pytest.raises(InputError, match="row 0: the ids"):
        async for _ in held(config, engine).generate_async(batch):
            pass
