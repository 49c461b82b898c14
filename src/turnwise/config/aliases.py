"""Names of keys in other trainers and engines."""

REPLACED_KEYS = {
    name: advice
    for names, advice in {
        "early_stopping length_penalty": "it belongs to beam search, which has vLLM's own rules "
        "here; see sampling.use_beam_search",
        "best_of": "vLLM removed it; sample several answers with sampling.n, and the reward ranks "
        "them",
        "presence_penalty frequency_penalty repetition_penalty": "a penalty samples from a "
        "different distribution than the one the trainer computes; shape answers with the reward "
        "or sampling.temperature",
        "max_paddings": "vLLM packs batches without padding; limit a batch with "
        "engine.max_num_seqs and engine.max_num_batched_tokens",
        "batch_generation vllm_micro_batch_size": "vLLM forms its batches token by token; limit "
        "them with engine.max_num_seqs and engine.max_num_batched_tokens",
        "num_scheduler_steps": "vLLM schedules every step while it computes; limit a batch with "
        "engine.max_num_seqs",
        "max_seq_len_to_capture max_context_len_to_capture": "vLLM captures CUDA graphs by batch "
        "size; set engine.vllm_args.max_cudagraph_capture_size, or engine.vllm_args.enforce_eager "
        "to disable them",
        "swap_space blocks_to_swap_in blocks_to_swap_out": "vLLM recomputes preempted requests "
        "instead of swapping them; give engine.kv_cache_gib enough room",
        "blocks_to_copy": "vLLM shares the blocks of a common prefix instead of copying them; see "
        "engine.prefix_caching",
        "enable_return_routed_experts aux_output_config": "set engine.routing_replay to record the "
        "experts of each token and train with them",
        "sliding_window": "the model's own config.json sets it for both the engine and the "
        "trainer; change it in the folder of model.path, or limit the context with "
        "model.max_length",
    }.items()
    for name in names.split()
}
"""Keys of other systems that neither current vLLM nor turnwise reads, and their replacements."""
UNNEEDED_KEYS = {
    *("blocks_to_copy", "blocks_to_swap_in", "blocks_to_swap_out", "swap_space"),
    *("batch_generation", "max_paddings", "num_scheduler_steps", "vllm_micro_batch_size"),
    *("max_context_len_to_capture", "max_seq_len_to_capture"),
}
"""Keys of `REPLACED_KEYS` that affect only speed and memory, so that the same tokens are sampled
without them."""
_NEUTRAL: dict[str, float] = {
    "best_of": 1,
    "length_penalty": 1,
    "num_scheduler_steps": 1,
    "repetition_penalty": 1,
    "vllm_micro_batch_size": -1,
}
"""Values of `REPLACED_KEYS` that have no effect, in addition to false, 0 and empty values."""


def has_no_effect(key: str, value: object) -> bool:
    """Return whether a key is in `REPLACED_KEYS` and its value has no effect."""
    if key not in REPLACED_KEYS:
        return False
    if isinstance(value, dict):
        return all(has_no_effect(key, below) for below in value.values())
    return value in (None, False, 0, "", [], "None") or value == _NEUTRAL.get(key)


VLLM_NAMES = {
    "dtype": "model.dtype",
    "enable_prefix_caching": "engine.prefix_caching",
    "limit_mm_per_prompt": "engine.images_per_prompt",
    "max_model_len": "model.max_length",
    "model": "model.path",
    "seed": "seed",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "weight_transfer_config": "weights.transport",
}
"""Keys of this configuration, by the vLLM arguments that they replace."""

ALIASES = {
    name: key
    for key, names in {
        "algorithm.advantage.clip": "cliprange_value",
        "algorithm.advantage.name": "adv_estimator",
        "algorithm.advantage.scale": "scale_rewards",
        "algorithm.correction.high": "geo_mask_high rollout_is_threshold rollout_rs_threshold "
        "token_tis_ratio_clip_high truncated_importance_sampling_ratio",
        "algorithm.correction.low": "geo_mask_low truncated_importance_sampling_ratio_min",
        "algorithm.correction.name": "is_correction_mode rollout_correction rollout_is rollout_rs "
        "sequence_mask_metric tis_ratio_type truncated_importance_sampling_type",
        "algorithm.entropy.adaptive": "use_adaptive_entropy",
        "algorithm.entropy.coef": "entropy_coef entropy_coeff",
        "algorithm.entropy.coef_delta": "entropy_coef_delta",
        "algorithm.entropy.coef_max": "entropy_coef_max",
        "algorithm.entropy.coef_min": "entropy_coef_min",
        "algorithm.entropy.target": "entropy_target",
        "algorithm.entropy.top_quantile": "top_entropy_quantile",
        "algorithm.kl.coef": "beta init_kl_coef kl_beta kl_coef kl_loss_coef "
        "reference_policy_kl_penalty",
        "algorithm.kl.mixup_alpha": "ref_model_mixup_alpha",
        "algorithm.kl.sync_steps": "ref_model_sync_steps",
        "algorithm.teacher": "kl_penalty_coef opd_kl_coef teacher_model teacher_model_name_or_path "
        "teacher_model_server_url teacher_models teacher_tau teacher_url",
        "algorithm.loss.clip_high": "clip_eps clip_ratio cliprange epsilon_high ratio_clip_max",
        "algorithm.loss.clip_low": "epsilon ratio_clip_min",
        "algorithm.loss.delta": "delta_high delta_low dppo_mask_high dppo_mask_low",
        "algorithm.loss.divergence": "dppo_type",
        "algorithm.loss.name": "loss_fn loss_mode loss_type policy_loss_type",
        "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
        "algorithm.reduction": "loss_agg_mode token_level_loss",
        "data.eval_limit": "eval_data_num_limit",
        "data.eval_path": "eval_data_path eval_dataset val_file val_files",
        "data.limit": "training_data_num_limit",
        "data.max_prompt_tokens": "max_prompt_length prompt_length",
        "data.path": "data_path dataset dataset_name train_dataset train_file train_files",
        "data.shuffle": "shuffle_dataset",
        "engine.logits_processors_allowed": "logits_processor_pattern",
        "engine.max_num_seqs": "generation_batch_size",
        "engine.metrics": "disable_log_stats",
        "engine.pipeline_parallel_size": "pipeline_model_parallel_size",
        "engine.routing_replay": "enable_routing_replay",
        "engine.tensor_parallel_size": "tensor_model_parallel_size",
        "engine.vllm_args": "worker_extension_cls",
        "environment": "env",
        "environment_args": "env_args env_config env_kwargs",
        "eval.background": "eval_num_gpus",
        "eval.every": "eval_episode_interval eval_freq eval_interval eval_steps test_freq",
        "eval.sampling.temperature": "eval_temperature",
        "eval.sampling.top_k": "eval_top_k",
        "eval.sampling.top_p": "eval_top_p",
        "model.chat_template": "chat_template_path custom_chat_template",
        "model.lora.alpha": "lora_alpha",
        "model.lora.rank": "lora_dim lora_r lora_rank",
        "model.lora.rslora": "use_rslora",
        "model.lora.target_modules": "lora_target_modules",
        "model.max_length": "context_length max_model_len max_seq_len max_seq_length seq_length",
        "model.path": "load model_name model_name_or_path",
        "model.tokenizer": "tokenizer_model tokenizer_path",
        "model.train_vision": "freeze_vision_tower freeze_vit",
        "name": "exp_name run_name",
        "output_dir": "output",
        "rollout.context.compact": "compaction",
        "rollout.context.limit": "summarize_at_tokens",
        "rollout.max_response_tokens": "max_response_length response_length",
        "rollout.prompts_per_step": "batch_size num_prompts_per_step sample_per_episode "
        "train_batch_size",
        "rollout.rewards": "judge_model judges reward reward_fn reward_funcs",
        "rollout.sampler": "rollout_sampler",
        "sampling.max_tokens": "max_completion_length max_new_tokens new_token_limit",
        "sampling.n": "group_size num_generations num_generations_per_prompt "
        "num_inference_per_prompt num_rollouts "
        "num_samples rollout_n",
        "sampling.stop": "stop_token_list",
        "serving.known_sessions": "max_cache_size",
        "serving.worker_servers": "expose_http_server",
        "serving.workers": "num_engines num_workers",
        "trackers": "logger logging report_to",
        "training.activation_checkpointing": "gradient_checkpointing",
        "training.checkpoint_every": "save_episode_interval save_freq save_interval save_steps",
        "training.context_parallel": "context_parallel_size ulysses_sequence_parallel_size",
        "training.epochs_per_step": "num_iterations ppo_epochs",
        "training.keep_last": "save_total_limit",
        "training.learning_rate": "actor_lr lr",
        "training.lr_schedule": "lr_scheduler lr_scheduler_type scheduler",
        "training.max_grad_norm": "clip_grad grad_clip",
        "training.max_staleness": "max_trajectory_age_steps",
        "training.micro_batch_tokens": "micro_batch_size per_device_train_batch_size "
        "train_micro_batch_size",
        "training.optimizer": "optim optimizer_type",
        "training.ranks": "num_gpus",
        "training.steps": "epochs max_steps num_episode num_epochs num_ppo_episode num_steps "
        "num_train_epochs total_steps",
        "training.warmup_steps": "lr_warmup_steps num_warmup_steps warmup",
        "weights.delta": "delta_compression delta_weight_sync update_weight_mode",
    }.items()
    for name in names.split()
}
"""Keys of this configuration, by the last part of their names in other trainers."""
