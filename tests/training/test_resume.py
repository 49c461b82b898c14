"""What a resumed trainer takes from its checkpoint, and what from its configuration."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer

from tests.training.test_rank import (
    make_policy,
    model_of,
    rewarded_at_the_end,
    samples_for,
    train,
    weights,
)
from turnwise.config import TrainingConfig
from turnwise.errors import InputError, TurnwiseError
from turnwise.training import checkpoint
from turnwise.training.optimizer import TrainableModule, decay_groups
from turnwise.training.rank import TrainerRank

__all__ = ["make_policy"]

MakePolicy = Callable[..., TrainerRank]


def saved(policy: TrainerRank, folder: Path) -> Path:
    policy.save(checkpoint.begin(folder))
    checkpoint.commit(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"learning_rate": 1e-5}, 1e-5),
        ({"learning_rate": 1e-5, "weight_decay": 0.1}, 1e-5),
        ({"learning_rate": 1e-5, "lr_schedule": "linear", "steps": 100}, 0.99e-5),
        ({"learning_rate": 1e-5, "warmup_steps": 3}, 0.5e-5),
    ],
)
def test_resuming_keeps_the_position_and_takes_new_rates(
    make_policy: MakePolicy, tmp_path: Path, changes: dict[str, Any], rate: float
) -> None:
    one = make_policy(learning_rate=1e-3, steps=10)
    batch = samples_for(model_of(one))
    train(one, batch)
    folder = saved(one, tmp_path / "step-0001")
    two = make_policy(**changes)
    assert two.load(folder) == 1
    decays = {group["weight_decay"] for group in two._learners["policy"].optimizer.param_groups}
    assert decays == {0.0, changes.get("weight_decay", 0.0)}
    for mine, theirs in zip(moments(one), moments(two), strict=True):
        assert torch.equal(mine, theirs)
    assert train(two, batch)["learning_rate"] == pytest.approx(rate)


def moments(policy: TrainerRank) -> list[torch.Tensor]:
    parameters = policy._learners["policy"].module.parameters()
    states = [policy._learners["policy"].optimizer.state[parameter] for parameter in parameters]
    return [state[key] for state in states for key in ("step", "exp_avg", "exp_avg_sq")]


def test_the_value_models_rate_is_the_configurations_too(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    def gae(rate: float) -> dict[str, Any]:
        return {"advantage": {"name": "gae", "learning_rate": rate}}

    one = make_policy(gae(1e-3))
    train(one, rewarded_at_the_end(samples_for(model_of(one))))
    two = make_policy(gae(1e-4))
    two.load(saved(one, tmp_path / "step-0001"))
    assert two._learners["critic"].rate == 1e-4
    assert two._learners["critic"].updates == 1


def test_a_value_model_missing_in_the_checkpoint_is_refused(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    folder = saved(make_policy(), tmp_path / "step-0001")
    with pytest.raises(InputError, match=r"algorithm\.advantage\.name cannot change to one with a"):
        make_policy({"advantage": {"name": "gae"}}).load(folder)


@pytest.mark.parametrize("warmup", [0, 2])
def test_saving_before_the_first_policy_update_changes_nothing(
    make_policy: MakePolicy, tmp_path: Path, warmup: int
) -> None:
    algorithm = {"advantage": {"name": "gae", "warmup_steps": warmup}} if warmup else {}
    after = []
    for saves in (False, True):
        policy = make_policy(algorithm)
        batch = rewarded_at_the_end(samples_for(model_of(policy)))
        for step in range(warmup):
            train(policy, batch)
            if saves:
                saved(policy, tmp_path / f"step-{step}")
        if saves:
            folder = saved(policy, tmp_path / "last")
            policy = make_policy(algorithm)
            policy.load(folder)
        train(policy, batch)
        after.append(weights(policy))
    assert torch.equal(*after)


def test_gradients_of_a_step_that_failed_do_not_reach_the_next(make_policy: MakePolicy) -> None:
    alone, after = make_policy(micro_batch_tokens=64), make_policy(micro_batch_tokens=64)
    first, second = samples_for(model_of(alone), 4), samples_for(model_of(alone), 8)[4:]
    computed = after._gradients._add_policy_gradient
    calls = iter(range(100))

    def fails_once(*arguments: Any) -> None:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        computed(*arguments)

    after._gradients._add_policy_gradient = fails_once  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        train(after, first)
    assert any(p.grad is not None for p in after._scorer.parameters())
    assert (after._steps, after.version) == (0, 0)
    norms = [train(policy, second)["grad_norm"] for policy in (alone, after)]
    assert norms[0] == norms[1]
    assert torch.equal(weights(alone), weights(after))


def test_a_linear_schedule_counts_only_policy_steps(
    make_policy: MakePolicy,
) -> None:
    algorithm = {"advantage": {"name": "gae", "warmup_steps": 2}}
    policy = make_policy(algorithm, steps=6, lr_schedule="linear", learning_rate=1.0)
    batch = rewarded_at_the_end(samples_for(model_of(policy), 2))
    rates = [train(policy, batch)["learning_rate"] for _ in range(6)]
    assert rates == [0, 0, 1, 0.75, 0.5, 0.25]


def test_steps_beyond_a_linear_schedule_keep_its_last_rate() -> None:
    training = TrainingConfig(lr_schedule="linear", warmup_steps=1)
    module = torch.nn.Linear(2, 2)
    learner = TrainableModule(module, training, 1.0, 4)
    rates = []
    for _ in range(7):
        rates.append(learner.rate)
        module(torch.ones(2)).sum().backward()
        learner.step()
    assert rates == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3])


def test_a_cosine_schedule_falls_half_a_wave_after_warm_up() -> None:
    training = TrainingConfig(lr_schedule="cosine", warmup_steps=1)
    module = torch.nn.Linear(2, 2)
    learner = TrainableModule(module, training, 1.0, 5)
    rates = []
    for _ in range(7):
        rates.append(learner.rate)
        module(torch.ones(2)).sum().backward()
        learner.step()
    wave = [(1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 3, 3)]
    assert rates == pytest.approx([0.5, 1.0, *wave])


def test_a_value_model_without_a_finite_gradient_ends_the_run(make_policy: MakePolicy) -> None:
    policy = make_policy({"advantage": {"name": "gae", "warmup_steps": 10}})
    (good, *_) = samples_for(model_of(policy), 1)
    bad = replace(good, advantages_T=np.full_like(good.advantages_T, np.nan))
    for _ in range(2):
        assert train(policy, [bad])["skipped_updates"] == 1.0
    with pytest.raises(TurnwiseError, match=r"gradient of the critic; .*advantage\.learning_rate"):
        train(policy, [bad])


@pytest.mark.parametrize("bias", [False, True])
def test_norms_and_biases_do_not_decay_as_in_transformers(
    make_policy: MakePolicy, tmp_path: Path, bias: bool
) -> None:
    model: Any = model_of(make_policy())
    if bias:  # LayerNorm under names without "norm", and biases
        model = AutoModelForCausalLM.from_config(
            GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2)
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, spared = decay_groups(model, 0.1)
    ours = {names[id(p)] for p in decaying["params"]}  # type: ignore[attr-defined]
    assert spared["weight_decay"] == 0.0
    theirs = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert ours == set(theirs) & set(names.values())


def test_a_checkpoint_of_the_first_version_can_be_resumed(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    one = make_policy(steps=10)
    batch = samples_for(model_of(one))
    train(one, batch)
    folder = saved(one, tmp_path / "step-0001")
    place = folder / "state" / "rank-0.pt"
    state = torch.load(place)
    state |= {"schedules": {"policy": {"last_epoch": 1}}, "skipped_in_row": 0}
    del state["updates"]
    torch.save(state, place)
    listing = folder / "state" / "files.json"
    listing.write_text(
        json.dumps(json.loads(listing.read_text()) | {"state/rank-0.pt": place.stat().st_size})
    )
    two = make_policy(steps=10)
    two.load(folder)
    train(one, batch)
    train(two, batch)
    assert torch.equal(weights(one), weights(two))
    assert two._learners["policy"].updates == 2
