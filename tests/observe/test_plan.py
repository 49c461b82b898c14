"""`turnwise plan`: memory without weights, compared with what a rank holds at its peak."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks.loading import in_processes, peak_of, resident
from examples.calculator.tokenizer import build_tokenizer
from tests.training.architectures import tiny
from turnwise.cli import app
from turnwise.config import Config, dump_config, parse_config
from turnwise.observe.plan import GIB, Machine, expected_length, make_plan
from turnwise.run.doctor import ConfigChecks
from turnwise.training import memory
from turnwise.training.memory import activation_bytes, model_size

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
LARGE = SHAPE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD."""


def folder_of(shape: dict[str, Any], folder: Path) -> str:
    """A model's folder with its configuration alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def configuration(path: str, **sections: Any) -> Config:
    tree = {"model": {"path": path, "dtype": "bfloat16", "max_length": 8192}, **sections}
    return parse_config(tree, optional=("environment", "data.path"))


def test_the_parts_of_a_plan_match_sums_by_hand(tmp_path: Path) -> None:
    layers = 4
    path = folder_of(LARGE | {"num_hidden_layers": layers}, tmp_path / "model")
    training = {"ranks": 8, "colocated": True, "activation_checkpointing": True}
    config = configuration(path, training=training, serving={"workers": 8})
    plan = make_plan(config, Machine(8, 80 * GIB))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    parameters = layers * layer + 2 * 151936 * 4096 + 4096
    assert plan.rank.parts["weights"] == plan.rank.parts["gradients"] == 4 * parameters // 8
    assert plan.rank.parts["optimizer"] == 8 * parameters // 8
    assert plan.engine.parts["weights"] == 2 * parameters
    assert plan.cache_tokens == plan.engine.parts["KV cache"] // (2 * layers * 8 * 128 * 2)
    kept = plan.rank.parts["weights"] + plan.rank.parts["optimizer"]
    assert plan.loads[0].bytes == plan.engine.peak + kept
    assert [(ask.who.split(",")[0], ask.count, ask.gpus) for ask in plan.asks] == [
        ("trainer rank", 8, 1.0),
        ("worker", 8, 0),
    ]
    offload = configuration(
        path, training={**training, "offload": ["params", "optimizer"]}, serving={"workers": 8}
    )
    assert make_plan(offload, Machine(8, 80 * GIB)).loads[0].bytes == plan.engine.peak


def test_the_engines_of_a_teacher_are_planned(tmp_path: Path) -> None:
    path = folder_of(SHAPE, tmp_path / "model")
    large = folder_of(LARGE | {"num_hidden_layers": 2, "vocab_size": 8192}, tmp_path / "large")
    teacher = {"model": large, "engines": 2}
    plain, taught = (
        configuration(path, engine={"kv_cache_gib": 1}, algorithm={"teacher": each})
        for each in (None, teacher)
    )
    plan = make_plan(taught, Machine(4, 80 * GIB))
    (held,) = plan.teachers.values()
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert held.parts["weights"] == 2 * (2 * layer + 2 * 8192 * 4096 + 4096)
    (load,) = (load for load in plan.loads if load.device == "GPU of algorithm.teacher")
    assert load.bytes == held.peak
    assert [(ask.who, ask.count, ask.gpus) for ask in plan.asks] == [
        ("trainer rank", 1, 1.0),
        ("worker", 1, 1.0),
        ("worker of algorithm.teacher", 2, 1.0),
    ]
    one = make_plan(taught, Machine(2, 80 * GIB)).loads
    assert [load.device for load in one] == ["GPU of a rank and engines"]
    assert one[0].bytes == plan.rank.peak + held.peak
    both = [make_plan(each, Machine(0, 64 * GIB)).loads[0].bytes for each in (plain, taught)]
    assert both[1] - both[0] == 2 * held.peak


def test_what_is_expected_is_told_beside_the_worst_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(
        folder_of(SHAPE, tmp_path / "model"),
        sampling={"n": 4, "max_tokens": 64},
        rollout={"prompts_per_step": 2},
        engine={"kv_cache_gib": 1},
    )
    assert expected_length(config) == 8192 // 4 + 64
    assert expected_length(config, 36) == 100
    (load,) = make_plan(config, Machine(0, 64 * GIB), 36).loads
    assert load.minimum < load.expected < load.bytes / 2
    verdicts = {}
    for limit in (load.bytes, load.expected, load.minimum, load.minimum - 1):
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls, n=limit: cls(0, n)))
        checks = ConfigChecks(config, 36)
        plan = make_plan(config, Machine.here(), 36)
        fits = (plan.fits(), plan.fits("expected"), plan.fits("minimum"))
        verdicts[limit] = (*fits, checks.memory().state)
    assert [*verdicts.values()] == [
        (True, True, True, "ok"),
        (False, True, True, "warning"),
        (False, False, True, "warning"),
        (False, False, False, "broken"),
    ]
    monkeypatch.undo()
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    rank = make_plan(config, Machine(2, 64 * GIB)).loads[-1]
    gib = str((rank.expected + rank.bytes) / 2 / GIB)
    said = CliRunner().invoke(app, ["plan", str(file), "--gpus", "2", "--gpu-memory", gib]).output
    assert "at the worst" in said
    assert "with full micro-batches it does not" in said
    assert "It would with:" in said


@pytest.mark.slow
def test_the_command_names_a_change_that_makes_a_run_fit(tmp_path: Path) -> None:
    shape = LARGE | {"num_hidden_layers": 4}
    file = tmp_path / "run.yaml"
    path = folder_of(shape, tmp_path / "model")
    file.write_text(f"model: {{path: {path}, dtype: bfloat16, max_length: 8192}}\n")
    arguments = ["plan", str(file), "--gpus", "2", "--gpu-memory"]
    result = CliRunner().invoke(app, [*arguments, "40"])
    assert result.exit_code == 0, result.output
    assert "It does not fit. It would with: training.activation_checkpointing=true" in result.output
    more = [*arguments, "40", "training.activation_checkpointing=true"]
    assert "It fits." in CliRunner().invoke(app, more).output
    small = CliRunner().invoke(app, [*arguments, "1"]).output
    assert "nor with any of the usual changes" in small


def test_gpus_of_unknown_memory_are_a_mistake_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {folder_of(SHAPE, tmp_path / 'model')}}}\n")
    result = CliRunner().invoke(app, ["plan", str(file), "--gpus", "2"])
    assert result.exit_code == 2
    assert "--gpu-memory" in result.output


def be_rank(place: dict[str, Any], config: Config, folder: Path, reply: Any) -> None:
    """Train two steps of two micro-batches as one rank; send the peak memory."""
    from turnwise.training import Sample
    from turnwise.training.batching import plan_micro_batches
    from turnwise.training.rank import TrainerRank

    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)  # freed tensors leave the process
    torch.set_num_threads(1)
    length = config.model.max_length
    generator = torch.Generator().manual_seed(0)
    samples = []
    groups = place["ranks"] // (size := config.training.context_parallel)
    for index in range(2 * groups * config.training.micro_batch_tokens // length):
        ids = torch.randint(3, 8000, (length,), generator=generator).tolist()
        mask = [0] + [1] * (length - 1)
        samples.append(Sample.of(ids, mask, [-9.0] * length, [0] * length, 1.0, index))
    shares = plan_micro_batches(samples, 1, groups, config.training.micro_batch_tokens, "padded")
    base = resident("VmRSS")

    def work() -> None:
        policy = TrainerRank(config, folder, **place)
        for _ in range(2):
            policy.train(shares[place["rank"] // size])

    reply.send(peak_of(work, base))
    if place["ranks"] > 1:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shared", "recompute", "dtype"),
    [
        (1, 1, False, "float32"),
        (1, 1, 2, "float32"),
        (1, 1, True, "float32"),
        (2, 1, False, "float32"),
        (2, 1, True, "float32"),
        (2, 2, False, "float32"),
        (2, 2, True, "float32"),
        (1, 1, False, "bfloat16"),
        (2, 1, True, "bfloat16"),
    ],
)
def test_a_rank_holds_what_was_planned(
    tmp_path: Path, ranks: int, shared: int, recompute: bool | int, dtype: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from turnwise.weights.process_group import LOOPBACK, open_store

    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor multiplies in bfloat16 sixty times slower than in float32")

    path = folder_of(SHAPE, tmp_path / "model")
    plain = {"path": path, "max_length": 512, "dtype": dtype}
    training = {
        "ranks": ranks,
        "context_parallel": shared,
        "threads": 1,
        "activation_checkpointing": recompute,
        "micro_batch_tokens": 1024,
        "weights_dtype": dtype,
    }
    config = parse_config(
        {"model": plain, "training": training, "weights": {"transport": "collective"}},
        optional=("environment", "data.path"),
    )
    planned = make_plan(config, Machine(0, 24 * GIB)).rank.peak
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    model.float().save_pretrained(path)
    build_tokenizer(0).save_pretrained(path)
    del model
    store = open_store(LOOPBACK, 0)
    place = {"ranks": ranks, "address": f"{LOOPBACK}:{store.port}"}
    tasks = [(be_rank, {"rank": n, **place}, config, tmp_path) for n in range(ranks)]
    measured = max(sent[-1] for sent in in_processes(tasks))
    assert planned == pytest.approx(measured, rel=0.15)


def test_sizing_a_model_with_adapters_draws_no_random_numbers(tmp_path: Path) -> None:
    path = folder_of(SHAPE, tmp_path / "model")
    config = configuration(path, training={"steps": 1})
    adapted = parse_config(
        config.model_dump() | {"model": {"path": path, "lora": {"rank": 4}}},
        optional=("environment", "data.path"),
    )
    state = torch.get_rng_state()
    size = model_size(adapted.model, roles=("policy",))
    assert torch.equal(torch.get_rng_state(), state)
    assert size.learning < size.parameters == model_size(config.model).parameters + size.learning


def test_recomputing_fewer_layers_takes_more_activation_memory(
    tmp_path: Path,
) -> None:
    path = folder_of(SHAPE, tmp_path / "model")
    none, fourth, half, full = (
        activation_bytes(path, False, "float32", False, 2048, 512, every)
        for every in (False, 4, 2, True)
    )
    of_a_layer = (none - full) / SHAPE["num_hidden_layers"]
    assert of_a_layer > 2048 * SHAPE["hidden_size"] * 4 * 10
    assert none - fourth == pytest.approx(2 * of_a_layer, rel=0.01)
    assert none - half == pytest.approx(4 * of_a_layer, rel=0.01)


@pytest.mark.parametrize("every", [False, True, 3])
def test_a_few_layers_tell_what_all_of_them_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool | int
) -> None:
    path = folder_of(SHAPE | {"num_hidden_layers": 16}, tmp_path / "model")
    given = path, False, "bfloat16", False, 512, 128, every
    played: list[int] = []
    peak = memory._peak

    def counted(model: Any, *more: Any) -> int:
        played.append(len(model.model.layers))
        return peak(model, *more)

    monkeypatch.setattr(memory, "_peak", counted)
    few = activation_bytes(*given)
    assert sum(played) < 16
    activation_bytes.cache_clear()
    monkeypatch.setattr(memory, "decoder_layers", lambda model, **_: [])  # no layer is like another
    assert activation_bytes(*given) == few
    activation_bytes.cache_clear()
    assert played[-1] == 16


def test_the_logits_of_a_large_vocabulary_never_exist_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    path = folder_of(shape | {"vocab_size": 150_000}, tmp_path / "model")
    tokens = 16_384
    three_chunks = activation_bytes(path, False, "float32", False, tokens, tokens, False)
    activation_bytes.cache_clear()
    monkeypatch.setattr("turnwise.training.memory.chunk_rows", lambda model: tokens)
    peak = activation_bytes(path, False, "float32", False, tokens, tokens, False)
    activation_bytes.cache_clear()
    assert peak < 1.2 * GIB
    assert tokens * 150_000 * 4 > 9 * GIB
    assert peak == pytest.approx(three_chunks, rel=1e-3)


def test_a_text_model_inside_another_is_planned_as_text_alone(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"tokens": 64, "length": 32}
    for name in ("gemma3", "gemma3_text"):
        tiny(name).save_pretrained(tmp_path / name)
    whole, text = (
        activation_bytes(str(tmp_path / name), False, "float32", False, every=False, **tokens)
        for name in ("gemma3", "gemma3_text")
    )
    assert whole == pytest.approx(text, rel=0.01)
