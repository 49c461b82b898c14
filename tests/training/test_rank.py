"""The policy in this process (one rank), and as several ranks in processes of their own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.plain_scoring import token_logprobs
from turnwise.config import Config, SamplingConfig
from turnwise.config.data import template_text
from turnwise.errors import InputError, TurnwiseError
from turnwise.training import Sample, checkpoint
from turnwise.training.batching import RankBatches, micro_batch_tokens, plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import CONFIGURED, RECORDED, OptimSettings, by_sample, merge

ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"kl": {"coef": 0.01}},
    {"loss": {"name": "gspo"}, "reduction": "sequence_mean"},
    {"advantage": {"name": "gae"}},
    {"loss": {"name": "dpo"}},
    {"correction": {"name": "sequence_tis"}, "kl": {"coef": 0.1, "where": "reward"}},
    {"loss": {"name": "sapo"}, "kl": {"coef": 0.1, "sync_steps": 1}},
    {"entropy": {"coef": 0.1, "top_quantile": 0.5}, "off_policy_mask_threshold": 1e-3},
]


@pytest.fixture
def make_policy(make_config: Callable[..., Config]) -> Callable[..., TrainerRank]:
    def make(algorithm: dict[str, Any] | None = None, **training: Any) -> TrainerRank:
        values = {"learning_rate": 1e-3, "threads": 1, **training}
        return TrainerRank(make_config(training=values, algorithm=algorithm or {}))

    return make


def planned(policy: TrainerRank, samples: list[Sample]) -> list[RankBatches]:
    training = policy._training
    (shares,) = plan_micro_batches(
        samples,
        training.updates_per_step,
        1,
        micro_batch_tokens(training, on_gpu=False),
        policy.layouts,
    )
    return shares


def train(policy: TrainerRank, samples: list[Sample]) -> dict[str, Any]:
    """Train as `TrainerGroup.train` does, in this process."""
    return merge([policy.train(planned(policy, samples))])


def model_of(policy: TrainerRank) -> Any:
    return policy._scorer.get_submodule("model")


def score(model: Any, ids: list[int], start: int, **sampling: Any) -> list[float]:
    ids_1T = torch.tensor([ids])
    mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
    mask_1T[:, start:] = True
    with torch.no_grad():
        values: list[float] = token_logprobs(
            model, ids_1T, mask_1T, SamplingConfig(**sampling)
        ).tolist()
    return values


def samples_for(model: Any, count: int = 8, version: int = 0) -> list[Sample]:
    """Samples as the engine would have made them: log-probs under the model itself. Each even
    one and the odd one after it are a pair."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        length = 20 + 3 * i
        ids = torch.randint(0, 600, (length,), generator=generator).tolist()
        logprobs = [0.0] * 10 + score(model, ids, 10)
        mask = [0] * 10 + [1] * (length - 10)
        versions = [-1] * 10 + [version] * (length - 10)
        made.append(
            Sample.of(ids, mask, logprobs, versions, -1.0 if i % 2 else 1.0, i, pair_id=i // 2)
        )
    return made


def rewarded_at_the_end(samples: list[Sample]) -> list[Sample]:
    """The samples for a value model: their advantage is a reward at the last token."""
    return [
        replace(s, advantages_T=np.where(np.arange(s.length) == s.length - 1, s.advantages_T, 0))
        for s in samples
    ]


def weights(policy: TrainerRank) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy._scorer.parameters()])


def test_logprobs_are_log_softmax_of_the_logits(make_policy: Callable[..., TrainerRank]) -> None:
    model = model_of(make_policy())
    ids = list(range(3, 33))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    expected = [float(logits[t - 1].log_softmax(-1)[ids[t]]) for t in range(5, 30)]
    assert score(model, ids, 5) == pytest.approx(expected, abs=1e-5)
    warm = [float((logits[t - 1] / 2).log_softmax(-1)[ids[t]]) for t in range(5, 30)]
    assert score(model, ids, 5, temperature=2.0) == pytest.approx(warm, abs=1e-5)


def test_a_token_outside_of_top_k_keeps_a_finite_logprob(
    make_policy: Callable[..., TrainerRank],
) -> None:
    model = model_of(make_policy())
    ids = torch.randint(0, 600, (40,)).tolist()
    for limits in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        values = score(model, ids, 1, **limits)
        assert all(-50 < value <= 0 for value in values)


def test_a_temperature_is_the_one_that_vllm_samples_at(
    make_policy: Callable[..., TrainerRank],
) -> None:
    model = model_of(make_policy())
    ids = torch.randint(0, 600, (40,)).tolist()
    for temperature in (1e-6, 0.004):
        assert score(model, ids, 1, temperature=temperature) == score(
            model, ids, 1, temperature=0.01
        )
    greedy = score(model, ids, 1, temperature=0.0, top_k=2, top_p=0.1)
    assert greedy == score(model, ids, 1)


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy()
    batch = samples_for(model_of(policy))
    metrics = train(policy, batch)
    assert policy.version == 1
    assert metrics["logprob_diff_max"] < 1e-4
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_p1"] == pytest.approx(1, abs=1e-4)
    assert metrics["staleness"] == {"0": sum(s.trained for s in batch)}
    assert 0 < metrics["entropy"] < np.log(1000)
    for sample in batch:
        before = float(sample.logprobs_T.sum())
        after = sum(score(model_of(policy), sample.token_ids_T.tolist(), 10))
        assert (after - before) * sample.advantage > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_losses_ignore_micro_batches_packing_and_recomputation(
    make_policy: Callable[..., TrainerRank], algorithm: dict[str, Any]
) -> None:
    runs = []
    for options in (
        {"micro_batch_tokens": 10_000},
        {"micro_batch_tokens": 100},
        {"packing": "packed"},
        {"packing": "shared"},
        {"activation_checkpointing": True},
    ):
        policy = make_policy(algorithm, updates_per_step=2, **options)
        metrics = train(policy, samples_for(model_of(policy)))
        again = train(policy, samples_for(model_of(policy), version=policy.version))
        runs.append((metrics, again, weights(policy)))
    first = runs[0]
    for run in runs[1:]:
        for key in ("loss", "entropy", "kl", "value_loss"):
            for i in (0, 1):
                expected = first[i].get(key, 0.0)
                assert run[i].get(key, 0.0) == pytest.approx(expected, abs=1e-5)
        # AdamW's first steps divide a gradient by itself: only near-zero ones can differ visibly.
        assert (run[2] - first[2]).abs().mean() < 1e-5


def test_several_passes_are_as_many_steps_on_the_same_samples(
    make_policy: Callable[..., TrainerRank],
) -> None:
    """With ratios to the engine's log-probs, which do not change."""
    once, twice = (
        make_policy(updates_per_step=2),
        make_policy(updates_per_step=2, epochs_per_step=2),
    )
    batch = samples_for(model_of(once))
    steps = [train(once, batch) for _ in range(2)]
    both = train(twice, batch)
    assert once.version == twice.version == 4
    torch.testing.assert_close(weights(twice), weights(once), rtol=0, atol=1e-7)
    for key in ("loss", "grad_norm", "ratio", "clip_fraction", "entropy"):
        mean = sum(metrics[key] for metrics in steps) / 2
        assert both[key] == pytest.approx(mean, abs=1e-5), key
    assert both["trained_tokens"] == steps[0]["trained_tokens"]
    assert both["staleness"] == steps[0]["staleness"]
    assert both["logprob_diff_max"] == pytest.approx(steps[0]["logprob_diff_max"], abs=1e-6)
    assert both["ratio_p99"] > steps[0]["ratio_p99"]


def test_each_pass_measures_ratios_to_the_policy_before_a_step(
    make_policy: Callable[..., TrainerRank],
) -> None:
    """The engine's log-probs are one nat off, and a correction takes them out of the ratios."""
    correction = {"correction": {"name": "token_tis"}}
    policy = make_policy(correction, epochs_per_step=3)
    batch = samples_for(model_of(policy))
    for sample in batch:
        sample.logprobs_T[sample.response_mask_T] -= 1.0
    report = policy.train(planned(policy, batch))
    assert len(report.updates) == policy.version == 3
    ratios = report.tokens_KN[RECORDED.index("ratio")].reshape(3, -1)
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert (ratios[1:].std(axis=1) > 1e-3).all()
    corrections = [update.sums["correction"] / update.tokens for update in report.updates]
    assert corrections == pytest.approx([2, 2, 2])


def test_the_reference_model_moves_towards_the_policy(
    make_policy: Callable[..., TrainerRank],
) -> None:
    kl = {"coef": 0.1, "sync_steps": 2, "mixup_alpha": 0.25}
    policy = make_policy({"kl": kl})
    reference = policy._models.reference
    assert reference is not None
    before = [p.detach().clone() for p in reference.parameters()]
    batch = samples_for(model_of(policy))
    train(policy, batch)
    for parameter, old in zip(reference.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    kept = train(policy, batch)["kl"]
    assert kept > 0
    moved = zip(reference.parameters(), before, policy._scorer.parameters(), strict=True)
    for parameter, old, new in moved:
        torch.testing.assert_close(parameter, 0.25 * new + 0.75 * old)
        assert not parameter.requires_grad


def test_an_entropy_bonus_raises_the_entropy(make_policy: Callable[..., TrainerRank]) -> None:
    """Advantages of 0 leave nothing else to train."""
    policy = make_policy({"entropy": {"coef": 0.5}})
    batch = [replace(s, advantages_T=0 * s.advantages_T) for s in samples_for(model_of(policy))]
    steps = [train(policy, batch) for _ in range(3)]
    assert steps[-1]["entropy"] > steps[0]["entropy"]
    for metrics in steps:
        assert metrics["entropy_coef"] == 0.5
        assert metrics["policy_loss"] == pytest.approx(0, abs=1e-6)
        assert metrics["policy_loss"] - metrics["loss"] == pytest.approx(
            0.5 * metrics["entropy"], rel=1e-4
        )
    assert "policy_loss" not in train(make_policy(), batch)


def test_an_adaptive_weight_changes_per_update_once_measured(
    make_policy: Callable[..., TrainerRank],
) -> None:
    entropy = {"coef": 0.01, "adaptive": True, "target": 15.0}
    policy = make_policy({"entropy": entropy}, updates_per_step=2, epochs_per_step=2)
    report = policy.train(planned(policy, samples_for(model_of(policy))))
    coefs = [update.entropy_coef for update in report.updates]
    assert coefs == pytest.approx([0.015, 0.02, 0.025, 0.03])
    assert [update.bonus > 0 for update in report.updates] == [False, True, True, True]


def test_tokens_of_low_entropy_do_not_train(make_policy: Callable[..., TrainerRank]) -> None:
    """The step is that of samples in which their advantages are 0."""
    policy, other = make_policy({"entropy": {"top_quantile": 0.25}}), make_policy()
    shares = planned(policy, samples_for(model_of(policy)))
    report = policy.train(shares)
    metrics, zeroed = merge([report]), []
    for sample, values_KN in by_sample([shares], [report]):
        advantages_T = sample.advantages_T.copy()
        advantages_T[sample.response_mask_T] *= values_KN[RECORDED.index("weight")] > 0
        zeroed.append(replace(sample, advantages_T=advantages_T))
    low_N = report.tokens_KN[RECORDED.index("weight")] == 0
    entropy_N = report.tokens_KN[RECORDED.index("entropy")]
    assert entropy_N[low_N].max() <= entropy_N[~low_N].min() + 1e-4
    assert metrics["low_entropy_masked"] == pytest.approx(0.75, abs=1 / len(low_N))
    assert metrics["trained_tokens"] == len(low_N)
    expected = train(other, zeroed)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert (weights(policy) - weights(other)).abs().mean() < 1e-5


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_a_counted_only_sample_acts_like_one_of_advantage_0(
    make_policy: Callable[..., TrainerRank], reduction: str
) -> None:
    steps = []
    for counted_only in (True, False):
        policy = make_policy({"reduction": reduction})
        samples = [
            replace(s, pair_id=s.sequence, trajectory=s.sequence)
            for s in samples_for(model_of(policy))
        ]
        silent = [
            replace(s, advantages_T=0 * s.advantages_T, counted_only=counted_only)
            for s in samples[4:]
        ]
        steps.append(train(policy, [*samples[:4], *silent]))
    counted, computed = steps
    alone = train(make_policy({"reduction": reduction}), samples[:4])
    assert counted["grad_norm"] == pytest.approx(computed["grad_norm"], rel=1e-4)
    assert counted["loss"] == pytest.approx(computed["loss"], abs=1e-6)
    assert counted["trained_tokens"] == alone["trained_tokens"] < computed["trained_tokens"]
    assert alone["grad_norm"] > 1.5 * counted["grad_norm"]


def test_a_head_in_chunks_gives_the_same_gradients(
    make_policy: Callable[..., TrainerRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for elements in (2**25, 20_000):
        monkeypatch.setattr("turnwise.training.model.CHUNK_ELEMENTS", elements)
        policy = make_policy()
        loss = train(policy, samples_for(model_of(policy)))["loss"]
        runs.append((loss, weights(policy)))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-6)
    assert (runs[0][1] - runs[1][1]).abs().mean() < 1e-6


def test_several_updates_a_step_count_versions_and_warm_up(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy(updates_per_step=4, warmup_steps=7)
    metrics = train(policy, samples_for(model_of(policy)))
    assert policy.version == 4
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 4 / 8)  # of the last of them
    assert metrics["logprob_diff_max"] < 1e-4  # measured before the first of them
    stale = train(policy, samples_for(model_of(policy)))
    assert stale["staleness_max"] == 4


def test_a_correction_compares_engine_and_trainer_before_a_step(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy({"correction": {"name": "token_tis", "high": 1.5}}, updates_per_step=2)
    batch = samples_for(model_of(policy))
    for sample in batch:
        sample.logprobs_T[sample.response_mask_T] -= 1.0  # an engine that found them less likely
    metrics = train(policy, batch)
    assert metrics["correction"] == pytest.approx(1.5)
    assert metrics["ratio"] == pytest.approx(1, abs=0.05)
    assert metrics["logprob_diff_mean"] == pytest.approx(1, abs=1e-3)


def test_no_update_of_a_step_corrects_fresh_tokens(
    make_policy: Callable[..., TrainerRank],
) -> None:
    """The engine's log-probs are so far off that `mask` leaves out every token that it sees."""
    kept = []
    for stale_only in (True, False):
        correction = {"name": "mask", "stale_only": stale_only}
        policy = make_policy({"correction": correction}, updates_per_step=4)
        batch = samples_for(model_of(policy))
        for sample in batch:
            sample.logprobs_T[sample.response_mask_T] -= 3.0
        kept.append(train(policy, batch)["correction"])
    assert kept == [1.0, 0.0]


def test_the_third_non_finite_gradient_in_a_row_ends_the_run(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy()
    before = weights(policy).clone()
    (good, *_) = samples_for(model_of(policy), 1)
    lists = (good.token_ids_T, good.response_mask_T, good.logprobs_T, good.weight_versions_T)
    bad = Sample.of(*(x.tolist() for x in lists), float("nan"), 0)
    for _ in range(2):
        metrics = train(policy, [bad])
        assert (metrics["skipped_updates"], policy.version) == (1.0, 0)
    with pytest.raises(TurnwiseError, match="3 updates in a row had no finite loss"):
        train(policy, [bad])
    assert torch.equal(before, weights(policy))


def test_the_value_model_learns_before_the_policy_where_it_shall(
    make_policy: Callable[..., TrainerRank],
) -> None:
    policy = make_policy({"advantage": {"name": "gae", "warmup_steps": 5, "learning_rate": 0.001}})
    steps = [train(policy, rewarded_at_the_end(samples_for(model_of(policy)))) for _ in range(5)]
    assert policy.version == 0
    assert steps[-1]["value_loss"] < steps[0]["value_loss"] / 2
    assert steps[-1]["learning_rate"] == 0.0
    assert train(policy, samples_for(model_of(policy)))["learning_rate"] == 1e-3
    assert policy.version == 1


def test_a_model_exported_loads_in_transformers(
    make_policy: Callable[..., TrainerRank], tmp_path: Path
) -> None:
    policy = make_policy()
    train(policy, samples_for(model_of(policy)))
    folder = tmp_path / "step-0001"
    policy.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("The answer is 7.")
    assert score(model.eval(), ids, 1) == pytest.approx(score(model_of(policy), ids, 1), abs=1e-6)
    assert tokenizer.chat_template


def test_a_model_exported_has_the_configured_chat_template(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    model = {**make_config().model.model_dump(), "chat_template": "hermes"}
    policy = TrainerRank(make_config(model=model, training={"threads": 1}))
    folder = tmp_path / "step-0001"
    policy.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    ours = template_text("hermes")
    assert AutoTokenizer.from_pretrained(folder).chat_template == ours
    assert (folder / "chat_template.jinja").read_text() == ours


MOVING: dict[str, Any] = {
    "kl": {"coef": 0.1, "sync_steps": 1, "mixup_alpha": 0.5},
    "entropy": {"coef": 0.01, "adaptive": True, "target": 10.0},
}
"""Its reference model and the weight of its bonus change."""


@pytest.mark.parametrize("algorithm", [{}, {"advantage": {"name": "gae"}}, MOVING], ids=str)
def test_a_policy_goes_on_from_its_checkpoint_bit_for_bit(
    make_policy: Callable[..., TrainerRank], tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    options = {"updates_per_step": 2, "warmup_steps": 5}
    one = make_policy(algorithm, **options)
    batch = samples_for(model_of(one))
    train(one, batch)
    folder = tmp_path / "step-0001"
    one.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    two = make_policy(algorithm, **options)
    assert two.load(folder) == one.version == 2
    first, second = train(one, batch), train(two, batch)
    assert torch.equal(weights(one), weights(two))
    for metrics in (first, second):
        for key in ("train_seconds", "train_tokens_per_s", "train_memory_gib"):
            del metrics[key]
    assert first == second


def test_small_steps_are_not_lost_to_bfloat16(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    model = make_config().model.model_copy(update={"dtype": "bfloat16"})
    config = make_config(model=model, training={"learning_rate": 1e-6, "threads": 1})
    policy = TrainerRank(config)
    before = [p.detach().clone() for p in policy._scorer.parameters()]
    metrics = train(policy, samples_for(model_of(policy)))
    moved = [
        (p.detach() != b).float().mean().item()
        for p, b in zip(policy._scorer.parameters(), before, strict=True)
    ]
    assert min(moved[1:]) > 0.5
    assert metrics["logprob_diff_max"] < 0.5
    manifest = policy.publish()
    assert {tensor.dtype for tensor in manifest.tensors} == {"bfloat16"}
    folder = tmp_path / "half"
    policy.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert saved.dtype == torch.bfloat16
    assert model_of(policy).dtype == torch.float32


def test_a_model_that_is_not_there_is_named(make_config: Callable[..., Config]) -> None:
    config = make_config(model={"path": "/nowhere"})
    with pytest.raises(InputError, match="the model /nowhere cannot be loaded"):
        TrainerRank(config)


def test_a_model_that_does_not_fit_is_refused_before_loading(
    make_config: Callable[..., Config], build: Path, tmp_path: Path
) -> None:
    shape = AutoModelForCausalLM.from_pretrained(build / "model").config
    shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers = 16384, 65536, 64
    shape.layer_types = ["full_attention"] * 64
    shape.save_pretrained(tmp_path)
    config = make_config(model={"path": str(tmp_path)})
    with pytest.raises(InputError, match=r"does not fit: its [\d,]+ M parameters need"):
        TrainerRank(config)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_gradient_and_an_optimizer_step_are_a_training_step(
    make_policy: Callable[..., TrainerRank], algorithm: dict[str, Any]
) -> None:
    whole, parts = make_policy(algorithm), make_policy(algorithm)
    samples = samples_for(model_of(whole))
    (share,) = planned(whole, samples)
    trained = whole.train([share])
    added = parts.forward_backward(share)
    version, updates = parts.optim_step(CONFIGURED)
    assert version == trained.version == 1
    assert (added.tokens_KN == trained.tokens_KN).all()
    assert updates["policy"].grad_norm == trained.updates[0].grad_norm
    for one, other in zip(whole._models.weights(), parts._models.weights(), strict=True):
        assert torch.equal(one, other)


def test_values_of_a_step_are_its_own(make_policy: Callable[..., TrainerRank]) -> None:
    policy = make_policy(lr_schedule="linear", steps=4)
    (share,) = planned(policy, samples_for(model_of(policy)))
    before = [tensor.clone() for tensor in policy._models.weights()]
    policy.forward_backward(share)
    own = OptimSettings(0.0, (0.5, 0.6), 1e-3, 0.1, 1e9)
    _, updates = policy.optim_step(own)
    assert updates["policy"].learning_rate == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, policy._models.weights(), strict=True))
    groups = policy._learners["policy"].optimizer.param_groups
    assert {group["lr"] for group in groups} == {1e-3 * 3 / 4}
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.9, 0.95), 1e-8)}
    assert {group["weight_decay"] for group in groups} == {policy._training.weight_decay}
