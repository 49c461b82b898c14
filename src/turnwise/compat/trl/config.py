"""The fields of TRL's `GRPOConfig`, with TRL's defaults; our configuration is made from them and
from a `peft_config`. TRL is not imported.

All fields of TRL 1.16 are here, so that a script's keyword arguments need no change. The fields of
the class and of `LossFields` set Turnwise's keys; all other fields are in two tables. Values that
cannot be mapped raise an `InputError` that names the field.

To add a field of TRL's `GRPOConfig`: write its entry here. If one of our keys corresponds to it,
name the key in the entry's `settings`, or in `compat/trl/algorithm.py`. A test compares the fields
with TRL's.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, NoReturn

from turnwise.compat.trl.algorithm import (
    ADAPTIVE,
    TYPES_OF_FIELDS,
    LossFields,
    algorithm_settings,
)
from turnwise.compat.trl.refusals import check, refuse
from turnwise.core.gguf import resolve_model
from turnwise.core.json_types import dtype_name
from turnwise.core.optional import Foreign, optional
from turnwise.errors import InputError

logger = logging.getLogger(__name__)

WITHOUT_EFFECT: dict[str, object] = {
    "average_tokens_across_devices": True, "bf16_full_eval": False, "tf32": None,
    "gradient_checkpointing_kwargs": None, "use_cache": False, "torch_empty_cache_steps": None,
    "logging_strategy": "steps", "logging_steps": 10.0, "logging_first_step": False,
    "log_on_each_node": True, "logging_nan_inf_filter": True, "include_num_input_tokens_seen": "no",
    "log_level": "passive", "log_level_replica": "warning", "run_name": None,
    "project": "huggingface", "per_device_eval_batch_size": 8, "prediction_loss_only": False,
    "eval_on_start": False, "eval_do_concat_batches": True, "eval_use_gather_object": False,
    "eval_accumulation_steps": None, "batch_eval_metrics": False, "save_only_model": False,
    "save_on_each_node": False, "enable_jit_checkpoint": False, "use_cpu": False,
    "accelerator_config": None, "dataloader_drop_last": False, "dataloader_num_workers": 0,
    "dataloader_pin_memory": True, "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None, "dataloader_multiprocessing_context": None,
    "dataloader_in_order": True, "remove_unused_columns": False, "label_names": None,
    "length_column_name": "length", "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None, "ddp_static_graph": None, "ddp_backend": None,
    "ddp_timeout": 1800, "skip_memory_metrics": True, "do_train": False, "do_eval": False,
    "do_predict": False, "local_rank": -1, "disable_dropout": False,
    "ds3_gather_for_generation": True, "pad_to_multiple_of": "auto", "cache_implementation": None,
    "vllm_enable_sleep_mode": False, "use_liger_kernel": False, "liger_kernel_config": None,
    "cast_lm_head_to_fp32": False, "log_completions": False, "log_multimodal": True,
    "num_completions_to_print": None, "log_unique_prompts": False,
    "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
    "hub_strategy": "every_save", "hub_always_push": False,
}  # fmt: skip
"""Fields that are ignored, because they configure TRL's own machinery, or something that Turnwise
always does. Turnwise logs each step and each trajectory, evaluates before the first step, disables
dropout, samples with vLLM, computes the output head in chunks and in the model's precision, and
uploads to the Hub once, after training."""
REFUSED: dict[str, object] = {
    "lr_scheduler_kwargs": None, "optim_args": None, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-08, "optim_target_modules": None, "label_smoothing_factor": 0.0,
    "fp16": False, "fp16_full_eval": False, "torch_compile": False, "torch_compile_backend": None,
    "torch_compile_mode": None, "neftune_noise_alpha": None, "auto_find_batch_size": False,
    "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
    "eval_delay": 0.0, "include_for_metrics": [], "load_best_model_at_end": False,
    "metric_for_best_model": None, "greater_is_better": None, "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False, "data_seed": None, "parallelism_config": None,
    "train_sampling_strategy": "random", "fsdp": None, "fsdp_config": None, "deepspeed": None,
    "debug": "", "router_aux_loss_coef": None, "repetition_penalty": 1.0,
    "vllm_mode": "colocate",
    "vllm_structured_outputs_regex": None, "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216, "log_completions_hub_repo": None,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
"""Fields for which only TRL's default is accepted."""


_Others: Foreign = make_dataclass(
    "_Others",
    [  # Transformers' parser needs the types to read the fields from a command line
        (name, list[str], field(default_factory=list))
        if isinstance(default, list)
        else (name, str | None if default is None else type(default), field(default=default))
        for name, default in (WITHOUT_EFFECT | REFUSED).items()
    ],
    kw_only=True,
)


@dataclass
class GRPOConfig(_Others, LossFields):  # type: ignore[misc]
    """Arguments of `GRPOTrainer`, with the fields of TRL's class of this name.

    If a field that Turnwise cannot honour differs from TRL's default, making the trainer raises an
    `InputError` that names the field.

    Example:
        args = GRPOConfig(output_dir="maze-grpo", num_generations=8, learning_rate=1e-6)
    """

    output_dir: str | None = None
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 3.0
    max_steps: int = -1
    learning_rate: float = 1e-06
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    bf16: bool | None = None
    gradient_checkpointing: bool = True
    disable_tqdm: bool | None = None
    report_to: str | list[str] | None = "none"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    full_determinism: bool = False
    seed: int = 42
    resume_from_checkpoint: str | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    model_init_kwargs: dict[str, object] | str | None = None
    trust_remote_code: bool = False
    shuffle_dataset: bool = True
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, object] | str | None = None
    chat_template_kwargs: dict[str, object] | str | None = None
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    num_iterations: int = 1
    reward_weights: list[float] | None = None
    max_tool_calling_iterations: int | None = None
    turnwise: dict[str, object] = field(default_factory=dict)
    """Keys of Turnwise's own configuration, such as {"engine.kv_cache_gib": 1}. They take
    precedence over all other fields. TRL has no such field."""

    if TYPE_CHECKING:  # type checkers do not see the fields of the tables

        def __init__(self, output_dir: str | None = None, **fields: object) -> None: ...


MAPPED = frozenset({*vars(GRPOConfig)["__annotations__"], *vars(LossFields)["__annotations__"]})
"""Fields that `settings` or the trainer reads."""
_ADAM_BETA2 = 0.95
"""The only value that Turnwise uses. The field `adam_beta2` may have this value or TRL's
default."""
_WHY = {
    "adam_beta2": f"AdamW's second beta is {_ADAM_BETA2}",
    "repetition_penalty": "the trainer computes the distribution without it; let the reward judge "
    "repetitions",
    "vllm_mode": "the run starts its own engines; remove the server",
}
_WITH_VLLM = {name for name in MAPPED if name.startswith("vllm_")} - {"vllm_max_model_length"}
_OPTIMIZERS = {
    **{"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_torch_8bit": "adamw_8bit"}
}
_CONSTANT = "constant"
"""Name of the schedule for which Transformers ignores `warmup_steps`."""
_SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", _CONSTANT: "constant"},
    "constant_with_warmup": "constant",
}
_SAMPLING = (
    *("ignore_eos", "max_tokens", "min_p", "min_tokens", "prompt_logprobs", "stop"),
    *("stop_token_ids", "temperature", "top_k", "top_p"),
)
"""Keys of `generation_kwargs` with the same name in our section `sampling`."""
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
"""Keys of `generation_kwargs` in Transformers' spelling, mapped to our names."""
_NEUTRAL: dict[str, object] = {
    "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "n": 1, "early_stopping": False,
    "length_penalty": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "use_cache": True, "seed": None, "bad_words": None,
    "logit_bias": None, "allowed_token_ids": None, "structured_outputs": None,
}  # fmt: skip
"""Keys of `generation_kwargs` that are accepted only with a value without effect, because the
trainer does not compute the distribution that they change, or because another field
(num_generations) sets the same value."""
_OUTPUT = (
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "logprobs"),
    *("include_stop_str_in_output", "flat_logprobs", "output_kind", "skip_clone"),
)
"""Keys about vLLM's output, which are ignored, because only token ids and log-probs are read."""
_LOADING = ("device_map", "low_cpu_mem_usage", "use_cache", "use_kernels")
"""Keys of `model_init_kwargs` without effect, because the run's own processes load the model."""
_UNLIMITED = 1_000_000

_LORA = {
    "r", "lora_alpha", "target_modules", "use_rslora", "auto_mapping", "base_model_name_or_path",
    "inference_mode", "peft_type", "peft_version", "revision", "task_type",
}  # fmt: skip
"""Fields of a `LoraConfig` that may have any value. From `auto_mapping` on, they describe the file
and not the adapter."""


def settings(args: GRPOConfig, rows: int | None, *, tools: bool) -> dict[str, object]:
    """Return our configuration's values by key.

    Args:
        rows: Number of rows of the training data; None if it is unknown.
        tools: Whether the model may call tools.
    """
    _refuse_unsupported(args)
    n, groups, updates, epochs, steps = _sizes(args, rows)
    optimizer_steps = updates * epochs
    every = steps if rows is None else max(1, rows // groups)
    schedule = _one_of(args, "lr_scheduler_type", _SCHEDULES)
    optimizer = _one_of(args, "optim", _OPTIMIZERS, "the optimizer is AdamW: ")
    warmup = 0 if schedule == _CONSTANT else _count(args.warmup_steps, steps * optimizer_steps)
    report_to = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    for name in report_to:
        known = ("none", "tensorboard", "wandb", "mlflow", "trackio")
        check(name in known, "report_to", name, f"it must be one of {', '.join(known)}")
    values: dict[str, object] = {
        "seed": args.seed,
        "deterministic": args.full_determinism,
        "trackers": [name for name in report_to if name not in ("none", "tensorboard")],
        "model.template_args": _dictionary(args, "chat_template_kwargs"),
        "data.shuffle": args.shuffle_dataset,
        **_model(args),
        "rollout.max_turns": 1,  # so that dr_grpo divides by the length of one completion
        "rollout.prompts_per_step": groups,
        "training.steps": steps,
        "training.updates_per_step": updates,
        "training.epochs_per_step": epochs,
        "training.learning_rate": args.learning_rate,
        "training.optimizer": _OPTIMIZERS[optimizer],
        "training.lr_schedule": _SCHEDULES[schedule],
        "training.warmup_steps": warmup,
        "training.weight_decay": args.weight_decay,
        "training.max_grad_norm": args.max_grad_norm,
        "training.activation_checkpointing": args.gradient_checkpointing,
        "training.keep_last": args.save_total_limit or _UNLIMITED,
        "training.checkpoint_every": _interval(args, "save", optimizer_steps, steps, every),
        "eval.every": _interval(args, "eval", optimizer_steps, steps, every),
        **_sampling(args, n),
        **algorithm_settings(args),
    }
    if tools:
        calls = args.max_tool_calling_iterations
        values["rollout.max_turns"] = _UNLIMITED if calls is None else calls + 1
        values["rollout.max_response_tokens"] = args.max_completion_length
    return values | args.turnwise


def _refuse_unsupported(args: GRPOConfig) -> None:
    """Raise for fields that cannot be honoured, and log fields without effect."""
    # In TRL, too, other fields make these fields ineffective.
    without: set[str] = set() if args.use_vllm else set(_WITH_VLLM)
    if str(args.lr_scheduler_type) == _CONSTANT:
        without.add("warmup_steps")
    without |= {name for name, types in TYPES_OF_FIELDS.items() if args.loss_type not in types}
    if not args.sync_ref_model:
        without |= {"ref_model_mixup_alpha", "ref_model_sync_steps"}
    if not args.use_adaptive_entropy:
        without |= set(ADAPTIVE)
    if args.multi_objective_aggregation == "normalize_then_sum":
        without.add("scale_rewards")
    unused = []
    for name, default in vars(GRPOConfig()).items():
        value = getattr(args, name)
        if value == default or (name == "adam_beta2" and value == _ADAM_BETA2):
            continue
        if name in without or name in WITHOUT_EFFECT:
            unused.append(name)
        elif name not in MAPPED:
            why = _WHY.get(name, "Turnwise has nothing of the kind")
            refuse(name, value, f"{why}; TRL's default is {default!r}")
    if unused:
        logger.warning("GRPOConfig: without effect in Turnwise: %s", ", ".join(unused))


def _one_of(args: GRPOConfig, name: str, known: Collection[str], why: str = "it must be ") -> str:
    """Return the text of a field that must be one of `known`, given as a text or as a member of one
    of Transformers' enumerations."""
    value = getattr(args, name)
    for text in known:
        if text in (value, str(value)):
            return text
    refuse(name, value, why + ", ".join(known))


def _sizes(args: GRPOConfig, rows: int | None) -> tuple[int, int, int, int, int]:
    """Return trajectories per group, groups per training step, updates per pass over a step's
    groups, passes per step, and training steps."""
    per_device, given = args.per_device_train_batch_size, args.steps_per_generation
    if args.generation_batch_size is not None:
        check(given is None, "steps_per_generation", given, "generation_batch_size is set too")
        given, rest = divmod(args.generation_batch_size, per_device)
        why = f"it is not divisible by per_device_train_batch_size {per_device}"
        check(rest == 0, "generation_batch_size", args.generation_batch_size, why)
    accumulated = args.gradient_accumulation_steps
    given = accumulated if given is None else given
    less, more = sorted((accumulated, given))
    why = f"it must divide gradient_accumulation_steps {accumulated}, or be divisible by it"
    check(more % less == 0, "steps_per_generation", given, why)
    n, updates = args.num_generations or 1, max(1, given // accumulated)
    repeated = accumulated // less
    # One update may accumulate several passes over a batch of completions, or several batches.
    batches, passes = max(1, repeated // args.num_iterations), args.num_iterations
    epochs, rest = divmod(passes * batches, repeated)
    why = f"it must divide, or be divisible by, the {repeated} batches of an update"
    check(rest == 0, "num_iterations", passes, why)
    samples = per_device * given * batches
    check(n > 1, "num_generations", n, "a group needs at least 2")
    groups, rest = divmod(samples, n)
    why = f"a step has {samples} completions, which is no multiple of it"
    check(rest == 0, "num_generations", n, why)
    if args.max_steps > 0:
        steps, rest = divmod(args.max_steps, updates * epochs)
        why = f"each batch of completions is for {updates * epochs} optimizer steps"
        check(rest == 0, "max_steps", args.max_steps, why)
        return n, groups, updates, epochs, steps
    if rows is None:
        refuse("max_steps", args.max_steps, "the number of training rows is unknown; set it")
    if rows < groups:
        raise InputError(
            f"train_dataset has {rows} rows, but a step of GRPOConfig's batch sizes needs {groups}"
        )
    return n, groups, updates, epochs, math.ceil(args.num_train_epochs * (rows // groups))


def _count(value: float, whole: int) -> int:
    """Return a number of steps; a value between 0 and 1 is a fraction of `whole` steps."""
    return math.ceil(value * whole) if 0 < value < 1 else int(value)


def _interval(args: GRPOConfig, kind: str, updates: int, steps: int, epoch: int) -> int:
    """Return the number of training steps between saves or evaluations; 0 if the strategy is
    "no"."""
    strategy = _one_of(args, f"{kind}_strategy", ("no", "steps", "epoch"))
    if strategy != "steps":
        return 0 if strategy == "no" else epoch
    given = args.save_steps if kind == "save" else args.eval_steps or args.logging_steps
    return max(1, math.ceil(_count(given, steps * updates) / updates))


def _dictionary(args: GRPOConfig, name: str) -> dict[str, object]:
    value = getattr(args, name)
    check(isinstance(value, Mapping | None), name, value, "it must be a dictionary")
    return dict(value or {})


def _model(args: GRPOConfig) -> dict[str, object]:
    """Return the settings of the model (its dtype is used in forward passes; master weights are in
    float32), of attention, and of the engines."""
    given = _dictionary(args, "model_init_kwargs")
    dtype = dtype_name(given.pop("dtype", given.pop("torch_dtype", None)))
    attention = given.pop("attn_implementation", None)
    trust = bool(given.pop("trust_remote_code", False)) or args.trust_remote_code
    if given.get("revision") in (None, "main"):
        given.pop("revision", None)
    if unused := sorted(name for name in _LOADING if given.pop(name, None) is not None):
        logger.warning("model_init_kwargs: without effect in Turnwise: %s", ", ".join(unused))
    why = "only dtype, attn_implementation and trust_remote_code can be set"
    check(not given, "model_init_kwargs", given, why)
    known, why = ("None", "auto", "float32", "bfloat16"), "dtype must be float32 or bfloat16"
    check(dtype in known, "model_init_kwargs", {"dtype": dtype}, why)
    values: dict[str, object] = {
        "model.trust_remote_code": trust,
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
    values: dict[str, object] = {"n": n, "top_k": args.top_k, "top_p": args.top_p}
    values["temperature"] = args.temperature
    if args.max_completion_length is not None:
        values["max_tokens"] = args.max_completion_length
    if args.min_p is not None:
        values["min_p"] = args.min_p
    for name, value in _dictionary(args, "generation_kwargs").items():
        if name in _OUTPUT or (name in _NEUTRAL and value in (None, _NEUTRAL[name])):
            continue
        key, why = _RENAMED.get(name, name), f"it takes {', '.join(_SAMPLING)}"
        if name in _NEUTRAL:
            why = f"the trainer computes no such distribution; only {_NEUTRAL[name]!r} is possible"
        check(key in _SAMPLING, "generation_kwargs", {name: value}, why)
        values[key] = value
        if value is None:  # means vLLM's default, which is also ours, except for max_tokens
            del values[key]
    if "max_tokens" not in values:
        values["max_tokens"] = _unlimited(args)
    own = {f"sampling.{key}": value for key, value in values.items()}
    own["eval.sampling.n"] = args.num_generations_eval or n
    # Our evaluation is greedy by default; the other keys of eval.sampling default to `sampling`.
    own["eval.sampling.temperature"] = values.get("temperature", 1.0)
    return own


def _unlimited(args: GRPOConfig) -> int:
    """Return the `max_tokens` for TRL's None; it is so large that the model's context is the only
    limit."""
    why = "loss_type dr_grpo divides by it: set it"
    check(args.loss_type != "dr_grpo", "max_completion_length", None, why)
    return _UNLIMITED


def lora_settings(peft_config: object, model: str, *, trust_remote_code: bool) -> dict[str, object]:
    """Return the settings of `model.lora` for a PEFT `LoraConfig`.

    Without `target_modules`, PEFT's defaults for the model's architecture are used.
    """
    peft = optional("peft", "lora", "peft_config")
    if not isinstance(peft_config, peft.LoraConfig):
        why = "it must be a peft.LoraConfig: engines have no other adapters, and no prompt-learning"
        _refuse_lora("", peft_config, why)
    given, defaults = peft_config.to_dict(), peft.LoraConfig().to_dict()
    for name, value in given.items():
        if name in _LORA or value == defaults.get(name):
            continue
        if name != "lora_dropout":  # ignored, as trainer and engine must agree on log-probs
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
    if isinstance(targets, str):
        if targets.lower() != "all-linear":
            _refuse_lora(".target_modules", targets, "it must be all-linear or a list of names")
        targets = "all-linear"
    elif "lm_head" in (targets := sorted(targets)):
        why = "engines have no adapter for the output head; remove lm_head"
        _refuse_lora(".target_modules", targets, why)
    return {
        "model.lora.rank": given["r"],
        "model.lora.alpha": float(given["lora_alpha"]),
        "model.lora.target_modules": targets,
        "model.lora.rslora": given["use_rslora"],
    }


def _refuse_lora(field: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOTrainer: peft_config{field}={str(value)[:80]!r} is not supported: {why}")
