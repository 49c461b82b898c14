"""Names of keys in other trainers and engines."""

_NO_PENALTY = (
    "a penalty samples from a different distribution than the one the trainer computes; shape "
    "answers with the reward or sampling.temperature"
)

_NO_SWAP = (
    "vLLM recomputes preempted requests instead of swapping them; give engine.kv_cache_gib "
    "enough room"
)

_BATCHES = (
    "vLLM forms its batches token by token; limit them with engine.max_num_seqs and "
    "engine.max_num_batched_tokens"
)

_GRAPHS = (
    "vLLM captures CUDA graphs by batch size; set engine.vllm_args.max_cudagraph_capture_size, or "
    "engine.vllm_args.enforce_eager to disable them"
)

_EXPERTS = "set engine.routing_replay to record the experts of each token and train with them"

# Keys of other systems that neither current vLLM nor turnwise reads, and their replacements.
REPLACED_KEYS = {
    "use_beam_search": "vLLM no longer supports beam search; use sampling.n with "
    "sampling.temperature for several answers to one prompt",
    "early_stopping": "it belongs to beam search, which vLLM no longer supports; use sampling.n",
    "length_penalty": "it belongs to beam search, which vLLM no longer supports; use sampling.n",
    "best_of": "vLLM removed it; sample several answers with sampling.n, and the reward ranks them",
    "presence_penalty": _NO_PENALTY,
    "frequency_penalty": _NO_PENALTY,
    "repetition_penalty": _NO_PENALTY,
    "min_p": "the trainer does not compute min_p; use sampling.top_p or sampling.top_k",
    "max_paddings": "vLLM packs batches without padding; limit a batch with "
    "engine.max_num_seqs and engine.max_num_batched_tokens",
    "batch_generation": _BATCHES,
    "vllm_micro_batch_size": _BATCHES,
    "num_scheduler_steps": "vLLM schedules every step while it computes; limit a batch with "
    "engine.max_num_seqs",
    "max_seq_len_to_capture": _GRAPHS,
    "max_context_len_to_capture": _GRAPHS,
    "swap_space": _NO_SWAP,
    "blocks_to_swap_in": _NO_SWAP,
    "blocks_to_swap_out": _NO_SWAP,
    "blocks_to_copy": "vLLM shares the blocks of a common prefix instead of copying them; see "
    "engine.prefix_caching",
    "enable_return_routed_experts": _EXPERTS,
    "aux_output_config": _EXPERTS,
    "sliding_window": "the model's own config.json sets it for both the engine and the trainer; "
    "change it in the folder of model.path, or limit the context with model.max_length",
}

_NEUTRAL: dict[str, float] = {
    "best_of": 1,
    "length_penalty": 1,
    "num_scheduler_steps": 1,
    "repetition_penalty": 1,
    "vllm_micro_batch_size": -1,
}
"""Values of these keys that have no effect, in addition to false, 0 and empty ones."""


def asks_for_nothing(key: str, value: object) -> bool:
    """Return whether a value of one of `REPLACED_KEYS` is equivalent to leaving the key out."""
    if isinstance(value, dict):
        return all(asks_for_nothing(key, below) for below in value.values())
    return value in (None, False, 0, "", [], "None") or value == _NEUTRAL.get(key)


# Key here by the last part of its name in other trainers.
ALIASES = {
    "actor_lr": "training.learning_rate",
    "adv_estimator": "algorithm.advantage.name",
    "batch_size": "rollout.prompts_per_step",
    "beta": "algorithm.kl.coef",
    "chat_template_path": "model.chat_template",
    "clip_eps": "algorithm.loss.clip_high",
    "clip_grad": "training.max_grad_norm",
    "clip_ratio": "algorithm.loss.clip_high",
    "cliprange": "algorithm.loss.clip_high",
    "cliprange_value": "algorithm.advantage.clip",
    "context_length": "model.max_length",
    "context_parallel_size": "training.context_parallel",
    "custom_chat_template": "model.chat_template",
    "data_path": "data.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "enable_routing_replay": "engine.routing_replay",
    "env": "environment",
    "env_args": "environment_args",
    "env_config": "environment_args",
    "env_kwargs": "environment_args",
    "epochs": "training.steps",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "eval_data_num_limit": "data.eval_limit",
    "eval_data_path": "data.eval_path",
    "eval_dataset": "data.eval_path",
    "eval_episode_interval": "eval.every",
    "eval_freq": "eval.every",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "eval_temperature": "eval.sampling.temperature",
    "eval_top_k": "eval.sampling.top_k",
    "eval_top_p": "eval.sampling.top_p",
    "exp_name": "name",
    "generation_batch_size": "engine.max_num_seqs",
    "grad_clip": "training.max_grad_norm",
    "gradient_checkpointing": "training.activation_checkpointing",
    "group_size": "sampling.n",
    "init_kl_coef": "algorithm.kl.coef",
    "kl_beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "load": "model.path",
    "logger": "trackers",
    "logging": "trackers",
    "logits_processor_pattern": "engine.logits_processors_allowed",
    "loss_type": "algorithm.loss.name",
    "lora_alpha": "model.lora.alpha",
    "lora_dim": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.lr_schedule",
    "lr_scheduler_type": "training.lr_schedule",
    "max_cache_size": "serving.known_sessions",
    "max_completion_length": "sampling.max_tokens",
    "max_model_len": "model.max_length",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_seq_len": "model.max_length",
    "max_seq_length": "model.max_length",
    "max_steps": "training.steps",
    "micro_batch_size": "training.micro_batch_tokens",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "new_token_limit": "sampling.max_tokens",
    "num_engines": "serving.workers",
    "num_episode": "training.steps",
    "num_epochs": "training.steps",
    "num_generations": "sampling.n",
    "num_gpus": "training.ranks",
    "num_inference_per_prompt": "sampling.n",
    "num_ppo_episode": "training.steps",
    "num_rollouts": "sampling.n",
    "num_samples": "sampling.n",
    "num_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "num_workers": "serving.workers",
    "output": "output_dir",
    "per_device_train_batch_size": "training.micro_batch_tokens",
    "pipeline_model_parallel_size": "engine.pipeline_parallel_size",
    "ppo_epochs": "training.updates_per_step",
    "prompt_length": "data.max_prompt_tokens",
    "report_to": "trackers",
    "response_length": "sampling.max_tokens",
    "reward": "rollout.rewards",
    "reward_fn": "rollout.rewards",
    "reward_funcs": "rollout.rewards",
    "rollout_n": "sampling.n",
    "run_name": "name",
    "sample_per_episode": "rollout.prompts_per_step",
    "save_episode_interval": "training.checkpoint_every",
    "save_freq": "training.checkpoint_every",
    "save_interval": "training.checkpoint_every",
    "save_steps": "training.checkpoint_every",
    "save_total_limit": "training.keep_last",
    "seq_length": "model.max_length",
    "stop_token_list": "sampling.stop",
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "test_freq": "eval.every",
    "tokenizer_model": "model.tokenizer",
    "tokenizer_path": "model.tokenizer",
    "total_steps": "training.steps",
    "train_batch_size": "rollout.prompts_per_step",
    "train_dataset": "data.path",
    "train_file": "data.path",
    "train_files": "data.path",
    "train_micro_batch_size": "training.micro_batch_tokens",
    "training_data_num_limit": "data.limit",
    "ulysses_sequence_parallel_size": "training.context_parallel",
    "use_rslora": "model.lora.rslora",
    "val_file": "data.eval_path",
    "val_files": "data.eval_path",
    "warmup": "training.warmup_steps",
}
