"""Adapters' folders: mistakes in them are one sentence, before anything slow starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import adapter_config, adapter_tensors, write_adapter
from turnwise.config import Config, parse_config
from turnwise.engine.adapters import POLICY, EngineAdapters
from turnwise.errors import InputError

KEY = "serving.adapters.polite"


def parsed(model: dict[str, str], adapters: dict[str, str]) -> Config:
    tree = {"model": model, "serving": {"adapters": adapters}}
    return parse_config(tree, optional=("environment", "data.path"))


@pytest.fixture
def configured(tmp_path: Path, model_path: str) -> Callable[..., Config]:
    """Writes an adapter with the given changes, and returns a configuration that serves it."""

    def write(tensors: Any = None, **keys: Any) -> Config:
        rank = keys.pop("rank", 4)
        tensors = adapter_tensors(model_path, rank) if tensors is None else tensors
        path = write_adapter(tmp_path / "polite", tensors, adapter_config(model_path, 4, **keys))
        return parsed({"path": model_path}, {"polite": path})

    return write


def test_memory_covers_the_largest_rank_and_every_adapter(
    configured: Callable[..., Config], tmp_path: Path, model_path: str
) -> None:
    config = configured()
    assert EngineAdapters.of(config).arguments(on_cpu=False) == {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
        "max_cpu_loras": 1,
    }
    other = write_adapter(
        tmp_path / "other", adapter_tensors(model_path, 9), adapter_config(model_path, 9)
    )
    both = config.model_copy(update={"model": config.model.model_copy(update={"adapter": other})})
    adapters = EngineAdapters.of(both)
    assert (adapters.rank, adapters.paths[POLICY]) == (9, other)
    assert adapters.arguments(on_cpu=False)["max_lora_rank"] == 16
    assert adapters.arguments(on_cpu=False)["max_loras"] == 2
    assert adapters.arguments(on_cpu=True)["max_loras"] == 2
    assert EngineAdapters().arguments(on_cpu=True) == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": 3}, "has rank 4 in adapter_config.json, but model.layers.0"),
        ({"peft_type": "IA3"}, "is an adapter of type IA3, not LORA"),
        ({"use_dora": True}, "uses DoRA, which vLLM does not apply"),
        ({"bias": "all"}, "trains biases, which vLLM does not apply"),
        ({"r": 4000}, "has rank 4000, not one from 1 to 512"),
        ({"r": "4"}, "has rank '4', not one from 1 to 512"),
        ({"tensors": {}}, "has no tensors"),
    ],
)
def test_an_adapter_that_vllm_cannot_apply_is_refused(
    configured: Callable[..., Config], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        EngineAdapters.of(configured(**keys))
    assert str(refused.value).startswith(KEY)
    assert message in str(refused.value)


def test_layers_may_have_ranks_of_their_own(
    configured: Callable[..., Config], model_path: str
) -> None:
    tensors = adapter_tensors(model_path, 4, targets=("q_proj",))
    tensors |= adapter_tensors(model_path, 8, targets=("o_proj",))
    assert EngineAdapters.of(configured(tensors, rank_pattern={"o_proj": 8})).rank == 8
    with pytest.raises(InputError, match=r"has rank 4 in .*o_proj has tensors"):
        EngineAdapters.of(configured(tensors))


@pytest.mark.parametrize("damage", ["missing", "no config", "no weights", "cut", "not JSON"])
def test_a_damaged_or_missing_folder_is_named(
    configured: Callable[..., Config], tmp_path: Path, damage: str
) -> None:
    config, folder = configured(), tmp_path / "polite"
    weights, description = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if damage == "missing":
        folder.rename(tmp_path / "moved")
    elif damage == "no config":
        description.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:20])
    else:
        description.write_text("{")
    with pytest.raises(InputError) as refused:
        EngineAdapters.of(config)
    assert str(refused.value).startswith(KEY)
    assert str(folder) in str(refused.value)


def test_an_adapter_folder_means_its_base_model_with_the_adapter(
    configured: Callable[..., Config], tmp_path: Path, model_path: str
) -> None:
    folder = configured().serving.adapters["polite"]
    model = parsed({"path": folder}, {}).model
    assert (model.path, model.adapter, model.tokenizer) == (model_path, folder, None)
    Path(folder, "tokenizer_config.json").write_text("{}")
    assert parsed({"path": folder}, {}).model.tokenizer == folder
    with pytest.raises(InputError, match="is itself an adapter"):
        parsed({"path": folder, "adapter": folder}, {})
    Path(folder, "adapter_config.json").write_text(json.dumps({"r": 4}))
    with pytest.raises(InputError, match="does not name the adapter's base model"):
        parsed({"path": folder}, {})
