"""LoRA on one rank, in this process: what learns, what is shared, what leaves the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.training.test_rank import (
    model_of,
    rewarded_at_the_end,
    samples_for,
    score,
    train,
)
from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.training import checkpoint
from turnwise.training.batching import plan_micro_batches
from turnwise.training.lora import changed_parameters, merged_tensors
from turnwise.training.rank import TrainerRank

Make = Callable[..., TrainerRank]
PPO = {"advantage": {"name": "gae", "learning_rate": 0.01}, "kl": {"coef": 0.05}}
OTHERS: list[dict[str, Any]] = [
    {},
    {"loss": {"name": "dpo"}},
    {"correction": {"name": "sequence_tis"}, "kl": {"coef": 0.1, "where": "reward"}},
]


@pytest.fixture
def make_policy(make_config: Callable[..., Config], model_path: str) -> Make:
    def make(
        algorithm: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        dtype: str = "float32",
        **training: Any,
    ) -> TrainerRank:
        model = {"path": model_path, "max_length": 512, "lora": {"rank": 4, **(lora or {})}}
        values = {"learning_rate": 1e-2, "threads": 1, **training}
        return TrainerRank(
            make_config(model={**model, "dtype": dtype}, training=values, algorithm=algorithm or {})
        )

    return make


def plain(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def scored(policy: TrainerRank, name: Any, batch: Any) -> list[list[float]]:
    (share,) = plan_micro_batches(batch, 1, 1, 10_000, "padded")[0]
    return [values for _, values in sorted(policy.forward(name, share))]


def learned(policy: TrainerRank) -> torch.Tensor:
    parts = [p for learner in policy._learners.values() for p in learner.module.parameters()]
    return torch.cat([p.detach().flatten() for p in parts])


def held(policy: TrainerRank) -> int:
    """The number of values of all models, each storage once."""
    return sum(
        {p.untyped_storage().data_ptr(): p.numel() for p in policy._models.weights()}.values()
    )


def test_only_adapters_learn_and_engines_get_base_plus_adapter(
    make_policy: Make, model_path: str
) -> None:
    policy, base = make_policy(), plain(model_path)
    batch = samples_for(base)
    assert scored(policy, "policy", batch) == [
        pytest.approx(s.logprobs_T[10:].tolist(), abs=1e-6) for s in batch
    ]
    metrics = train(policy, batch)
    assert metrics["logprob_diff_max"] < 1e-4
    moments = [len(s) for s in policy._learners["policy"].optimizer.state.values()]
    assert len(moments) == 2 * len(
        {n for n, _, lora in changed_parameters(model_of(policy)) if lora}
    )
    kept = dict(base.named_parameters())
    sent = dict(merged_tensors(model_of(policy)))
    for name, tensor in sent.items():
        assert not torch.equal(tensor, kept[name]), name
    for name, parameter in model_of(policy).named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, kept[name.replace(".base_layer", "")])
    assert len(sent) < len(kept)
    base.load_state_dict(sent, strict=False)
    for sample, ours in zip(batch, scored(policy, "policy", batch), strict=True):
        ids = sample.token_ids_T.tolist()
        assert score(base, ids, 10) == pytest.approx(ours, abs=1e-5)
        before = float(sample.logprobs_T.sum())
        assert (sum(ours) - before) * sample.advantage > 0


def test_what_an_engine_fuses_travels_whole(make_policy: Make) -> None:
    policy = make_policy(lora={"target_modules": ["q_proj"], "rank": 2, "alpha": 3.0})
    names = [name for name, _ in policy._sent()]
    first = [name for name in names if ".layers.0." in name]
    assert {name.split(".")[-2] for name in first} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert [entry.name for entry in policy.publish().tensors] == names


def test_reference_and_value_model_share_the_backbone(make_policy: Make, model_path: str) -> None:
    base = plain(model_path)
    policy = make_policy(PPO)
    adapter = sum(p.numel() for p in policy._learners["policy"].module.parameters())
    alone, shared = (held(p) for p in (make_policy(), policy))
    assert shared - alone == adapter + base.config.hidden_size  # the value model's two parts
    batch = rewarded_at_the_end(samples_for(base))
    before = scored(policy, "reference", batch)
    assert {v for values in scored(policy, "value", batch) for v in values} == {0.0}
    steps = [train(policy, batch) for _ in range(4)]
    assert steps[-1]["value_loss"] < steps[0]["value_loss"]
    assert scored(policy, "reference", batch) == before
    assert scored(policy, "policy", batch) != before
    critic = dict(policy._learners["critic"].module.named_parameters())
    assert "head/weight" in critic
    assert all(name == "head/weight" or "/value/" in name for name in critic)
    assert any(bool(p.any()) for name, p in critic.items() if "lora_B" in name)


@pytest.mark.parametrize(
    "algorithm", [PPO, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)], ids=str
)
def test_losses_ignore_micro_batches_packing_and_recomputation(
    make_policy: Make, algorithm: dict[str, Any], model_path: str
) -> None:
    base, runs = plain(model_path), []
    for options in (
        {"micro_batch_tokens": 10_000},
        {"micro_batch_tokens": 100},
        {"packing": "packed"},
        {"packing": "shared"},
        {"activation_checkpointing": True},
    ):
        policy = make_policy(algorithm, updates_per_step=2, **options)
        metrics = [train(policy, rewarded_at_the_end(samples_for(base))) for _ in range(2)]
        runs.append((metrics, learned(policy)))
    for metrics, values in runs[1:]:
        for ours, first in zip(metrics, runs[0][0], strict=True):
            for key in ("loss", "entropy", "kl", "value_loss"):
                assert ours.get(key, 0.0) == pytest.approx(first.get(key, 0.0), abs=1e-4)
        assert (values - runs[0][1]).abs().mean() < 1e-3


@pytest.mark.parametrize(
    "algorithm", [pytest.param({}, marks=pytest.mark.slow), PPO], ids=["grpo", "ppo"]
)
def test_a_run_goes_on_bit_for_bit_and_its_adapter_loads_in_peft(
    make_policy: Make, tmp_path: Path, model_path: str, algorithm: dict[str, Any]
) -> None:
    one, base = make_policy(algorithm, lora={"rslora": True}), plain(model_path)
    batch = samples_for(base)
    train(one, batch)
    folder = tmp_path / "step-0001"
    one.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    two = make_policy(algorithm, lora={"rslora": True})
    assert two.load(folder) == one.version == 1
    train(one, batch), train(two, batch)
    assert torch.equal(learned(one), learned(two))
    assert not (folder / "model.safetensors").exists()

    three = make_policy(algorithm, lora={"rslora": True})
    three.load(folder)
    model = PeftModel.from_pretrained(base, folder).eval()
    for sample, ours in zip(batch, scored(three, "policy", batch), strict=True):
        ids = sample.token_ids_T.tolist()
        assert score(model.base_model.model, ids, 10) == pytest.approx(ours, abs=1e-5)


def test_a_frozen_model_keeps_its_forward_precision(make_policy: Make, model_path: str) -> None:
    policy = make_policy(dtype="bfloat16")
    assert train(policy, samples_for(plain(model_path)))["logprob_diff_max"] < 0.5
    kinds = {p.dtype for n, p in model_of(policy).named_parameters() if ".lora_" not in n}
    assert kinds == {torch.bfloat16}
    assert {p.dtype for p in policy._learners["policy"].module.parameters()} == {torch.float32}
    assert {e.dtype for e in policy.publish().tensors} == {"bfloat16"}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["no_such"], r"model\.lora\.target_modules: .*no_such"),
        (["embed_tokens"], r"embed_tokens can have no adapter"),
    ],
)
def test_layers_that_can_have_no_adapter_are_refused(
    make_policy: Make, targets: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_policy(lora={"target_modules": targets})
