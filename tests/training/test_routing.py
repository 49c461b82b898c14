"""Routing replay: the trainer computes with the experts that the engine chose."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from tests.models import make_moe
from tests.test_cli import metrics_of, turnwise, write_config
from tests.training.test_gather import SMALL, moe
from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.batching import make_micro_batch
from turnwise.training.model import RoutingReplay, Scorer
from turnwise.trajectory import Branch, read_jsonl

EXPERTS = {"num_experts": 8, "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
GRADIENTS = ("mlp.gate.weight", "mlp.experts.down_proj")


def loaded(path: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def choices(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens but the first, and each token's experts in each layer: [T, L, K]."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    logprobs = logits[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs, torch.stack(found, dim=1)


def assert_chosen_by(model: Any, branch: Branch) -> None:
    """The branch has a row for each token but the last, and it is what the model chooses."""
    _, chosen = choices(model, branch.token_ids)
    rows = torch.frombuffer(bytearray(branch.experts), dtype=torch.uint8).view(-1, 2, 2)
    assert len(rows) == len(branch.token_ids) - 1
    same = rows.long().sort(-1).values == chosen[:-1].sort(-1).values
    assert same.all(-1).float().mean() > 0.99  # rounding may decide between two experts


def rows_of(chosen_TLK: torch.Tensor) -> bytes:
    return bytes(chosen_TLK[:-1].to(torch.uint8).numpy().tobytes())


def sample_of(ids: list[int], experts: bytes) -> Sample:
    mask = [0] + [1] * (len(ids) - 1)
    return Sample.of(ids, mask, [0.0] * len(ids), [0] * len(ids), 1.0, len(ids), experts=experts)


def token_ids(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (length,), generator=generator).tolist()


def perturbed(path: Path) -> Any:
    """The model with other routers."""
    model = loaded(path)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data += 0.5 * torch.randn_like(layer.mlp.gate.weight)
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_perturbed_routers_keep_the_recorded_choice_and_learn(
    tmp_path: Path, packed: bool, recompute: bool
) -> None:
    """By `engine.routing_replay`."""
    path = moe(tmp_path / "moe", **EXPERTS)
    rows = [token_ids(1, 30), token_ids(2, 17)]
    recorded = [choices(loaded(path), ids)[1] for ids in rows]
    model = perturbed(path)
    own = [choices(model, ids)[1] for ids in rows]
    assert any(not torch.equal(a, b) for a, b in zip(own, recorded, strict=True))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    used: list[torch.Tensor] = []
    scorer = Scorer(model, SamplingConfig(), torch.float32, replay=RoutingReplay(model))
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: used.append(out[2]))
    samples = [sample_of(ids, rows_of(c)) for ids, c in zip(rows, recorded, strict=True)]
    batch = make_micro_batch(
        samples, {30: 29, 17: 16}, 0, "packed" if packed else "padded", torch.device("cpu")
    )
    scores: Any = scorer(batch.columns)
    scores[0].sum().backward()
    assert len(used) == (4 if recompute else 2)
    for chosen, layer in zip(used, [0, 1, 1, 0], strict=False):
        chosen_TK = chosen if packed else chosen.view(2, 30, 2)[[0, 1]].flatten(0, 1)
        starts = (0, 30)
        for start, want in zip(starts, recorded, strict=True):
            length = len(want) - 1  # nothing depends on the choice of the last token
            assert torch.equal(chosen_TK[start : start + length], want[:-1, layer])
    for name in GRADIENTS:
        gradient = model.model.layers[0].get_parameter(name).grad
        assert gradient is not None
        assert gradient.abs().sum() > 0


def test_the_engines_experts_bring_log_probs_closer_to_its_own(
    tmp_path: Path,
) -> None:
    """Weights that engine and trainer hold in different precisions, in the extreme."""
    path = moe(tmp_path / "moe", **EXPERTS)
    ids = token_ids(3, 40)
    expected, recorded = choices(loaded(path), ids)
    model = loaded(path)
    for layer in model.model.layers:
        layer.mlp.gate.weight.data += 0.01 * torch.randn_like(layer.mlp.gate.weight)
    free, _ = choices(model, ids)
    scorer = Scorer(model, SamplingConfig(), torch.float32, replay=RoutingReplay(model))
    batch = make_micro_batch(
        [sample_of(ids, rows_of(recorded))], {40: 39}, 0, False, torch.device("cpu")
    )
    with torch.no_grad():
        replayed = scorer(batch.columns)[0]
        unknown = replace(batch.columns, experts_BTR=None)
        assert torch.allclose(scorer(unknown)[0], free, atol=1e-5)
    assert (replayed - expected).abs().max() < (free - expected).abs().max()


def test_a_sample_without_a_record_is_routed_as_ever(tmp_path: Path) -> None:
    path = moe(tmp_path / "moe", **EXPERTS)
    one, two = token_ids(1, 30), token_ids(2, 17)
    _, recorded = choices(loaded(path), one)
    model = perturbed(path)
    free, _ = choices(model, two)
    scorer = Scorer(model, SamplingConfig(), torch.float32, replay=RoutingReplay(model))
    samples = [sample_of(one, rows_of(recorded)), sample_of(two, b"")]
    batch = make_micro_batch(samples, {30: 29, 17: 16}, 0, False, torch.device("cpu"))
    with torch.no_grad():
        scores: Any = scorer(batch.columns)
    assert torch.allclose(scores[0][29:], free, atol=1e-5)


def test_other_models_and_other_records_are_refused(tmp_path: Path) -> None:
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    with pytest.raises(InputError, match=r"replay: the routers of a llama model are not known"):
        RoutingReplay(dense)
    replay = RoutingReplay(loaded(moe(tmp_path / "moe")))
    with pytest.raises(
        InputError, match=r"recorded 6 bytes for each token, and 2 layers .* have 4"
    ):
        replay.use(torch.zeros(1, 3, 7, dtype=torch.uint8))


def test_routers_that_choose_among_groups_repeat_a_choice_too() -> None:
    torch.manual_seed(0)
    shape = {**SMALL, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
    shape |= {"head_dim": 4}
    shape |= {
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
    }
    shape |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    model: Any = AutoModelForCausalLM.from_config(DeepseekV3Config(**shape, v_head_dim=8))
    replay = RoutingReplay(model)
    used: list[torch.Tensor] = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: used.append(out))
    ids = torch.tensor([token_ids(4, 9)])
    chosen = torch.randint(0, 8, (1, 9, 4), dtype=torch.uint8)
    replay.use(torch.cat([torch.ones(1, 9, 1, dtype=torch.uint8), chosen], dim=-1))
    model(ids)
    found = used[0][-1] if isinstance(used[0], tuple) else used[0]
    assert torch.equal(found, chosen[0, :, 2:].long())


def test_a_prefix_cache_is_needed(make_config: Callable[..., Config]) -> None:
    for other in ({"deterministic": True}, {"engine": {"prefix_caching": False}}):
        engine = {"routing_replay": True, **other.get("engine", {})}
        with pytest.raises(InputError, match=r"engine.routing_replay: .* with a prefix cache"):
            make_config(**{**other, "engine": engine})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_trains_with_the_experts_that_its_engine_chose(
    make_config: Callable[..., Config], tokenizer: Any, tmp_path: Path, ranks: int
) -> None:
    path = make_moe(tokenizer, tmp_path / "moe")
    file = write_config(make_config, tmp_path)
    changes = ["training.steps=3", "training.learning_rate=0.01", "engine.routing_replay=true"]
    changes += [f"training.ranks={ranks}", f"training.context_parallel={ranks}"]
    changes += [f"engine.tensor_parallel_size={ranks}"]
    done = turnwise("train", file, *changes, f"model.path={path}", "name=replay")
    assert done.returncode == 0, done.stderr
    for row in metrics_of(tmp_path / "runs/replay"):
        assert row["logprob_diff_max"] < 1e-4
        assert "experts_missing" not in row.get("events", {})
    model = loaded(path)
    file = tmp_path / "runs/replay/trajectories/step-0001.jsonl"
    branches = [branch for one in read_jsonl(file) for branch in one.branches()]
    assert branches
    for branch in branches:
        assert_chosen_by(model, branch)
