"""The fields of TRL's `GRPOConfig`, with TRL's defaults; TRL is not imported.

All fields of TRL 1.16 are here, so that a script's keyword arguments are accepted as they are:
those of the class itself set Turnwise's keys (see `mapping`), the others stand in two tables.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING

from turnwise.core.optional import Foreign

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
    "vllm_enable_sleep_mode": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    "log_completions": False, "log_multimodal": True, "num_completions_to_print": None,
    "log_unique_prompts": False, "use_transformers_continuous_batching": False,
    "transformers_continuous_batching_config": None, "use_transformers_paged": False,
}  # fmt: skip
"""Fields about TRL's own machinery, or about what Turnwise always does: it logs each step and each
trajectory, evaluates before the first step, disables dropout, and samples with vLLM."""
REFUSED: dict[str, object] = {
    "lr_scheduler_kwargs": None, "optim_args": None, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-08, "optim_target_modules": None, "label_smoothing_factor": 0.0,
    "fp16": False, "fp16_full_eval": False, "torch_compile": False, "torch_compile_backend": None,
    "torch_compile_mode": None, "use_liger_kernel": False, "liger_kernel_config": None,
    "neftune_noise_alpha": None, "auto_find_batch_size": False, "trackio_space_id": None,
    "trackio_bucket_id": None, "trackio_static_space_id": None, "eval_delay": 0.0,
    "include_for_metrics": [], "push_to_hub": False, "hub_token": None, "hub_private_repo": None,
    "hub_model_id": None, "hub_strategy": "every_save", "hub_always_push": False,
    "hub_revision": None, "load_best_model_at_end": False, "metric_for_best_model": None,
    "greater_is_better": None, "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False, "data_seed": None, "parallelism_config": None,
    "train_sampling_strategy": "random", "fsdp": None, "fsdp_config": None, "deepspeed": None,
    "debug": "", "router_aux_loss_coef": None, "cast_lm_head_to_fp32": False,
    "shuffle_dataset": True, "min_p": None, "repetition_penalty": 1.0, "vllm_mode": "colocate",
    "vllm_structured_outputs_regex": None, "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216, "num_iterations": 1, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False, "sync_ref_model": False, "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "off_policy_mask_threshold": None, "log_completions_hub_repo": None,
    "vllm_importance_sampling_cap": None,
}  # fmt: skip
"""Fields that may only have TRL's default."""


def _field(name: str, default: object) -> tuple[str, object, Foreign]:
    """Return a field with a type, by which Transformers' parser reads it from a command line."""
    if isinstance(default, list):
        return name, list[str], field(default_factory=list)
    return name, str | None if default is None else type(default), field(default=default)


_Others: Foreign = make_dataclass(
    "_Others",
    [_field(name, default) for name, default in (WITHOUT_EFFECT | REFUSED).items()],
    kw_only=True,
)


@dataclass
class GRPOConfig(_Others):  # type: ignore[misc]
    """Arguments of `GRPOTrainer`, as TRL's class of this name has them.

    A field that Turnwise cannot honour raises an `InputError` with its name when the trainer is
    made, unless it has TRL's default.

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
    gradient_accumulation_steps: int = 1
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
    model_init_kwargs: dict[str, object] | str | None = None
    trust_remote_code: bool = False
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    generation_kwargs: dict[str, object] | str | None = None
    chat_template_kwargs: dict[str, object] | str | None = None
    use_vllm: bool = False
    vllm_model_impl: str = "vllm"
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    scale_rewards: str | bool = "group"
    loss_type: str = "dapo"
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    use_bias_correction_kl: bool = True
    turnwise: dict[str, object] = field(default_factory=dict)
    """Keys of Turnwise's own configuration, such as {"engine.kv_cache_gib": 1}, which take
    precedence over those that the other fields set; TRL has no such field."""

    if TYPE_CHECKING:  # the fields of the tables are keyword arguments too

        def __init__(self, output_dir: str | None = None, **fields: object) -> None: ...


MAPPED = frozenset(vars(GRPOConfig)["__annotations__"])
"""Fields that `mapping.settings` or the trainer reads."""
