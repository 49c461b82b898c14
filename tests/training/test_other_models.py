"""Reference and value models with paths and precisions of their own, beside the policy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.models import make_reward_model, perturbed
from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.training import Sample
from turnwise.training.batching import Layout, plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.training.reports import RECORDED, merge

Make = Callable[..., TrainerRank]
START = 7


@pytest.fixture(scope="module")
def reference_path(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return perturbed(model_path, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def reward_path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tokenizer, tmp_path_factory.mktemp("reward"))


@pytest.fixture
def make_policy(make_config: Callable[..., Config]) -> Make:
    def make(algorithm: dict[str, Any]) -> TrainerRank:
        return TrainerRank(make_config(training={"threads": 1}, algorithm=algorithm))

    return make


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, 600, (length,), generator=generator).tolist() for length in (20, 31, 12)
    ]


def scored(policy: TrainerRank, name: Any, layout: Layout = "padded") -> list[list[float]]:
    """The values after START of each sequence, in order."""
    masks = [[0] * START + [1] * (len(ids) - START) for ids in sequences()]
    samples = [
        Sample.of(ids, mask, [0.0] * len(ids), [-1] * len(ids), 0.0, number)
        for number, (ids, mask) in enumerate(zip(sequences(), masks, strict=True))
    ]
    (share,) = plan_micro_batches(samples, 1, 1, 64, layout)[0]
    return [values for _, values in sorted(policy.forward(name, share))]


def differences(ours: list[list[float]], theirs: list[list[float]]) -> torch.Tensor:
    flat = [[value for values in each for value in values] for each in (ours, theirs)]
    return torch.tensor(flat[1]) - torch.tensor(flat[0])


def direct_logprobs(path: str, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """Values of Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    made = []
    for ids in sequences():
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(torch.tensor([ids])).logits[0].float()
        logprobs = logits.log_softmax(-1)
        made.append([float(logprobs[t - 1, ids[t]]) for t in range(START, len(ids))])
    return made


def close(ours: list[list[float]], theirs: list[list[float]], within: float = 1e-4) -> bool:
    return len(ours) == len(theirs) and all(
        a == pytest.approx(b, abs=within) for a, b in zip(ours, theirs, strict=True)
    )


def test_the_reference_may_be_another_model(
    make_policy: Make, model_path: str, reference_path: str
) -> None:
    policy = make_policy({"kl": {"coef": 0.1, "model": {"path": reference_path}}})
    assert close(scored(policy, "policy"), direct_logprobs(model_path))
    assert close(scored(policy, "reference"), direct_logprobs(reference_path))
    assert not close(direct_logprobs(model_path), direct_logprobs(reference_path), 1e-2)


def test_the_reference_may_have_a_precision_of_its_own(
    make_policy: Make, model_path: str, reference_path: str
) -> None:
    path = {"path": reference_path, "dtype": "bfloat16"}
    policy = make_policy({"kl": {"model": path}})  # kept because its path is set
    ours, exact = scored(policy, "reference"), direct_logprobs(reference_path)
    assert close(ours, direct_logprobs(reference_path, torch.bfloat16), 2e-2)
    assert not close(ours, exact, 1e-4)
    assert close(scored(policy, "policy"), direct_logprobs(model_path))


def test_a_teacher_takes_the_place_of_the_reference(
    make_policy: Make, model_path: str, reference_path: str
) -> None:
    policy = make_policy({"advantage": "none", "teacher": {"model": reference_path}})
    assert policy._models.reference is not None
    assert close(scored(policy, "policy"), direct_logprobs(model_path))
    with pytest.raises(InputError, match="there is no reference model"):
        scored(policy, "reference")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("weights", [(0.5, 0.0), (0.0, 0.5)], ids=["advantage", "loss"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_training_pulls_the_policy_to_its_teacher(
    make_policy: Make,
    reference_path: str,
    layout: Layout,
    weights: tuple[float, float],
    inside: bool,
) -> None:
    """In any layout, wherever the teacher is; the recorded advantages have the teacher's part."""
    teacher = {"model": reference_path, "engines": int(not inside)}
    policy = make_policy({"advantage": "none", "teacher": teacher})
    own, theirs = scored(policy, "policy", layout), direct_logprobs(reference_path)
    masks = [[0] * START + [1] * (len(ids) - START) for ids in sequences()]
    zeros = [0.0] * START
    samples = [
        Sample.of(
            *(ids, mask, [*zeros, *p], [0] * len(ids), 0.0, number),
            streams={} if inside else {"teacher": np.array([*zeros, *q], np.float32)},
            teacher_weights=weights,
        )
        for number, (ids, mask, p, q) in enumerate(
            zip(sequences(), masks, own, theirs, strict=True)
        )
    ]
    report = policy.train(plan_micro_batches(samples, 1, 1, 64, layout)[0])
    before, after = differences(own, theirs), differences(scored(policy, "policy", layout), theirs)
    recorded = report.tokens_KN[RECORDED.index("advantage")].tolist()
    assert sorted(recorded) == pytest.approx(sorted((weights[0] * before).tolist()), abs=1e-4)
    assert after.square().mean() < before.square().mean()
    assert merge([report])["teacher_kl"] == pytest.approx(-float(before.mean()), abs=1e-4)


def test_a_value_model_starts_from_a_reward_model_with_its_head(
    make_policy: Make, reward_path: str
) -> None:
    policy = make_policy({"advantage": {"name": "gae", "model": {"path": reward_path}}})
    model = AutoModelForSequenceClassification.from_pretrained(reward_path).eval()
    expected = []
    for ids in sequences():
        with torch.no_grad():
            hidden_TH = model.base_model(torch.tensor([ids])).last_hidden_state[0]
            values_T = model.score(hidden_TH)[:, 0]
            # At the last token the value is what the reward model says of the sequence.
            whole = model(torch.tensor([ids])).logits[0, 0]
        assert float(values_T[-1]) == pytest.approx(float(whole), abs=1e-5)
        expected.append(values_T[START - 1 : -1].tolist())
    assert close(scored(policy, "value"), expected)
    assert any(abs(value) > 1e-3 for values in expected for value in values)


def test_a_value_model_that_starts_from_a_language_model_says_0(
    make_policy: Make, reference_path: str
) -> None:
    policy = make_policy({"advantage": {"name": "gae", "model": {"path": reference_path}}})
    assert {value for values in scored(policy, "value") for value in values} == {0.0}


def test_a_model_that_is_not_kept_says_how_to_have_it(make_policy: Make) -> None:
    policy = make_policy({})
    with pytest.raises(InputError, match=r"no reference model: set algorithm\.kl\.coef"):
        scored(policy, "reference")
    with pytest.raises(InputError, match=r"no value model: set algorithm\.advantage\.name to gae"):
        scored(policy, "value")


def test_what_cannot_stand_beside_the_policy_is_refused(
    make_policy: Make, tokenizer: Any, tmp_path: Path
) -> None:
    small = make_reward_model(tokenizer, tmp_path / "small", vocabulary=50)
    with pytest.raises(InputError, match=r"algorithm\.advantage\.model: .*vocabulary of 50 tokens"):
        make_policy({"advantage": {"name": "gae", "model": {"path": small}}})
    with pytest.raises(InputError, match=r"the model \S+nowhere cannot be loaded"):
        make_policy({"kl": {"model": {"path": str(tmp_path / "nowhere")}}})
    several = make_reward_model(tokenizer, tmp_path / "several", outputs=3)
    with pytest.raises(InputError, match="has 3 outputs; a value model starts from"):
        make_policy({"advantage": {"name": "gae", "model": {"path": several}}})
