"""Keys of verl's `ppo_trainer.yaml`, each with the key here that does it, or a sentence about it.

Errors, the documentation's test and the names that a chat scheduler's `self.config` answers to all
come from this one table. A key below one that is listed has its answer.
"""

_RANKS = "there is one trainer with FSDP2 on training.ranks processes"
_MICRO = "training.micro_batch_tokens"
_OFFLOAD = "list it in training.offload, with training.colocated true"
_TEMPLATE = "environments give messages, which are rendered once"
_SHUFFLE = "rows are always shuffled, by seed"
_KL_LOSS = "set algorithm.kl.coef above 0, with algorithm.kl.where loss"
_KL_REWARD = "set algorithm.kl.coef above 0, with algorithm.kl.where reward"
_CHECKPOINT = "checkpoints hold weights, optimizer and position; turnwise export writes the model"
_CRITIC = "the value model of algorithm.advantage.name gae is trained beside the policy, with "
_REWARDS = "name it in rollout.rewards, as {model: PATH}"
_FUNCTION = "name it in rollout.rewards, as {function: package.module:function}"

_SECTIONS: dict[str, dict[str, str]] = {
    "data": {
        "tokenizer": "model.tokenizer",
        "train_files": "data.path",
        "val_files": "data.eval_path",
        "train_max_samples": "data.limit",
        "val_max_samples": "data.eval_limit",
        "prompt_key": "the class in environment chooses the row's fields",
        "reward_fn_key": "the class in environment, or rollout.rewards, chooses the reward",
        "image_key video_key": "images and videos are not supported",
        "max_prompt_length": "data.max_prompt_tokens",
        "max_response_length": "rollout.max_response_tokens",
        "train_batch_size gen_batch_size": "rollout.prompts_per_step",
        "val_batch_size": "all held-out rows are evaluated at once, up to rollout.concurrency",
        "return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs": (
            _TEMPLATE
        ),
        "shuffle validation_shuffle": _SHUFFLE,
        "seed": "seed",
        "filter_overlong_prompts filter_overlong_prompts_workers truncation": (
            "data.max_prompt_tokens leaves longer prompts out; none is ever cut"
        ),
        "trust_remote_code": "model.trust_remote_code",
        "apply_chat_template_kwargs": "model.template_args",
        "custom_cls": "data.path may be environment, whose rows the class in environment makes",
        "sampler": "data.curriculum lets rows rest that teach nothing",
        "tool_config_path": "list the tools in rollout.tools",
    },
    "actor_rollout_ref": {
        "hybrid_engine": "training.colocated",
        "nccl_timeout": "training.step_timeout",
    },
    "actor_rollout_ref.model": {
        "path": "model.path",
        "tokenizer_path": "model.tokenizer",
        "custom_chat_template": "model.chat_template",
        "external_lib": "your code is imported by the names in the configuration",
        "override_config": "the model's own config.json, in the folder of model.path, is used",
        "override_config.attn_implementation": "training.attention",
        "enable_gradient_checkpointing": "training.activation_checkpointing",
        "enable_activation_offload": "training.activation_checkpointing stores fewer of them",
        "trust_remote_code": "model.trust_remote_code",
        "use_remove_padding": "training.packing",
        "use_liger use_fused_kernels use_fused_loss fused_kernel_options tiled_mlp "
        "return_last_hidden_state": "the trainer computes with Transformers' own layers",
        "lora_rank": "model.lora.rank",
        "lora_alpha": "model.lora.alpha",
        "target_modules": "model.lora.target_modules",
        "lora_adapter_path": "training starts from a merged model; model.adapter is for serving",
    },
    "actor_rollout_ref.actor": {
        "strategy": _RANKS,
        "ppo_mini_batch_size": "training.updates_per_step is the number of equal updates in a step",
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu": _MICRO,
        "use_dynamic_bsz": "micro-batches are always dynamic, of training.micro_batch_tokens",
        "grad_clip": "training.max_grad_norm",
        "clip_ratio": "set both algorithm.loss.clip_low and algorithm.loss.clip_high",
        "clip_ratio_low": "algorithm.loss.clip_low",
        "clip_ratio_high": "algorithm.loss.clip_high",
        "clip_ratio_c": "algorithm.loss.dual_clip",
        "policy_loss.loss_mode": "algorithm.loss.name",
        "loss_agg_mode": "algorithm.reduction",
        "entropy_coeff": "algorithm.entropy.coef",
        "use_kl_loss": _KL_LOSS,
        "kl_loss_coef": "algorithm.kl.coef",
        "kl_loss_type": "algorithm.kl.estimator",
        "rollout_correction": "algorithm.correction.name is the kind of correction",
        "rollout_correction.rollout_is": "algorithm.correction.name",
        "rollout_correction.rollout_is_threshold": "algorithm.correction.high",
        "use_torch_compile": "the trainer's models are not compiled",
        "ppo_epochs": "training.epochs_per_step",
        "data_loader_seed shuffle": "each pass over a batch has the same micro-batches",
        "ulysses_sequence_parallel_size": "training.context_parallel",
        "router_replay.mode": "engine.routing_replay",
        "checkpoint": _CHECKPOINT,
        "optim.lr": "training.learning_rate",
        "optim.lr_warmup_steps": "training.warmup_steps",
        "optim.lr_warmup_steps_ratio": "give the number of updates in training.warmup_steps",
        "optim.weight_decay": "training.weight_decay",
        "optim.warmup_style optim.lr_scheduler_type": "training.lr_schedule",
        "optim.min_lr_ratio optim.num_cycles": "training.lr_schedule is constant or linear",
        "optim.total_training_steps": "training.steps",
        "optim.clip_grad": "training.max_grad_norm",
        "optim": "the optimizer is AdamW, with training.learning_rate and training.weight_decay",
        "fsdp_config": _RANKS,
        "fsdp_config.param_offload": _OFFLOAD,
        "fsdp_config.optimizer_offload": _OFFLOAD,
        "fsdp_config.offload_policy": "training.offload frees memory between steps only",
        "fsdp_config.wrap_policy": "each decoder layer is a unit of FSDP2",
        "fsdp_config.reshard_after_forward": "weights are always resharded after the forward pass",
        "fsdp_config.fsdp_size": "training.ranks",
        "fsdp_config.model_dtype": "training.weights_dtype",
        "fsdp_config.dtype": "model.dtype",
    },
    "actor_rollout_ref.ref": {
        "fsdp_config": "it is sharded as the policy is, and moves with it (training.offload)",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz": _MICRO,
        "ulysses_sequence_parallel_size": "training.context_parallel",
        "strategy use_torch_compile": "the reference model is computed as the policy is",
        "model.path": "algorithm.kl.model.path",
    },
    "actor_rollout_ref.rollout": {
        "name": "the engine is vLLM; the section engine has its keys",
        "mode": "rollouts are always asynchronous: training.max_staleness lets them run ahead of "
        "the trainer, and 0 is synchronous training",
        "chat_scheduler": "rollout.chat_scheduler",
        "temperature": "sampling.temperature",
        "top_k": "sampling.top_k",
        "top_p": "sampling.top_p",
        "n": "sampling.n",
        "do_sample": "sampling.temperature 0 is greedy",
        "use_fire_sampling": "tokens must come from the distribution that the trainer computes",
        "prompt_length": "data.max_prompt_tokens",
        "response_length": "rollout.max_response_tokens",
        "dtype": "model.dtype",
        "ignore_eos": "sampling.ignore_eos",
        "gpu_memory_utilization": "engine.vllm_args has it: {gpu_memory_utilization: 0.5}",
        "enforce_eager": "engine.vllm_args has it: {enforce_eager: true}",
        "enable_chunked_prefill": "engine.vllm_args has it: {enable_chunked_prefill: true}",
        "enable_prefix_caching": "engine.prefix_caching",
        "engine_kwargs": "engine.vllm_args",
        "free_cache_engine": "engines sleep while a colocated trainer computes "
        "(training.colocated)",
        "load_format": "engines load the model of model.path, and then the trainer's weights",
        "layered_summon": "weights are gathered one tensor at a time",
        "tensor_model_parallel_size": "engine.tensor_parallel_size",
        "pipeline_model_parallel_size": "engine.pipeline_parallel_size",
        "data_parallel_size": "serving.workers",
        "max_num_batched_tokens": "engine.max_num_batched_tokens",
        "max_num_seqs": "engine.max_num_seqs",
        "max_model_len": "model.max_length",
        "disable_log_stats": "engine.metrics collects them, and is the opposite",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz": _MICRO,
        "calculate_log_probs": "the engines' log-probs are always recorded",
        "update_weights_bucket_megabytes": "chunks have a size of their own (weights.transport)",
        "val_kwargs.temperature": "eval.sampling.temperature",
        "val_kwargs.top_k": "eval.sampling.top_k",
        "val_kwargs.top_p": "eval.sampling.top_p",
        "val_kwargs.n": "eval.sampling.n",
        "val_kwargs.do_sample": "eval.sampling.temperature 0 is greedy",
        "multi_turn.enable": "rollout.loop",
        "multi_turn.max_turns multi_turn.max_assistant_turns": "rollout.max_turns",
        "multi_turn.max_user_turns": "the environment's `done` ends its answers; rollout.max_turns "
        "counts the model's",
        "multi_turn.max_parallel_calls": "all calls of a turn run at once; a Tool may be in_order",
        "multi_turn.max_tool_response_length": "rollout.tool_max_chars",
        "multi_turn.tool_config_path": "list the tools in rollout.tools",
        "multi_turn.interaction_config_path": "an environment's `step` answers the model",
        "multi_turn.completion_callback": "rollout.chat_scheduler names a class that leads "
        "conversations",
        "multi_turn.format": "rollout.tool_parser",
        "multi_turn": "rollout.loop chooses how turns follow each other",
        "agent.num_workers": "rollout.processes",
        "agent.default_agent_loop": "rollout.loop",
        "agent": "rollout.loop names a class of your own",
        "agent.custom_async_server": "runs start workers of their own; your program may start a "
        "subclass of VllmAsyncGenerationWorker",
        "trace": "spans are OpenTelemetry's, and its own variables name their collector",
    },
    "critic": {
        "optim.lr": "algorithm.advantage.learning_rate",
        "model.path": "algorithm.advantage.model.path",
        "cliprange_value": "algorithm.advantage.clip",
        "rollout_n": "sampling.n",
        "optim": f"{_CRITIC}algorithm.advantage.learning_rate",
        "model": f"{_CRITIC}algorithm.advantage.model",
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu": _MICRO,
        "strategy ppo_mini_batch_size use_dynamic_bsz ulysses_sequence_parallel_size ppo_epochs "
        "shuffle grad_clip checkpoint": f"{_CRITIC}the same updates",
    },
    "reward_model": {
        "enable": _REWARDS,
        "model.path": _REWARDS,
        "model": _REWARDS,
        "strategy micro_batch_size micro_batch_size_per_gpu max_length use_dynamic_bsz "
        "ulysses_sequence_parallel_size forward_max_token_len_per_gpu": (
            "a reward model in rollout.rewards scores answers as they come"
        ),
        "reward_manager launch_reward_fn_async": (
            "rewards are always computed as trajectories finish; rollout.rewards lists their parts"
        ),
        "sandbox_fusion": "rollout.tools has python and shell in a sandbox",
    },
    "custom_reward_function": {"path": _FUNCTION, "name": _FUNCTION},
    "algorithm": {
        "gamma": "algorithm.advantage.gamma",
        "lam": "algorithm.advantage.lam",
        "adv_estimator": "algorithm.advantage.name",
        "norm_adv_by_std_in_grpo": "algorithm.advantage.name dr_grpo does not divide by it",
        "use_kl_in_reward": _KL_REWARD,
        "kl_penalty": "algorithm.kl.estimator",
        "kl_ctrl": "algorithm.kl.coef is fixed",
        "kl_ctrl.kl_coef": "algorithm.kl.coef",
        "filter_groups": "algorithm.dynamic_sampling",
        "rollout_correction": "algorithm.correction.name is the kind of correction",
    },
    "trainer": {
        "balance_batch": "micro-batches are always balanced over the ranks",
        "total_epochs": "give the number of steps in training.steps",
        "total_training_steps": "training.steps",
        "project_name": "project",
        "experiment_name": "name",
        "logger": "trackers",
        "log_val_generations": "samples_every",
        "rollout_data_dir validation_data_dir": "trajectories.keep: the run folder has all of them",
        "nnodes": "set ray_address, and serving.resources and training.resources place the actors",
        "n_gpus_per_node": "set training.ranks and serving.workers",
        "save_freq": "training.checkpoint_every",
        "test_freq": "eval.every",
        "val_before_train": "held-out rows are evaluated before the first step, unless eval.every "
        "is 0",
        "val_only": "turnwise eval evaluates a model",
        "critic_warmup": "algorithm.advantage.warmup_steps",
        "resume_mode resume_from_path": "turnwise train --resume FOLDER continues a run",
        "default_local_dir": "output_dir",
        "default_hdfs_dir": "output_dir",
        "remove_previous_ckpt_in_save max_actor_ckpt_to_keep max_critic_ckpt_to_keep": (
            "training.keep_last"
        ),
        "del_local_ckpt_after_load": "training.keep_last",
        "ray_wait_register_center_timeout": "engine.start_timeout",
        "device": "GPUs are used where there are any",
    },
    "ray_init": {
        "num_cpus": "Ray reserves no cores; the operating system divides them",
        "runtime_env.env_vars": "ray_env",
    },
    "ray_kwargs.ray_init": {
        "num_cpus": "Ray reserves no cores; the operating system divides them",
        "runtime_env.env_vars": "ray_env",
        "address": "ray_address",
    },
}
VERL_KEYS = {
    f"{section}.{name}": ours
    for section, keys in _SECTIONS.items()
    for names, ours in keys.items()
    for name in names.split()
}
"""Keys here, or sentences, by verl's keys."""
SCHEDULER_SECTION = "actor_rollout_ref.rollout"
"""The section that a chat scheduler of verl gets as its configuration."""


def verl_answer(key: str) -> str | None:
    """Return the key here, or the sentence, for a key of verl's or one below it; None for others.

    A key of the sections `rollout`, `actor`, `model` and `ref` may be without `actor_rollout_ref`.
    """
    short = f"actor_rollout_ref.{key}"
    if short in VERL_KEYS:
        return VERL_KEYS[short]
    while key and key not in VERL_KEYS:
        key = key.rpartition(".")[0]
    return VERL_KEYS.get(key)
