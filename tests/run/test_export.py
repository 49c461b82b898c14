"""Files that `turnwise export` writes, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from turnwise.config import Config, dump_config
from turnwise.errors import InputError
from turnwise.run.commands import export_run
from turnwise.training import checkpoint
from turnwise.training.lora import write_adapter
from turnwise.training.rank import TrainerRank

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
SETTINGS: dict[str, object] = {"r": 2, "lora_alpha": 4, "use_rslora": False}


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> Path:
    """A run's folder without checkpoints."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(make_config()))
    return tmp_path / "run"


def saved(run: Path, step: int, rows: int | None = None) -> Path:
    """Write a checkpoint: a file, or with rows an adapter for a layer of so many outputs."""
    folder = run / "checkpoints" / f"step-{step:04d}"
    begun = checkpoint.begin(folder)
    if rows is None:
        (begun / "model.safetensors").write_text(f"model {step}")
    else:
        tensors = {
            f"{LAYER}.lora_A.weight": torch.ones(2, 128),
            f"{LAYER}.lora_B.weight": torch.ones(rows, 2),
        }
        write_adapter(begun, SETTINGS, tensors)
    (begun / "state" / "rank-0.pt").write_text("state")
    checkpoint.commit(folder)
    return folder


def test_export_copies_the_last_or_a_named_checkpoint_stateless(run: Path) -> None:
    first = saved(run, 1)
    saved(run, 2)
    assert export_run(run) == run / "export"
    assert [path.name for path in (run / "export").iterdir()] == ["model.safetensors"]
    assert (run / "export" / "model.safetensors").read_text() == "model 2"
    assert (export_run(first, run / "one", merged=True) / "model.safetensors").read_text() == (
        "model 1"
    )


def test_an_adapter_is_added_to_the_layers_that_it_names(run: Path, model_path: str) -> None:
    base = load_file(Path(model_path) / "model.safetensors")
    name = LAYER.removeprefix("base_model.model.") + ".weight"
    saved(run, 1, rows=len(base[name]))
    merged = load_file(export_run(run, merged=True) / "model.safetensors")
    assert torch.allclose(merged.pop(name), base.pop(name) + 4.0)  # alpha / rank * 2 ones
    assert merged.keys() == base.keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in base.items())
    assert (run / "merged" / "tokenizer.json").is_file()
    stops = [GenerationConfig.from_pretrained(f).eos_token_id for f in (model_path, run / "merged")]
    assert stops[0] == stops[1] is not None


def test_what_cannot_be_exported_is_one_sentence(run: Path) -> None:
    with pytest.raises(InputError, match="holds no whole checkpoint"):
        export_run(run)
    folder = saved(run, 1, rows=7)
    with pytest.raises(InputError, match=r"has no layer model\.layers\.0\.self_attn\.q_proj of th"):
        export_run(run, merged=True)
    with pytest.raises(InputError, match=r"run exists: name another folder with --output"):
        export_run(run, run)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(InputError, match=r"is no whole checkpoint: .*adapter_config.json is miss"):
        export_run(folder)
    with pytest.raises(InputError, match="there is no run in /no/run"):
        export_run(Path("/no/run"))


CODE = {
    "parts_mine.py": "TYPE = 'mine'\n",
    "configuration_mine.py": (
        "from transformers import AutoConfig, Qwen3Config\n"
        "from .parts_mine import TYPE\n"
        "class MineConfig(Qwen3Config):\n"
        "    model_type = TYPE\n"
    ),
    "modeling_mine.py": (
        "from transformers import Qwen3ForCausalLM\n"
        "from .configuration_mine import MineConfig\n"
        "class MineForCausalLM(Qwen3ForCausalLM):\n"
        "    config_class = MineConfig\n"
    ),
}


@pytest.mark.parametrize("rank", [0, 2])
def test_an_export_has_stops_generation_settings_and_model_code(
    make_config: Callable[..., Config], model_path: str, tmp_path: Path, rank: int
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_path, base)
    for name, text in CODE.items():
        (base / name).write_text(text)
    shape: dict[str, Any] = json.loads((base / "config.json").read_text())
    shape |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    shape["auto_map"] = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (base / "config.json").write_text(json.dumps(shape))
    # Transformers reads such settings, and refuses to write them.
    settings = {"eos_token_id": [2, 3], "do_sample": False, "temperature": 0.6, "top_k": 20}
    (base / "generation_config.json").write_text(json.dumps(settings))
    model = {
        "path": str(base),
        "max_length": 512,
        "trust_remote_code": True,
        "lora": {"rank": rank},
    }
    config = make_config(model=model, training={"threads": 1})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(config))
    folder = checkpoint.folder_of(run, 1)
    TrainerRank(config, folder=run).save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    exported = export_run(run, merged=True)
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [2, 3]
    assert json.loads((exported / "generation_config.json").read_text()) == settings
    assert {path.name for path in exported.glob("*.py")} == {*CODE}
    loaded = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert type(loaded).__name__ == "MineForCausalLM"
