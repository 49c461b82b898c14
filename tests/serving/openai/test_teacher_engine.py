"""Teachers by the real engine: behind the server of `turnwise serve`, and as engines of a run."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import perturbed
from turnwise.config import Config, TeacherConfig
from turnwise.errors import InputError
from turnwise.run.teachers import TeacherEngines, TeacherServer
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate

CONVERSATION = [
    {"role": "user", "content": "What is 12 plus 30?"},
    {"role": "assistant", "content": "The answer is 42."},
]


@pytest.fixture(scope="module")
async def server(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    await server.start()
    yield server
    await server.stop()


def logprobs_of(path: str, ids: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs_TV[at - 1, ids[at]]) for at in range(1, len(ids))]


async def test_a_server_scores_as_the_model_itself_does(
    server: OpenAIServer,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
    model_path: str,
) -> None:
    teacher = TeacherConfig(url=server.base_url, where="loss")
    made = TeacherServer(make_config(), "algorithm.teacher", teacher, tokenizer)
    await made.start()
    ids = template.render_first(CONVERSATION, None)
    first, *others = await made.score(ids)
    assert first is None
    assert others == pytest.approx(logprobs_of(model_path, ids.tolist()), abs=1e-3)


async def test_a_policy_with_another_tokenizer_is_refused(
    server: OpenAIServer, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    class Other:
        """The tokenizer with each two tokens exchanged."""

        all_special_ids: ClassVar[list[int]] = []

        def get_vocab(self) -> dict[str, int]:
            return dict(tokenizer.get_vocab())

        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode([index ^ 1 for index in ids]))

        def convert_ids_to_tokens(self, index: int) -> str:
            return self.decode([index])

    other: Any = Other()
    teacher = TeacherConfig(url=server.base_url)
    made = TeacherServer(make_config(), "algorithm.teacher", teacher, other)
    with pytest.raises(InputError, match=r"another tokenizer than the policy: token \d+ is"):
        await made.start()


@pytest.mark.slow  # starts an engine
async def test_engines_of_a_teacher_score_as_the_model_itself_does(
    ray_started: None,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
    model_path: str,
    tmp_path: Path,
) -> None:
    path = perturbed(model_path, tmp_path)
    tokenizer.save_pretrained(path)
    taught = make_config().for_teacher(TeacherConfig(model=path, engines=1))
    made = TeacherEngines(taught, "teacher", 0.0)
    await made.start()
    ids = template.render_first(CONVERSATION, None)
    longest = (ids * 512)[:512]  # model.max_length
    try:
        for sequence in (ids, longest):
            first, *others = await made.score(sequence)
            assert first is None
            assert others == pytest.approx(logprobs_of(path, sequence), abs=1e-3)
    finally:
        await made.stop()
