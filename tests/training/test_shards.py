"""Models of several ranks: each rank reads its own shards, which are those of the whole model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.loading import in_processes
from tests.models import make_reward_model
from tests.training.test_gather import moe
from turnwise.config import Config, OtherModel
from turnwise.errors import InputError
from turnwise.training.export import export_model
from turnwise.training.loading import distribute, load_model, load_value_model, path_of
from turnwise.training.model import Critic, Scorer

pytestmark = pytest.mark.slow
RANKS = 2
CPU = torch.device("cpu")


def as_rank(number: int, config: Config, folder: Path, value: str | None, reply: Any) -> None:
    """Load a model as one of two ranks; send how many parameters had no weights, and an error."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    try:
        reply.send(load(number, config, folder, value))
    except InputError as error:
        reply.send(str(error))
    dist.destroy_process_group()


def load(number: int, config: Config, folder: Path, value: str | None) -> dict[str, Any]:
    if value is None:
        model = load_model(config.model, config.training)
        unread = sum(p.is_meta for p in model.parameters())
        module: Any = distribute(
            Scorer(model, config.sampling, torch.float32), CPU, path_of(config.model)
        )
        target = folder / "out"
        target.mkdir(exist_ok=True)
        export_model(target, number, config.model, module.model, 20_000)
    else:
        other = OtherModel(path=value)
        model = load_value_model(config.model, config.training, other)
        unread = sum(p.is_meta for p in model.parameters())
        module = distribute(Critic(model, torch.float32), CPU, path_of(config.model, other))
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in named}
    local = sum(p.to_local().numel() for p in module.parameters())
    return {
        "unread": unread,
        "whole": {n: t.detach().numpy() for n, t in whole.items()},
        "local": local,
    }


def run(config: Config, folder: Path, value: str | None = None) -> list[Any]:
    tasks = [(as_rank, number, config, folder, value) for number in range(RANKS)]
    return [sent[-1] for sent in in_processes(tasks)]


@pytest.fixture(params=["tied", "moe"])
def path(request: pytest.FixtureRequest, model_path: str, tokenizer: Any, tmp_path: Path) -> str:
    if request.param == "tied":
        return model_path
    folder = moe(tmp_path / "moe", tie_word_embeddings=False)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_ranks_read_their_shards_and_write_the_model_again(
    path: str, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = make_config(model={"path": path})
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    expected = {f"model.{name}": tensor for name, tensor in named}
    replies = run(config, tmp_path)
    for reply in replies:
        assert reply["unread"] == len(list(model.parameters()))
        assert set(reply["whole"]) == set(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                torch.tensor(reply["whole"][name]), tensor.detach(), rtol=0, atol=0
            )
    assert sum(reply["local"] for reply in replies) == sum(p.numel() for p in model.parameters())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 1
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), parameter, rtol=0, atol=0)


def test_a_value_model_starts_from_a_reward_model_read_in_shards(
    tokenizer: Any, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    reward = make_reward_model(tokenizer, tmp_path / "reward")
    model: Any = AutoModelForSequenceClassification.from_pretrained(reward, dtype=torch.float32)
    for reply in run(make_config(), tmp_path, reward):
        assert reply["unread"] == len(list(model.parameters())) - 1
        head = torch.tensor(reply["whole"]["head.weight"])
        torch.testing.assert_close(head, model.score.weight.detach())
        for name, parameter in model.base_model.named_parameters():
            found = torch.tensor(reply["whole"][f"backbone.{name}"])
            torch.testing.assert_close(found, parameter.detach())


def test_a_missing_tensor_is_an_error_that_names_it(
    model_path: str, tokenizer: Any, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = moe(tmp_path / "moe")
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for reply in run(make_config(model={"path": str(folder)}), tmp_path):
        assert "model.layers.1.self_attn.q_proj.weight is missing" in reply
