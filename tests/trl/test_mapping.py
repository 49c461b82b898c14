"""Fields of TRL's `GRPOConfig` become our configuration, or are refused by name."""

import dataclasses
from typing import Any

import pytest
import torch
import trl
from transformers import get_scheduler

from turnwise.compat.trl.config import MAPPED, WITHOUT_EFFECT, settings
from turnwise.config import Config, make_config
from turnwise.errors import InputError
from turnwise.training.algorithms import Tokens, make_loss
from turnwise.training.optimizer import TrainableModule
from turnwise.trl import GRPOConfig


def plain(value: object) -> object:
    """Return an enumeration's text."""
    return str(getattr(value, "value", value)) if isinstance(value, str) else value


def defaults(kind: Any) -> dict[str, object]:
    missing = dataclasses.MISSING
    return {
        item.name: plain(item.default if item.default is not missing else item.default_factory())
        for item in dataclasses.fields(kind)
    }


def config_of(rows: int | None = 100, tools: bool = False, **given: Any) -> Config:
    values = settings(GRPOConfig(**given), rows, tools=tools)
    optional = ["environment", "data.path"]
    return make_config({}, settings=values | {"model.path": "m"}, optional=optional)


def test_the_fields_and_their_defaults_are_those_of_trl() -> None:
    ours = defaults(GRPOConfig)
    assert ours.pop("turnwise") == {}
    assert ours == defaults(trl.GRPOConfig)


def test_every_field_is_mapped_or_without_effect_or_refused() -> None:
    names = {item.name for item in dataclasses.fields(GRPOConfig)}
    assert names >= MAPPED
    assert names >= WITHOUT_EFFECT.keys()
    assert not MAPPED & WITHOUT_EFFECT.keys()
    refused = names - MAPPED - WITHOUT_EFFECT.keys()
    assert len(refused) > 40
    for name in refused:
        with pytest.raises(InputError, match=rf"^GRPOConfig\.{name}='odd' is not supported: "):
            settings(GRPOConfig(**{name: "odd"}), 100, tools=False)  # type: ignore[arg-type]


def test_the_defaults_make_a_configuration() -> None:
    config = config_of()
    assert (config.sampling.n, config.sampling.max_tokens) == (8, 512)
    assert config.rollout.prompts_per_step == 1
    assert config.training.steps == 300  # three epochs
    assert config.training.learning_rate == 1e-6
    assert config.training.lr_schedule == "linear"
    assert config.algorithm.loss.name == "ppo_clip"
    assert config.algorithm.loss.model_dump()["clip_high"] == 0.2
    assert config.algorithm.reduction == "token_mean"
    assert (config.algorithm.advantage.name, config.algorithm.kl.coef) == ("grpo", 0.0)
    assert config.algorithm.correction.name == "none"
    assert (config.training.checkpoint_every, config.eval.every) == (500, 0)
    assert config.seed == 42
    assert config.training.colocated is False


@pytest.mark.parametrize(
    ("given", "groups", "updates", "steps"),
    [
        ({}, 1, 1, 300),
        ({"per_device_train_batch_size": 16, "num_generations": 4}, 4, 1, 75),
        ({"gradient_accumulation_steps": 4}, 4, 1, 75),
        ({"steps_per_generation": 4}, 4, 4, 75),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, 4, 1, 75),
        ({"generation_batch_size": 32, "gradient_accumulation_steps": 2}, 4, 2, 75),
        ({"max_steps": 6, "steps_per_generation": 2}, 2, 2, 3),
        ({"num_train_epochs": 0.5}, 1, 1, 50),
    ],
)
def test_batch_sizes_and_steps(
    given: dict[str, Any], groups: int, updates: int, steps: int
) -> None:
    config = config_of(**given)
    assert config.rollout.prompts_per_step == groups
    assert config.training.updates_per_step == updates
    assert config.training.steps == steps


def test_values_of_all_kinds_are_carried_over() -> None:
    config = config_of(
        temperature=0.7, top_p=0.9, top_k=5, max_completion_length=64, num_generations_eval=2,
        generation_kwargs={"stop": ["END"]}, chat_template_kwargs={"enable_thinking": False},
        beta=0.04, use_bias_correction_kl=False, epsilon=0.1, epsilon_high=0.3, delta=1.5,
        loss_type="grpo", scale_rewards=False, weight_decay=0.1, max_grad_norm=0.5, bf16=True,
        warmup_steps=0.1, max_steps=40, lr_scheduler_type="constant_with_warmup",
        save_steps=10, save_total_limit=3, eval_strategy="steps", eval_steps=5,
        gradient_checkpointing=False, report_to=["wandb", "tensorboard"], seed=1,
        turnwise={"engine.kv_cache_gib": 0.25, "sampling.top_k": 6},
    )  # fmt: skip
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 6)
    assert (sampling.max_tokens, sampling.stop) == (64, ["END"])
    assert (config.eval.sampling.n, config.eval.sampling.temperature) == (2, 0.7)
    assert config.model.template_args == {"enable_thinking": False}
    assert config.model.dtype == "bfloat16"
    assert (config.algorithm.kl.coef, config.algorithm.kl.importance_weight) == (0.04, False)
    assert config.algorithm.loss.model_dump() == {
        "name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5,
    }  # fmt: skip
    assert config.algorithm.reduction == "sequence_mean"
    assert config.algorithm.advantage.name == "dr_grpo"
    training = config.training
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 0.5)
    assert (training.warmup_steps, training.lr_schedule) == (4, "constant")
    assert (training.checkpoint_every, training.keep_last) == (10, 3)
    assert (config.eval.every, training.activation_checkpointing) == (5, False)
    assert (config.trackers, config.seed, config.engine.kv_cache_gib) == (["wandb"], 1, 0.25)


def test_the_attention_of_the_model_is_that_of_the_trainer() -> None:
    for name, expected in (("sdpa", "auto"), ("flash_attention_2", "flash_attention_2")):
        config = config_of(model_init_kwargs={"attn_implementation": name, "dtype": "bfloat16"})
        assert (config.training.attention, config.model.dtype) == (expected, "bfloat16")
    assert config_of().training.attention == "auto"


@pytest.mark.parametrize(
    ("given", "loss", "reduction"),
    [
        ({"loss_type": "bnpo"}, {"name": "ppo_clip", "clip_high": 0.2}, "token_mean"),
        ({"loss_type": "dr_grpo"}, {"name": "ppo_clip"}, "constant"),
        ({"loss_type": "sapo"}, {"name": "sapo", "temperature_neg": 1.05}, "sequence_mean"),
        (
            {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
            {"name": "sapo", "temperature_pos": 2.0, "temperature_neg": 3.0, "level": "token"},
            "sequence_mean",
        ),
        ({"loss_type": "luspo"}, {"name": "ppo_clip"}, "sequence_sum"),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            {"name": "gspo", "clip_low": 0.2},
            "sequence_sum",
        ),
        (
            {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0},
            {"name": "vespo", "k_pos": 1, "lambda_pos": 3, "k_neg": 3, "lambda_neg": 4},
            "token_mean",
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"name": "cispo", "clip_low": 1, "clip_high": 4, "level": "token"},
            "token_mean",
        ),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence"},
            {"name": "cispo", "clip_high": pytest.approx(-0.8), "level": "sequence"},
            "token_mean",
        ),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
            {"name": "gspo", "clip_low": 3e-4, "dual_clip": None},
            "sequence_mean",
        ),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "delta": 1.5},
            {"name": "gspo", "dual_clip": 1.5},
            "sequence_mean",
        ),
    ],
)
def test_every_loss_type(given: dict[str, Any], loss: dict[str, Any], reduction: str) -> None:
    algorithm = config_of(**given).algorithm
    dumped = algorithm.loss.model_dump()
    assert {key: dumped[key] for key in loss} == loss
    assert algorithm.reduction == reduction


def test_what_a_combination_means_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    level = {"importance_sampling_level": "sequence"}
    for name in ("bnpo", "dr_grpo", "dapo", "cispo"):
        caplog.clear()
        config_of(loss_type=name, **level)
        assert "weights each sequence by its completion length" in caplog.text
    caplog.clear()
    config_of(loss_type="grpo", **level)
    assert caplog.text == ""
    config_of(loss_type="bnpo", gradient_accumulation_steps=2)
    assert "loss_type='bnpo' is the mean over the tokens of the whole update" in caplog.text


@pytest.mark.parametrize(
    ("given", "samples", "updates", "epochs"),
    [
        ({"num_iterations": 2}, 8, 1, 2),
        ({"num_iterations": 2, "steps_per_generation": 4}, 32, 4, 2),
        ({"num_iterations": 2, "gradient_accumulation_steps": 2}, 16, 1, 2),
        # The same batch twice in one update is the batch once.
        (
            {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            *(8, 1, 1),
        ),
        (
            {"num_iterations": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            *(8, 1, 2),
        ),
        (
            {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 4},
            *(16, 1, 1),
        ),
    ],
)
def test_iterations_are_passes_over_a_batch(
    given: dict[str, Any], samples: int, updates: int, epochs: int
) -> None:
    config = config_of(**given)
    training = config.training
    assert config.rollout.prompts_per_step * config.sampling.n == samples
    assert (training.updates_per_step, training.epochs_per_step) == (updates, epochs)
    counted = config_of(**given, max_steps=2 * updates * epochs, warmup_steps=0.5).training
    assert (counted.steps, counted.warmup_steps) == (2, updates * epochs)


def test_entropy_masks_and_the_reference_model() -> None:
    config = config_of(
        beta=0.1, sync_ref_model=True, ref_model_sync_steps=4, ref_model_mixup_alpha=0.3,
        entropy_coef=0.01, use_adaptive_entropy=True, entropy_target=2.0, entropy_coef_min=0.001,
        entropy_coef_max=0.5, entropy_coef_delta=0.002, top_entropy_quantile=0.2,
        off_policy_mask_threshold=0.5, mask_truncated_completions=True, min_p=0.1,
    )  # fmt: skip
    algorithm = config.algorithm
    assert (algorithm.kl.sync_steps, algorithm.kl.mixup_alpha) == (4, 0.3)
    assert algorithm.entropy.model_dump() == {
        "coef": 0.01, "adaptive": True, "target": 2.0, "coef_delta": 0.002, "coef_min": 0.001,
        "coef_max": 0.5, "top_quantile": 0.2,
    }  # fmt: skip
    assert (algorithm.off_policy_mask_threshold, algorithm.mask_truncated) == (0.5, True)
    assert (config.sampling.min_p, config.eval.sampling.min_p) == (0.1, 0.1)
    plain = config_of().algorithm
    assert not plain.entropy.has_bonus
    assert (plain.kl.sync_steps, plain.entropy.top_quantile) == (0, 1.0)


@pytest.mark.parametrize(
    ("given", "advantage"),
    [
        ({"scale_rewards": "batch"}, {"name": "grpo", "scale": "batch"}),
        ({"scale_rewards": True}, {"name": "grpo", "scale": "group"}),
        ({"scale_rewards": "none"}, {"name": "dr_grpo"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"name": "gdpo"}),
    ],
)
def test_scaling_and_aggregation_of_rewards(
    given: dict[str, Any], advantage: dict[str, Any]
) -> None:
    assert config_of(**given).algorithm.advantage.model_dump() == advantage


def test_generation_kwargs_of_transformers_and_of_vllm() -> None:
    given = {"do_sample": True, "num_beams": 1, "repetition_penalty": 1.0, "detokenize": False,
             "max_new_tokens": 7, "min_p": 0.2, "ignore_eos": True, "seed": None}  # fmt: skip
    sampling = config_of(generation_kwargs=given).sampling
    assert (sampling.max_tokens, sampling.min_p, sampling.ignore_eos) == (7, 0.2, True)


def test_corrections() -> None:
    vllm = {"use_vllm": True, "vllm_tensor_parallel_size": 2}
    config = config_of(**vllm, vllm_gpu_memory_utilization=0.5)
    assert (config.training.colocated, config.training.ranks) == (True, 2)
    assert config.engine.vllm_args == {"gpu_memory_utilization": 0.5}
    assert config.algorithm.correction.name == "none"
    config = config_of(**vllm, vllm_importance_sampling_mode="token_truncate")
    correction = config.algorithm.correction
    assert (correction.name, correction.high) == ("token_tis", 3.0)
    for mode in ("token_mask", "sequence_mask"):
        bounds = {"vllm_importance_sampling_clip_min": 0.25}
        correction = config_of(
            **vllm, **bounds, vllm_importance_sampling_mode=mode
        ).algorithm.correction
        assert (correction.name, correction.low, correction.high) == (mode, 0.25, 3.0)
    correction = config_of(**vllm, vllm_importance_sampling_clip_max=None).algorithm.correction
    assert correction.name == "sequence_mask"
    assert correction.low * 1e6 < 1 < correction.high / 1e6


def test_the_constant_of_dr_grpo_is_that_of_trl() -> None:
    config = config_of(loss_type="dr_grpo", max_completion_length=256)
    assert config.sampling.max_tokens * config.rollout.max_turns == 256
    tools = config_of(loss_type="dr_grpo", max_completion_length=256, tools=True)
    assert tools.rollout.max_response_tokens == 256


@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("delta", [4.0, 1.28, 1.2, 1.1, 1.0001])
def test_delta_bounds_the_ratio_where_trl_does(delta: float, high: float | None) -> None:
    """Against the lines of TRL's `_compute_loss`, at ratios on both sides of every bound."""
    section = config_of(delta=delta, epsilon_high=high).algorithm.loss
    ratio = torch.tensor([0.1, 0.79, 0.81, 1.0, 1.05, 1.15, 1.23, 1.3, 3.9, 4.1] * 2)
    advantage = torch.tensor([1.0] * 10 + [-1.5] * 10)
    ours, theirs = (ratio.log().requires_grad_() for _ in range(2))
    zeros = torch.zeros(20)
    tokens = Tokens(
        ours, zeros, zeros, advantage, zeros.long(), 1, torch.full((20,), 20.0), zeros.long()
    )
    loss = make_loss(section)(tokens).loss_N  # type: ignore[arg-type]
    second = theirs.exp().clamp(0.8, 1 + (0.2 if high is None else high))
    expected = -torch.min(theirs.exp().clamp(max=delta) * advantage, second * advantage)
    assert torch.allclose(loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), ours)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), theirs)
    assert torch.allclose(gradient, expected_gradient)


@pytest.mark.parametrize(("name", "steps"), [("constant", 0), ("constant_with_warmup", 5)])
def test_a_schedule_warms_up_where_that_of_transformers_does(name: str, steps: int) -> None:
    training = config_of(lr_scheduler_type=name, warmup_steps=5).training
    assert (training.warmup_steps, training.lr_schedule) == (steps, "constant")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=5, num_training_steps=10)
    assert (schedule.get_last_lr() == [1.0]) is (steps == 0)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_schedule_decays_as_that_of_transformers_does(name: str) -> None:
    training = config_of(lr_scheduler_type=name, max_steps=10).training
    assert training.lr_schedule == name
    module = torch.nn.Linear(1, 1)
    learner = TrainableModule(module, training, 1.0, 10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=10)
    for _ in range(10):
        assert learner.rate == pytest.approx(schedule.get_last_lr()[0])
        module(torch.ones(1)).sum().backward()
        learner.step()
        schedule.step()


def test_8_bit_moments_have_their_name_in_transformers() -> None:
    assert config_of(optim="adamw_torch_8bit").training.optimizer == "adamw_8bit"
    assert config_of().training.optimizer == "adamw"


def test_tools_bound_the_trajectory() -> None:
    config = config_of(tools=True, max_completion_length=100, max_tool_calling_iterations=3)
    assert (config.rollout.max_turns, config.rollout.max_response_tokens) == (4, 100)
    assert config_of(tools=True).rollout.max_turns > 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_iterations": 3, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
            r"num_iterations=3 .*the 2 batches of an update",
        ),
        ({"sync_ref_model": True}, r"sync_ref_model=True .*no reference model to synchronize"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1 .*distribution without it"),
        ({"vllm_mode": "server"}, r"vllm_mode='server' .*starts its own engines"),
        ({"loss_type": "grpo2"}, r"loss_type='grpo2' .*must be one of dapo, bnpo"),
        ({"loss_type": "cispo", "epsilon_high": 0.0}, r"epsilon_high=0\.0 .*bound of cispo's"),
        ({"scale_rewards": "turn"}, r"scale_rewards='turn' .*group, batch or none"),
        ({"multi_objective_aggregation": "x"}, r"multi_objective_aggregation='x' .*sum_then"),
        ({"lr_scheduler_type": "polynomial"}, r"lr_scheduler_type='polynomial'"),
        ({"optim": "adafactor"}, r"optim='adafactor' .*AdamW"),
        ({"num_generations": 1}, r"num_generations=1 .*at least 2"),
        ({"num_generations": 3}, r"num_generations=3 .*8 completions"),
        ({"max_steps": 3, "steps_per_generation": 2}, r"max_steps=3 .*2 optimizer steps"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation=3"),
        ({"generation_batch_size": 12}, r"generation_batch_size=12 .*not divisible"),
        (
            {"generation_kwargs": {"num_beams": 2}},
            r"generation_kwargs=\{'num_beams': 2\} .*no such distribution; only 1 is possible",
        ),
        ({"generation_kwargs": {"typical_p": 0.1}}, r"generation_kwargs=.*it takes ignore_eos"),
        ({"model_init_kwargs": {"dtype": "float16"}}, r"model_init_kwargs=.*float32 or bfloat16"),
        ({"model_init_kwargs": {"revision": "x"}}, r"model_init_kwargs=\{'revision': 'x'\}"),
        ({"report_to": "comet_ml"}, r"report_to='comet_ml'"),
        ({"save_strategy": "best"}, r"save_strategy='best'"),
        ({"importance_sampling_level": "turn"}, r"importance_sampling_level='turn'"),
        (
            {"importance_sampling_level": "turn", "loss_type": "cispo", "epsilon_high": 5.0},
            r"importance_sampling_level='turn' .*token or sequence",
        ),
        ({"delta": 1.0}, r"delta=1\.0 .*above 1"),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "mask"},
            r"vllm_importance_sampling_mode='mask' .*one of token_truncate",
        ),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_min": 0.5,
            },
            r"vllm_importance_sampling_clip_min=0\.5 .*only clip_max bounds",
        ),
        ({"per_device_train_batch_size": 1024}, "train_dataset has 100 rows, .*needs 128"),
    ],
)
def test_a_value_without_an_equal_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_of(**given)


def test_fields_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config_of(logging_steps=1, run_name="x", adam_beta2=0.95)
    assert "without effect in Turnwise: logging_steps, run_name" in caplog.text
    config_of(vllm_tensor_parallel_size=2)
    assert "without effect in Turnwise: vllm_tensor_parallel_size" in caplog.text
    caplog.clear()
    config_of(lr_scheduler_type="constant", warmup_steps=5)
    assert "without effect in Turnwise: warmup_steps" in caplog.text
    config_of(loss_type="cispo", epsilon_high=5.0, delta=1.5)
    assert "without effect in Turnwise: delta" in caplog.text
    config_of(use_liger_kernel=True, cast_lm_head_to_fp32=True, ref_model_sync_steps=2)
    assert "ref_model_sync_steps" in caplog.text
    assert "use_liger_kernel, cast_lm_head_to_fp32" in caplog.text


def test_the_models_arguments_in_trls_own_scripts_are_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"revision": "main", "trust_remote_code": True, "device_map": "auto", "dtype": "auto"}
    config = config_of(model_init_kwargs=given, generation_kwargs={"do_sample": True})
    assert config.model.trust_remote_code
    assert "model_init_kwargs: without effect in Turnwise: device_map" in caplog.text
    assert config_of(trust_remote_code=True, model_init_kwargs=given).model.trust_remote_code


def test_none_means_no_token_limit_as_in_trl() -> None:
    for given in (
        {"max_completion_length": None},
        {"max_completion_length": 64, "generation_kwargs": {"max_tokens": None}},
        {"max_completion_length": 64, "generation_kwargs": {"max_new_tokens": None, "top_p": None}},
    ):
        config = config_of(**given)
        room = config.sampling.within(30_000).max_tokens, config.eval.sampling.max_tokens
        assert room == (30_000, config.sampling.max_tokens)
        assert config.sampling.top_p == 1.0
    with pytest.raises(InputError, match=r"max_completion_length=None .*dr_grpo divides by it"):
        config_of(max_completion_length=None, loss_type="dr_grpo")
