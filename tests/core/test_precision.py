"""`model.dtype` where the configuration leaves it open."""

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import parse_config
from turnwise.core.precision import precision as precision_of
from turnwise.errors import InputError

SHAPE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
OPEN = ("environment", "data.path")


def precision(folder: Path, shape: dict[str, Any], on_gpu: bool, **keys: Any) -> str | None:
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    config = parse_config({"model": {"path": str(folder), **keys}}, OPEN)
    return precision_of(config.model, on_gpu)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({}, "float32"),
        (
            {"model_type": "qwen2_5_vl", "text_config": {"dtype": "bfloat16"}},
            "bfloat16",
        ),
    ],
)
def test_on_gpus_it_is_the_files_and_on_cpus_float32(
    tmp_path: Path, shape: dict[str, Any], expected: str
) -> None:
    assert precision(tmp_path, shape, on_gpu=True) == expected
    assert precision(tmp_path, shape, on_gpu=False) == "float32"


def test_a_set_precision_stays_and_unreadable_files_are_named(tmp_path: Path) -> None:
    assert precision(tmp_path, {"dtype": "bfloat16"}, True, dtype="float32") == "float32"
    assert precision(tmp_path, {"dtype": "float32"}, False, dtype="bfloat16") == "bfloat16"
    missing = parse_config({"model": {"path": str(tmp_path / "none")}}, OPEN)
    with pytest.raises(InputError, match="none cannot be read"):
        precision_of(missing.model, on_gpu=True)
