"""Our configuration from the fields of TRL's `GRPOConfig`, and from a `peft_config`.

Values that cannot be mapped raise an `InputError` that names the field.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import NoReturn

from turnwise.compat.trl.config import MAPPED, WITHOUT_EFFECT, GRPOConfig
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import dtype_name
from turnwise.core.optional import optional
from turnwise.errors import InputError

logger = logging.getLogger(__name__)

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

_LORA = {"r", "lora_alpha", "target_modules", "use_rslora"}
_LORA_ANY = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version",
    "revision", "task_type",
}  # fmt: skip
"""Fields of a `LoraConfig` about the file and the library."""


def settings(args: GRPOConfig, rows: int | None, *, tools: bool) -> dict[str, object]:
    """Return values of our configuration by their keys.

    Args:
        rows: Rows of the training data; None if their number is unknown.
        tools: Whether the model has tools.
    """
    _refuse_unsupported(args)
    n, groups, updates, steps = _sizes(args, rows)
    every = steps if rows is None else max(1, rows // groups)
    schedule = _one_of(args, "lr_scheduler_type", _SCHEDULES)
    _one_of(args, "optim", _OPTIMIZERS, "the optimizer is AdamW: ")
    warmup = 0 if schedule == _CONSTANT else _count(args.warmup_steps, steps * updates)
    report_to = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    for name in report_to:
        if name not in ("none", "tensorboard", "wandb", "mlflow", "trackio"):
            _refuse("report_to", name, "it must be none, tensorboard, wandb, mlflow or trackio")
    values: dict[str, object] = {
        "seed": args.seed,
        "deterministic": args.full_determinism,
        "trackers": [name for name in report_to if name not in ("none", "tensorboard")],
        "model.trust_remote_code": args.trust_remote_code,
        "model.template_args": _dictionary(args, "chat_template_kwargs"),
        **_model(args),
        "rollout.max_turns": 1,  # so dr_grpo's constant is that of one completion
        "rollout.prompts_per_step": groups,
        "training.steps": steps,
        "training.updates_per_step": updates,
        "training.learning_rate": args.learning_rate,
        "training.lr_schedule": _SCHEDULES[schedule],
        "training.warmup_steps": warmup,
        "training.weight_decay": args.weight_decay,
        "training.max_grad_norm": args.max_grad_norm,
        "training.activation_checkpointing": args.gradient_checkpointing,
        "training.keep_last": args.save_total_limit or _UNLIMITED,
        "training.checkpoint_every": _interval(args, "save", updates, steps, every),
        "eval.every": _interval(args, "eval", updates, steps, every),
        **_sampling(args, n),
        **_algorithm(args, tools=tools),
    }
    if tools:
        calls = args.max_tool_calling_iterations
        values["rollout.max_turns"] = _UNLIMITED if calls is None else calls + 1
        values["rollout.max_response_tokens"] = args.max_completion_length
    return values | args.turnwise


def _refuse_unsupported(args: GRPOConfig) -> None:
    """Raise for fields that cannot be honoured, and log those without effect."""
    without: set[str] = set() if args.use_vllm else set(_WITH_VLLM)
    if str(args.lr_scheduler_type) == _CONSTANT:  # what others leave without effect in TRL, too
        without.add("warmup_steps")
    if args.loss_type == "cispo":
        without |= {"epsilon", "delta"}
    unused = []
    for item in fields(GRPOConfig):
        made = item.default_factory
        default = item.default if made is MISSING else made()
        value, name = getattr(args, item.name), item.name
        if value == default or (name == "adam_beta2" and value == _ADAM_BETA2):
            continue
        if name in without or name in WITHOUT_EFFECT:
            unused.append(name)
        elif name not in MAPPED:
            why = _WHY.get(name, "Turnwise has nothing of the kind")
            _refuse(name, value, f"{why}; TRL's default is {default!r}")
    if unused:
        logger.warning("GRPOConfig: without effect in Turnwise: %s", ", ".join(unused))


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOConfig.{name}={value!r} is not supported: {why}")


def _one_of(args: GRPOConfig, name: str, known: Collection[str], why: str = "it must be ") -> str:
    """Return the text of a field that accepts only some, also as an enumeration of Transformers."""
    value = getattr(args, name)
    for text in known:
        if text in (value, str(value)):
            return text
    _refuse(name, value, why + ", ".join(known))


def updates_per_step(args: GRPOConfig) -> int:
    """Return the number of optimizer steps on each batch of completions."""
    return max(1, _per_generation(args) // args.gradient_accumulation_steps)


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


def _sizes(args: GRPOConfig, rows: int | None) -> tuple[int, int, int, int]:
    """Return trajectories per group, groups per training step, updates per step, and steps."""
    n, updates = args.num_generations or 1, updates_per_step(args)
    samples = args.per_device_train_batch_size * _per_generation(args)
    if n < 2:
        _refuse("num_generations", n, "a group needs at least 2")
    if samples % n:
        why = f"a step has {samples} completions, which it does not divide"
        _refuse("num_generations", n, why)
    groups = samples // n
    if args.max_steps > 0:
        if args.max_steps % updates:
            why = f"each batch of completions is for {updates} optimizer steps"
            _refuse("max_steps", args.max_steps, why)
        return n, groups, updates, args.max_steps // updates
    if rows is None:
        _refuse("max_steps", args.max_steps, "the number of training rows is unknown; set it")
    if rows < groups:
        raise InputError(
            f"train_dataset has {rows} rows, but a step of GRPOConfig's batch sizes needs {groups}"
        )
    return n, groups, updates, math.ceil(args.num_train_epochs * (rows // groups))


def _count(value: float, whole: int) -> int:
    """Return a number of steps that may be given as a share of all."""
    return math.ceil(value * whole) if 0 < value < 1 else int(value)


def _interval(args: GRPOConfig, kind: str, updates: int, steps: int, epoch: int) -> int:
    """Return training steps between saves or evaluations; 0 for none."""
    strategy = _one_of(args, f"{kind}_strategy", ("no", "steps", "epoch"))
    if strategy != "steps":
        return 0 if strategy == "no" else epoch
    given = args.save_steps if kind == "save" else args.eval_steps or args.logging_steps
    return max(1, math.ceil(_count(given, steps * updates) / updates))


def _dictionary(args: GRPOConfig, name: str) -> dict[str, object]:
    value = getattr(args, name)
    if value is not None and not isinstance(value, Mapping):
        _refuse(name, value, "it must be a dictionary")
    return dict(value or {})


def _model(args: GRPOConfig) -> dict[str, object]:
    """Return the precision of forward passes, with master weights in float32, the attention, and
    how the engine runs."""
    given = _dictionary(args, "model_init_kwargs")
    dtype = dtype_name(given.pop("dtype", given.pop("torch_dtype", None)))
    attention = given.pop("attn_implementation", None)
    if given:
        _refuse("model_init_kwargs", given, "only dtype and attn_implementation can be set")
    if dtype not in ("None", "auto", "float32", "bfloat16"):
        _refuse("model_init_kwargs", {"dtype": dtype}, "dtype must be float32 or bfloat16")
    values: dict[str, object] = {
        "model.dtype": "bfloat16" if args.bf16 or dtype == "bfloat16" else "float32",
        "training.attention": "auto" if attention in (None, "sdpa") else attention,
    }
    if args.use_vllm:
        size = args.vllm_tensor_parallel_size
        values |= {"engine.tensor_parallel_size": size, "training.ranks": size}
        values["training.colocated"] = True
        for field in ("vllm_gpu_memory_utilization", "vllm_model_impl"):
            if (value := getattr(args, field)) != getattr(GRPOConfig, field):
                values[f"engine.vllm_args.{field.removeprefix('vllm_')}"] = value
    return values


def _sampling(args: GRPOConfig, n: int) -> dict[str, object]:
    values: dict[str, object] = {
        name: getattr(args, name) for name in ("temperature", "top_p", "top_k")
    }
    values["n"] = n
    if args.max_completion_length is not None:
        values["max_tokens"] = args.max_completion_length
    for key, value in _dictionary(args, "generation_kwargs").items():
        if key not in (*_SAMPLING, *values):
            _refuse("generation_kwargs", {key: value}, f"it takes {', '.join(_SAMPLING)}")
        values[key] = value
    evaluation = values | {"n": args.num_generations_eval or n}
    sections = {"sampling": values, "eval.sampling": evaluation}
    return {
        f"{name}.{key}": value for name, each in sections.items() for key, value in each.items()
    }


def _algorithm(args: GRPOConfig, *, tools: bool) -> dict[str, object]:
    scale = args.scale_rewards
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if scale not in ("group", "none"):
        _refuse("scale_rewards", scale, "it must be group or none")
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
    # No correction for the mismatch of engine and trainer by default: ratios are those to the
    # engine's own log-probs. TRL's default mode has no equal here, so it is not refused, unless its
    # bounds are set.
    correction: dict[str, object] = {}
    mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    if args.use_vllm and args.vllm_importance_sampling_correction:
        bounds = (None, GRPOConfig.vllm_importance_sampling_clip_max)
        if mode in _CORRECTIONS:
            if low is not None or high is None:
                _refuse("vllm_importance_sampling_clip_min", low, "only clip_max bounds the weight")
            correction = {"name": _CORRECTIONS[mode], "high": high}
        elif mode != GRPOConfig.vllm_importance_sampling_mode or (low, high) != bounds:
            why = f"bounds apply to {', '.join(_CORRECTIONS)}"
            _refuse("vllm_importance_sampling_mode", mode, why)
    return {
        "algorithm.advantage": "grpo" if scale == "group" else "dr_grpo",
        "algorithm.kl.coef": args.beta,
        "algorithm.kl.importance_weight": args.use_bias_correction_kl,
        "algorithm.loss": _loss(args, name, level),
        "algorithm.reduction": _REDUCTIONS.get(name, "token_mean"),
        **{f"algorithm.correction.{key}": value for key, value in correction.items()},
    }


def _loss(args: GRPOConfig, name: str, level: str) -> dict[str, object]:
    """Return CISPO's loss, PPO's or GSPO's."""
    high, delta = args.epsilon if args.epsilon_high is None else args.epsilon_high, args.delta
    if name == "cispo":
        if level == "sequence":
            _refuse("importance_sampling_level", level, "cispo clips the weight of each token")
        if high <= 1:
            _refuse("epsilon_high", high, "cispo clips the weight itself there; set it above 1")
        return {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    bounds: dict[str, object] = {"clip_low": args.epsilon, "clip_high": high}
    if level == "sequence":
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


def lora_settings(peft_config: object, model: str, *, trust_remote_code: bool) -> dict[str, object]:
    """Return values of `model.lora` for a `LoraConfig` of PEFT.

    Args:
        model: The model's folder or name: without `target_modules`, PEFT chooses by its kind.
    """
    peft = optional("peft", "lora", "peft_config")
    if not isinstance(peft_config, peft.LoraConfig):
        _refuse_lora("", peft_config, "it must be a peft.LoraConfig")
    given, defaults = peft_config.to_dict(), peft.LoraConfig().to_dict()
    for name, value in given.items():
        if name in _LORA | _LORA_ANY or value == defaults.get(name):
            continue
        if name != "lora_dropout":  # with it, the trainer would not compute what the engine does
            _refuse_lora(f".{name}", value, f"PEFT's default is {defaults.get(name)!r}")
        logger.warning("peft_config.%s: without effect in Turnwise", name)
    targets = given["target_modules"]
    if targets is None:
        from transformers import AutoConfig

        kind = AutoConfig.from_pretrained(
            resolve_model(model), trust_remote_code=trust_remote_code
        ).model_type
        table = optional("peft.utils.constants", "lora", "peft_config")
        targets = table.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        if targets is None:
            why = f"PEFT knows no default for {kind}; name the layers"
            _refuse_lora(".target_modules", None, why)
    if not isinstance(targets, str):
        targets = sorted(targets)
    elif targets.lower() == "all-linear":
        targets = "all-linear"
    else:
        _refuse_lora(".target_modules", targets, "it must be all-linear or a list of names")
    return {
        "model.lora.rank": given["r"],
        "model.lora.alpha": float(given["lora_alpha"]),
        "model.lora.target_modules": targets,
        "model.lora.rslora": given["use_rslora"],
    }


def _refuse_lora(field: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOTrainer: peft_config{field}={str(value)[:80]!r} is not supported: {why}")
