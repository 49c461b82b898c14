from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.policy import Policy
from turnwise.training.scoring import token_logprobs


@pytest.fixture
def make_policy(make_config: Callable[..., Config]) -> Callable[..., Policy]:
    def make(**training: Any) -> Policy:
        values = {"learning_rate": 1e-3, "threads": 2, **training}
        return Policy(make_config(training=values))

    return make


def score(model: Any, ids: list[int], start: int, **sampling: Any) -> list[float]:
    ids_1T = torch.tensor([ids])
    mask_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
    mask_1T[:, start:] = True
    with torch.no_grad():
        values: list[float] = token_logprobs(
            model, ids_1T, mask_1T, SamplingConfig(**sampling)
        ).tolist()
    return values


def samples(policy: Policy, count: int = 8) -> list[Sample]:
    """Samples as the engine would have made them: log-probs under the policy itself."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        length = 20 + 3 * i
        ids = torch.randint(0, 600, (length,), generator=generator).tolist()
        logprobs = [0.0] * 10 + score(policy._model, ids, 10)
        mask = [0] * 10 + [1] * (length - 10)
        versions = [-1] * 10 + [0] * (length - 10)
        made.append(Sample(ids, mask, logprobs, versions, 1.0 if i % 2 else -1.0))
    return made


def test_logprobs_are_log_softmax_of_the_logits(make_policy: Callable[..., Policy]) -> None:
    model = make_policy()._model
    ids = list(range(3, 33))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    expected = [float(logits[t - 1].log_softmax(-1)[ids[t]]) for t in range(5, 30)]
    assert score(model, ids, 5) == pytest.approx(expected, abs=1e-5)
    warm = [float((logits[t - 1] / 2).log_softmax(-1)[ids[t]]) for t in range(5, 30)]
    assert score(model, ids, 5, temperature=2.0) == pytest.approx(warm, abs=1e-5)


def test_a_token_outside_of_top_k_keeps_a_finite_logprob(
    make_policy: Callable[..., Policy],
) -> None:
    model = make_policy()._model
    ids = torch.randint(0, 600, (40,)).tolist()
    for limits in ({"top_k": 1}, {"top_p": 0.01}):
        values = score(model, ids, 1, **limits)
        assert all(-50 < value <= 0 for value in values)


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy()
    batch = samples(policy)
    metrics = policy.train(batch)
    assert policy.version == 1
    assert metrics["logprob_diff_max"] < 1e-4
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["staleness_max"] == 0
    for sample in batch:
        before = sum(sample.logprobs)
        after = sum(score(policy._model, sample.token_ids, 10))
        assert (after - before) * sample.advantage > 0


def test_the_update_does_not_depend_on_the_micro_batch(
    make_policy: Callable[..., Policy],
) -> None:
    weights = []
    for budget in (40, 10_000):
        policy = make_policy(micro_batch_tokens=budget, kl_coef=0.01)
        policy.train(samples(policy))
        weights.append(torch.cat([p.detach().flatten() for p in policy._model.parameters()]))
    # AdamW's first step divides a gradient by itself: only near-zero ones can differ visibly.
    assert (weights[0] - weights[1]).abs().mean() < 1e-5


def test_several_updates_a_step_count_versions_and_warm_up(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy(updates_per_step=4, warmup_steps=7)
    metrics = policy.train(samples(policy))
    assert policy.version == 4
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 5 / 8)
    assert metrics["logprob_diff_max"] < 1e-4  # measured before the first of them
    stale = policy.train(samples(policy))
    assert stale["staleness_max"] == 4


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    make_policy: Callable[..., Policy],
) -> None:
    policy = make_policy()
    before = {k: v.clone() for k, v in policy._model.state_dict().items()}
    (good, *_) = samples(policy, 1)
    bad = Sample(
        good.token_ids, good.response_mask, good.logprobs, good.weight_versions, float("inf")
    )
    metrics = policy.train([bad])
    assert (metrics["skipped_updates"], policy.version) == (1.0, 0)
    assert all(torch.equal(before[k], v) for k, v in policy._model.state_dict().items())


def test_a_checkpoint_appears_whole_and_loads_in_transformers(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    policy = make_policy()
    policy.train(samples(policy))
    policy.save(tmp_path / "step-1")
    policy.save(tmp_path / "step-1")  # again, over the first
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-1")
    ids = tokenizer.encode("The answer is 7.")
    assert score(model.eval(), ids, 1) == pytest.approx(score(policy._model, ids, 1), abs=1e-6)
    assert tokenizer.chat_template


def test_small_steps_are_not_lost_to_bfloat16(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    model = make_config().model.model_copy(update={"dtype": "bfloat16"})
    config = make_config(model=model, training={"learning_rate": 1e-6, "threads": 2})
    policy = Policy(config)
    before = [p.detach().clone() for p in policy._model.parameters()]
    metrics = policy.train(samples(policy))
    moved = [
        (p.detach() != b).float().mean().item()
        for p, b in zip(policy._model.parameters(), before, strict=True)
    ]
    assert min(moved[1:]) > 0.5
    assert metrics["logprob_diff_max"] < 0.5
    manifest, _, _ = policy.publish()
    assert {tensor["dtype"] for tensor in manifest["tensors"]} == {"bfloat16"}
    policy.save(tmp_path / "half")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert saved.dtype == torch.bfloat16
    assert policy._model.dtype == torch.float32


def test_a_model_that_is_not_there_is_named(make_config: Callable[..., Config]) -> None:
    config = make_config(model={"path": "/nowhere"})
    with pytest.raises(InputError, match="the model /nowhere cannot be loaded"):
        Policy(config)
