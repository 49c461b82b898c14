"""Our configuration from the fields of TRL's `GRPOConfig`.

Every field is either mapped here, or is in `WITHOUT_EFFECT`, or is refused unless it has TRL's
default. Values that cannot be mapped raise an `InputError` that names the field.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import NoReturn

from turnwise.engine.protocol import dtype_name
from turnwise.errors import InputError
from turnwise.trl.config import GRPOConfig

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset({
    "average_tokens_across_devices", "accelerator_config", "batch_eval_metrics", "bf16_full_eval",
    "cache_implementation", "dataloader_drop_last", "dataloader_in_order",
    "dataloader_multiprocessing_context", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
    "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters",
    "ddp_static_graph", "ddp_timeout", "disable_dropout", "do_eval", "do_predict", "do_train",
    "ds3_gather_for_generation", "enable_jit_checkpoint", "eval_accumulation_steps",
    "eval_do_concat_batches", "eval_on_start", "eval_use_gather_object",
    "gradient_checkpointing_kwargs", "include_num_input_tokens_seen", "label_names",
    "length_column_name", "local_rank", "log_completions", "log_level", "log_level_replica",
    "log_multimodal", "log_on_each_node", "log_unique_prompts", "logging_first_step",
    "logging_nan_inf_filter", "logging_steps", "logging_strategy", "num_completions_to_print",
    "pad_to_multiple_of", "per_device_eval_batch_size", "prediction_loss_only", "project",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "remove_unused_columns", "run_name",
    "save_on_each_node", "save_only_model", "skip_memory_metrics", "tf32",
    "torch_empty_cache_steps", "transformers_continuous_batching_config", "use_cache", "use_cpu",
    "use_transformers_continuous_batching", "use_transformers_paged", "vllm_enable_sleep_mode",
})  # fmt: skip
"""Fields about TRL's own machinery, or about what Turnwise always does: it logs each step and each
trajectory, evaluates before the first step, disables dropout, and samples with vLLM."""

MAPPED = frozenset({
    "beta", "bf16", "chat_template_kwargs", "delta", "disable_tqdm", "epsilon", "epsilon_high",
    "eval_steps", "eval_strategy", "full_determinism", "generation_batch_size",
    "generation_kwargs", "gradient_accumulation_steps", "gradient_checkpointing",
    "importance_sampling_level", "learning_rate", "loss_type", "lr_scheduler_type",
    "max_completion_length", "max_grad_norm", "max_steps", "max_tool_calling_iterations",
    "model_init_kwargs", "num_generations", "num_generations_eval", "num_train_epochs", "optim",
    "output_dir", "per_device_train_batch_size", "report_to", "resume_from_checkpoint",
    "reward_weights", "save_steps", "save_strategy", "save_total_limit", "scale_rewards", "seed",
    "steps_per_generation", "temperature", "top_k", "top_p", "trust_remote_code", "turnwise",
    "use_bias_correction_kl", "use_vllm", "vllm_gpu_memory_utilization",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_max_model_length", "vllm_model_impl", "vllm_tensor_parallel_size", "warmup_steps",
    "weight_decay",
})  # fmt: skip
"""Fields that `settings` or the trainer reads."""

_ADAM_BETA2 = 0.95
"""Ours in any case; a field with this value is accepted too."""
_WHY = {
    "adam_beta2": f"AdamW's second beta is {_ADAM_BETA2}",
    "cast_lm_head_to_fp32": "the head has the precision of the model",
    "num_iterations": "a batch is trained on once; raise steps_per_generation for more updates",
    "shuffle_dataset": "rows are always shuffled, by the seed",
    "vllm_mode": "the run starts its own engines; remove the server",
}
_WITH_VLLM = {name for name in MAPPED if name.startswith("vllm_")} - {"vllm_max_model_length"}
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
_CONSTANT = "constant"
"""Name of the schedule that has no warm-up in Transformers, whatever `warmup_steps` says."""
_SCHEDULES = {"linear": "linear", _CONSTANT: "constant", "constant_with_warmup": "constant"}
_REDUCTIONS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}
_CORRECTIONS = {"token_truncate": "token_tis", "sequence_truncate": "sequence_tis"}
_SAMPLING = ("ignore_eos", "max_tokens", "min_tokens", "stop", "stop_token_ids")
_UNLIMITED = 1_000_000


def settings(args: GRPOConfig, rows: int | None, *, tools: bool) -> dict[str, object]:
    """Return values of our configuration by their keys.

    Args:
        rows: Rows of the training data; None if their number is unknown.
        tools: Whether the model has tools.

    Raises:
        InputError: naming a field that cannot be mapped.

    Example:
        >>> settings(GRPOConfig(num_generations=4, max_steps=10), None, tools=False)["sampling.n"]
        4
    """
    _refuse_unsupported(args)
    (n, groups), updates = _groups(args), updates_per_step(args)
    steps = _steps(args, rows)
    every = steps if rows is None else max(1, rows // groups)
    values: dict[str, object] = {
        "seed": args.seed,
        "deterministic": args.full_determinism,
        "trackers": _trackers(args.report_to),
        "model.trust_remote_code": args.trust_remote_code,
        "model.template_args": _dictionary(args, "chat_template_kwargs"),
        **_model(args),
        "rollout.prompts_per_step": groups,
        "training.steps": steps,
        "training.updates_per_step": updates,
        "training.learning_rate": args.learning_rate,
        "training.lr_schedule": _schedule(args),
        "training.warmup_steps": _warmup(args, steps * updates),
        "training.weight_decay": args.weight_decay,
        "training.max_grad_norm": args.max_grad_norm,
        "training.activation_checkpointing": args.gradient_checkpointing,
        "training.keep_last": args.save_total_limit or _UNLIMITED,
        "training.checkpoint_every": _interval(args, "save", updates, steps, every),
        "eval.every": _interval(args, "eval", updates, steps, every),
        **_sampling(args, n),
        **_engine(args),
        **_algorithm(args, tools=tools),
    }
    calls = args.max_tool_calling_iterations
    if not tools:
        values["rollout.max_turns"] = 1  # so dr_grpo's constant is that of one completion
    else:
        values["rollout.max_turns"] = _UNLIMITED if calls is None else calls + 1
        values["rollout.max_response_tokens"] = args.max_completion_length
    return values | args.turnwise


def updates_per_step(args: GRPOConfig) -> int:
    """Return the number of optimizer steps on each batch of completions."""
    return max(1, _per_generation(args) // args.gradient_accumulation_steps)


def _refuse_unsupported(args: GRPOConfig) -> None:
    """Raise for fields that cannot be honoured, and log those without effect."""
    unused, without = [], _unread(args)
    for item in fields(GRPOConfig):
        made = item.default_factory
        default = item.default if made is MISSING else made()
        value = getattr(args, item.name)
        if value == default:
            continue
        if item.name in MAPPED:
            if item.name in without:
                unused.append(item.name)
            continue
        if item.name == "adam_beta2" and value == _ADAM_BETA2:
            continue
        if item.name not in WITHOUT_EFFECT:
            why = _WHY.get(item.name, "Turnwise has nothing of the kind")
            _refuse(item.name, value, f"{why}; TRL's default is {default!r}")
        unused.append(item.name)
    if unused:
        logger.warning("GRPOConfig: without effect in Turnwise: %s", ", ".join(unused))


def _unread(args: GRPOConfig) -> set[str]:
    """Return the mapped fields that the values of others leave without effect, as in TRL."""
    unread = set() if args.use_vllm else set(_WITH_VLLM)
    if str(args.lr_scheduler_type) == _CONSTANT:
        unread.add("warmup_steps")
    if args.loss_type == "cispo":
        unread |= {"epsilon", "delta"}
    return unread


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOConfig.{name}={value!r} is not supported: {why}")


def _per_generation(args: GRPOConfig) -> int:
    """Return micro-batches per batch of completions; several such batches may make one update."""
    per_device, given = args.per_device_train_batch_size, args.steps_per_generation
    if args.generation_batch_size is not None:
        if given is not None:
            _refuse("steps_per_generation", given, "generation_batch_size is set too")
        if args.generation_batch_size % per_device:
            why = f"it is not divisible by per_device_train_batch_size {per_device}"
            _refuse("generation_batch_size", args.generation_batch_size, why)
        given = args.generation_batch_size // per_device
    accumulated = args.gradient_accumulation_steps
    batches = accumulated if given is None else given
    if max(batches, accumulated) % min(batches, accumulated):
        why = f"it must divide gradient_accumulation_steps {accumulated}, or be divisible by it"
        _refuse("steps_per_generation", batches, why)
    return max(batches, accumulated)


def _groups(args: GRPOConfig) -> tuple[int, int]:
    """Return trajectories per group, and groups per training step."""
    n = args.num_generations or 1
    samples = args.per_device_train_batch_size * _per_generation(args)
    if n < 2:
        _refuse("num_generations", n, "a group needs at least 2")
    if samples % n:
        why = f"a step has {samples} completions, which it does not divide"
        _refuse("num_generations", n, why)
    return n, samples // n


def _steps(args: GRPOConfig, rows: int | None) -> int:
    updates = updates_per_step(args)
    if args.max_steps > 0:
        if args.max_steps % updates:
            why = f"each batch of completions is for {updates} optimizer steps"
            _refuse("max_steps", args.max_steps, why)
        return args.max_steps // updates
    if rows is None:
        _refuse("max_steps", args.max_steps, "the number of training rows is unknown; set it")
    groups = _groups(args)[1]
    if rows < groups:
        raise InputError(
            f"train_dataset has {rows} rows, but a step of GRPOConfig's batch sizes needs {groups}"
        )
    return math.ceil(args.num_train_epochs * (rows // groups))


def _count(value: float, whole: int) -> int:
    """Return a number of steps that may be given as a share of all."""
    return math.ceil(value * whole) if 0 < value < 1 else int(value)


def _interval(args: GRPOConfig, kind: str, updates: int, steps: int, epoch: int) -> int:
    """Return training steps between saves or evaluations; 0 for none."""
    strategy = str(getattr(args, f"{kind}_strategy"))
    if strategy == "no":
        return 0
    if strategy == "epoch":
        return epoch
    if strategy != "steps":
        _refuse(f"{kind}_strategy", strategy, "it must be no, steps or epoch")
    given = args.save_steps if kind == "save" else args.eval_steps or args.logging_steps
    return max(1, math.ceil(_count(given, steps * updates) / updates))


def _schedule(args: GRPOConfig) -> str:
    name = str(args.lr_scheduler_type)
    if name not in _SCHEDULES:
        _refuse("lr_scheduler_type", name, f"it must be {', '.join(_SCHEDULES)}")
    if args.optim not in _OPTIMIZERS:
        _refuse("optim", args.optim, f"the optimizer is AdamW: {', '.join(_OPTIMIZERS)}")
    return _SCHEDULES[name]


def _warmup(args: GRPOConfig, updates: int) -> int:
    if str(args.lr_scheduler_type) == _CONSTANT:
        return 0
    return _count(args.warmup_steps, updates)


def _trackers(report_to: str | list[str] | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in names:
        if name not in ("none", "tensorboard", "wandb", "mlflow", "trackio"):
            _refuse("report_to", name, "it must be none, tensorboard, wandb, mlflow or trackio")
    return [name for name in names if name not in ("none", "tensorboard")]


def _dictionary(args: GRPOConfig, name: str) -> dict[str, object]:
    value = getattr(args, name)
    if value is not None and not isinstance(value, Mapping):
        _refuse(name, value, "it must be a dictionary")
    return dict(value or {})


def _model(args: GRPOConfig) -> dict[str, object]:
    """Return the precision of forward passes, with master weights in float32, and the attention."""
    given = _dictionary(args, "model_init_kwargs")
    dtype = dtype_name(given.pop("dtype", given.pop("torch_dtype", None)))
    attention = given.pop("attn_implementation", None)
    if given:
        _refuse("model_init_kwargs", given, "only dtype and attn_implementation can be set")
    if dtype not in ("None", "auto", "float32", "bfloat16"):
        _refuse("model_init_kwargs", {"dtype": dtype}, "dtype must be float32 or bfloat16")
    return {
        "model.dtype": "bfloat16" if args.bf16 or dtype == "bfloat16" else "float32",
        "training.attention": "auto" if attention in (None, "sdpa") else attention,
    }


def _sampling(args: GRPOConfig, n: int) -> dict[str, object]:
    values: dict[str, object] = {
        "n": n,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
    }
    if args.max_completion_length is not None:
        values["max_tokens"] = args.max_completion_length
    for key, value in _dictionary(args, "generation_kwargs").items():
        if key not in (*_SAMPLING, *values):
            _refuse("generation_kwargs", {key: value}, f"it takes {', '.join(_SAMPLING)}")
        values[key] = value
    evaluation = values | {"n": args.num_generations_eval or n}
    return {f"sampling.{key}": value for key, value in values.items()} | {
        f"eval.sampling.{key}": value for key, value in evaluation.items()
    }


def _engine(args: GRPOConfig) -> dict[str, object]:
    if not args.use_vllm:
        return {}
    size = args.vllm_tensor_parallel_size
    values: dict[str, object] = {
        "engine.tensor_parallel_size": size,
        "training.colocated": True,
        "training.ranks": size,
    }
    extra: dict[str, object] = {}
    if args.vllm_gpu_memory_utilization != GRPOConfig.vllm_gpu_memory_utilization:
        extra["gpu_memory_utilization"] = args.vllm_gpu_memory_utilization
    if args.vllm_model_impl != GRPOConfig.vllm_model_impl:
        extra["model_impl"] = args.vllm_model_impl
    return values | {f"engine.vllm_args.{key}": value for key, value in extra.items()}


def _algorithm(args: GRPOConfig, *, tools: bool) -> dict[str, object]:
    scale = args.scale_rewards
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if scale not in ("group", "none"):
        _refuse("scale_rewards", scale, "it must be group or none")
    return {
        "algorithm.advantage": "grpo" if scale == "group" else "dr_grpo",
        "algorithm.kl.coef": args.beta,
        "algorithm.kl.importance_weight": args.use_bias_correction_kl,
        **_loss(args, tools=tools),
        **_correction(args),
    }


def _loss(args: GRPOConfig, *, tools: bool) -> dict[str, object]:
    name, level = args.loss_type, args.importance_sampling_level
    if level not in ("token", "sequence"):
        _refuse("importance_sampling_level", level, "it must be token or sequence")
    if name == "bnpo" and args.gradient_accumulation_steps == 1:
        name = "dapo"  # one micro-batch is the whole batch
    if name != "cispo" and name not in _REDUCTIONS:
        _refuse("loss_type", name, f"it must be cispo, {', '.join(_REDUCTIONS)}")
    if name == "dr_grpo" and tools:
        why = "its constant would be that of rollout.max_turns turns; use dapo or grpo with tools"
        _refuse("loss_type", name, why)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return {
        "algorithm.loss": _cispo(args, high) if name == "cispo" else _clipped(args, high),
        "algorithm.reduction": _REDUCTIONS.get(name, "token_mean"),
    }


def _cispo(args: GRPOConfig, high: float) -> dict[str, object]:
    if args.importance_sampling_level == "sequence":
        _refuse("importance_sampling_level", "sequence", "cispo clips the weight of each token")
    if high <= 1:
        _refuse("epsilon_high", high, "cispo clips the weight itself there; set it above 1")
    return {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}


def _clipped(args: GRPOConfig, high: float) -> dict[str, object]:
    """Return PPO's loss or GSPO's."""
    bounds: dict[str, object] = {"clip_low": args.epsilon, "clip_high": high}
    delta = args.delta
    if args.importance_sampling_level == "sequence":
        if delta is not None:
            _refuse("delta", delta, "importance_sampling_level sequence has no second bound")
        return {"name": "gspo", **bounds}
    if delta is not None:
        if delta <= 1:
            _refuse("delta", delta, "it must be above 1")
        bounds["dual_clip"] = max(delta, 1 + high)
        if delta < 1 + high:  # the lower bound counts where the advantage is positive
            bounds["clip_high"] = delta - 1
    return {"name": "ppo_clip", **bounds}


def _correction(args: GRPOConfig) -> dict[str, object]:
    """Return the correction for the mismatch of engine and trainer.

    None by default: ratios are those to the engine's own log-probs. TRL's default mode has no
    equal here, so it is not refused, unless its bounds are set.
    """
    mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return {}
    default = GRPOConfig.vllm_importance_sampling_mode
    if mode not in _CORRECTIONS and (
        mode != default or (low, high) != (None, GRPOConfig.vllm_importance_sampling_clip_max)
    ):
        names = ", ".join(_CORRECTIONS)
        _refuse("vllm_importance_sampling_mode", mode, f"bounds apply to {names}")
    if mode == default:
        return {}
    if low is not None or high is None:
        _refuse("vllm_importance_sampling_clip_min", low, "only clip_max bounds the weight")
    return {"algorithm.correction.name": _CORRECTIONS[mode], "algorithm.correction.high": high}
