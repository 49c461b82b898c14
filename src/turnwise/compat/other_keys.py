"""Keys of the configurations of NeMo-RL, SkyRL, prime-rl and slime, each with our equivalent key or
a sentence that replaces it.

Each name is a key as that system's own files have it (flags of slime without their dashes), or a
section of such keys. A key that is not listed gets the answer for the nearest listed section above
it. The tables are sources of error messages only: no key of another system changes a run.

To add an answer to a key of another system: write its entry into that system's table. A test walks
the keys of whole files of these systems.
"""

_ONE_LAYOUT = (
    "there is one trainer with FSDP2: training.ranks, training.context_parallel, training.offload"
)
_ENGINE_ONLY = "the engine is vLLM; the section engine has its keys"
_UNITS = "training.micro_batch_tokens limits a micro-batch in tokens"
_TRACKER = "trackers names the trackers; project and name name the run there"
_ENVIRONMENT = "environment names a class; environment_args are its arguments"

_NEMO_RL = {
    "rollout.prompts_per_step": "grpo.num_prompts_per_step",
    "sampling.n": "grpo.num_generations_per_prompt",
    "rollout.max_turns": "grpo.max_rollout_turns",
    "training.steps": "grpo.max_num_steps dpo.max_num_steps sft.max_num_steps",
    "give the number of steps in training.steps": "grpo.max_num_epochs sft.max_num_epochs",
    "algorithm.advantage.scale": "grpo.normalize_rewards",
    "algorithm.advantage.name rloo leaves the trajectory itself out": (
        "grpo.use_leave_one_out_baseline"
    ),
    "algorithm.advantage.name": "grpo.adv_estimator",
    "eval.every": "grpo.val_period sft.val_period dpo.val_period",
    "held-out rows are evaluated first, unless eval.every is 0": "grpo.val_at_start",
    "held-out rows are evaluated after the last step": "grpo.val_at_end",
    "evaluations begin at step 0, and come every eval.every steps": "grpo.val_start_at",
    "data.eval_limit": "grpo.max_val_samples",
    "eval.sampling.n": "grpo.val_num_generations_per_prompt",
    "all held-out rows are evaluated at once, up to rollout.concurrency": "grpo.val_batch_size",
    "algorithm.mask_truncated": "grpo.overlong_filtering",
    "seed": "grpo.seed",
    "algorithm.dynamic_sampling": "grpo.use_dynamic_sampling "
    "grpo.dynamic_sampling_max_gen_batches grpo.batch_multiplier",
    "rollout.rewards adds or scales a reward (name, weight, overlong_tokens)": (
        "grpo.reward_shaping grpo.reward_scaling reward_penalties"
    ),
    "training.max_staleness": "grpo.async_grpo grpo.async_grpo.max_trajectory_age_steps",
    "weights are always updated while requests are in progress": (
        "grpo.async_grpo.in_flight_weight_updates "
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates"
    ),
    "algorithm has the keys of advantages and losses": "grpo ppo dpo",
    "turnwise sft trains on conversations; training has the keys": "sft",
    "algorithm.kl.coef": "loss_fn.reference_policy_kl_penalty",
    "algorithm.kl.estimator": "loss_fn.reference_policy_kl_type",
    "set algorithm.kl.coef above 0, with algorithm.kl.where reward": "loss_fn.use_kl_in_reward",
    "algorithm.loss.clip_low": "loss_fn.ratio_clip_min",
    "algorithm.loss.clip_high": "loss_fn.ratio_clip_max",
    "algorithm.loss.dual_clip": "loss_fn.ratio_clip_c",
    "algorithm.loss.name": "loss_fn loss_fn.use_cispo loss_fn.disable_ppo_ratio",
    "algorithm.loss.name gspo has the sequence's ratio": "loss_fn.sequence_level_importance_ratios",
    "algorithm.reduction": "loss_fn.token_level_loss",
    "algorithm.correction.name": "loss_fn.use_importance_sampling_correction "
    "loss_fn.truncated_importance_sampling_type",
    "algorithm.correction.high": "loss_fn.truncated_importance_sampling_ratio",
    "algorithm.correction.low": "loss_fn.truncated_importance_sampling_ratio_min",
    "training.checkpoint_every": "checkpointing.save_period",
    "training.keep_last": "checkpointing.keep_top_k",
    "output_dir": "checkpointing.checkpoint_dir logger.log_dir",
    "training.checkpoint_every and training.keep_last choose the checkpoints": "checkpointing",
    "model.path": "policy.model_name",
    "model.tokenizer": "policy.tokenizer policy.tokenizer.name",
    "model.chat_template": "policy.tokenizer.chat_template",
    "model.template_args": "policy.tokenizer.chat_template_kwargs",
    "the model's own config.json, in the folder of model.path, is used": (
        "policy.hf_config_overrides"
    ),
    "training.updates_per_step is the number of equal updates": "policy.train_global_batch_size",
    _UNITS: "policy.train_micro_batch_size policy.logprob_batch_size policy.dynamic_batching "
    "policy.generation_batch_size policy.logprob_chunk_size "
    "policy.make_sequence_length_divisible_by",
    "training.packing": "policy.sequence_packing policy.sequence_packing.enabled",
    "model.max_length": "policy.max_total_sequence_length data.max_input_seq_length",
    "model.dtype": "policy.precision policy.generation.vllm_cfg.precision",
    "training.activation_checkpointing": "policy.dtensor_cfg.activation_checkpointing "
    "policy.megatron_cfg.activation_checkpointing",
    "training.context_parallel": "policy.dtensor_cfg.context_parallel_size "
    "policy.megatron_cfg.context_parallel_size",
    "list it in training.offload, with training.colocated true": "policy.dtensor_cfg.cpu_offload "
    "policy.offload_optimizer_for_logprob",
    "model.lora.rank": "policy.dtensor_cfg.lora_cfg policy.dtensor_cfg.lora_cfg.dim",
    "model.lora.alpha": "policy.dtensor_cfg.lora_cfg.alpha",
    "model.lora.target_modules": "policy.dtensor_cfg.lora_cfg.target_modules",
    "model.lora.target_modules all-linear": "policy.dtensor_cfg.lora_cfg.match_all_linear",
    _ONE_LAYOUT: "policy policy.dtensor_cfg policy.megatron_cfg",
    "training.max_grad_norm": "policy.max_grad_norm",
    "training.optimizer": "policy.optimizer policy.optimizer.name",
    "training.learning_rate": "policy.optimizer.kwargs.lr policy.megatron_cfg.optimizer.lr",
    "training.weight_decay": "policy.optimizer.kwargs.weight_decay "
    "policy.megatron_cfg.optimizer.weight_decay",
    "training.lr_schedule": "policy.scheduler",
    "sampling.max_tokens": "policy.generation.max_new_tokens",
    "sampling.temperature": "policy.generation.temperature",
    "sampling.top_p": "policy.generation.top_p",
    "sampling.top_k": "policy.generation.top_k",
    "eval.sampling.temperature": "policy.generation.val_temperature",
    "eval.sampling.top_p": "policy.generation.val_top_p",
    "eval.sampling.top_k": "policy.generation.val_top_k",
    "sampling.stop": "policy.generation.stop_strings",
    "sampling.stop_token_ids": "policy.generation.stop_token_ids",
    "serving.ports": "policy.generation.port_range_low policy.generation.port_range_high",
    "engine.tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "engine.pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "engine.vllm_args has keys of these names": "policy.generation.vllm_cfg "
    "policy.generation.vllm_cfg.gpu_memory_utilization policy.generation.vllm_cfg.enforce_eager",
    "serving.worker_servers": "policy.generation.vllm_cfg.expose_http_server",
    "engine.vllm_args": "policy.generation.vllm_kwargs",
    "weights.transport": "policy.generation.refit_transport policy.generation.refit_cfg",
    "training.colocated": "policy.generation.colocated policy.generation.colocated.enabled",
    "set serving.workers, ray_address and serving.resources": (
        "policy.generation.colocated.resources"
    ),
    _ENGINE_ONLY: "policy.generation policy.draft",
    "data.shuffle": "data.shuffle",
    "data.path": "data.dataset_name data.train data.train.dataset_name data.train.data_path",
    "data.eval_path": "data.validation data.validation.dataset_name data.validation.data_path",
    "the class in environment makes the prompt from the row": "data.default data.prompt_file "
    "data.system_prompt_file",
    _ENVIRONMENT: "env",
    _TRACKER: "logger",
    "the number of held-out trajectories in the log is samples_every's": (
        "logger.num_val_samples_to_print"
    ),
    "set training.ranks and serving.workers": "cluster.gpus_per_node",
    "set ray_address, serving.resources and training.resources": "cluster cluster.num_nodes",
    "samples are sent by Ray": "data_plane",
    "the chat template makes the ids": "data.add_bos data.add_eos data.add_generation_prompt",
    "rows are read in the driver, as problems begin": "data.num_workers "
    "data.use_multiple_dataloader",
    "algorithm.teacher": "on_policy_distillation",
}

_SKYRL = {
    "data.path": "data.train_data",
    "data.eval_path": "data.val_data",
    "rows are read in the driver, as problems begin": "data.dataloader",
    "training.colocated": "trainer.placement trainer.placement.colocate_all",
    "set training.ranks and serving.workers": "trainer.placement.policy_num_gpus_per_node",
    _ONE_LAYOUT: "trainer.strategy trainer.policy trainer.policy.fsdp_config "
    "trainer.policy.megatron_config trainer.sequence_parallel_backend",
    "model.path": "trainer.policy.model.path",
    "model.lora.rank": "trainer.policy.model.lora trainer.policy.model.lora.rank",
    "model.lora.alpha": "trainer.policy.model.lora.alpha",
    "model.lora.target_modules": "trainer.policy.model.lora.target_modules",
    "training.learning_rate": "trainer.policy.optimizer_config.lr",
    "training.weight_decay": "trainer.policy.optimizer_config.weight_decay",
    "training.max_grad_norm": "trainer.policy.optimizer_config.max_grad_norm",
    "training.warmup_steps": "trainer.policy.optimizer_config.num_warmup_steps",
    "training.lr_schedule": "trainer.policy.optimizer_config.scheduler",
    "training.optimizer": "trainer.policy.optimizer_config",
    "training.context_parallel": "trainer.policy.sequence_parallel_size",
    "list it in training.offload, with training.colocated true": (
        "trainer.policy.optimizer_config.offload_after_step trainer.policy.fsdp_config.cpu_offload"
    ),
    "algorithm.kl.model.path": "trainer.ref.model.path",
    "it is computed as the policy is (training.micro_batch_tokens, training.offload)": (
        "trainer.ref"
    ),
    "algorithm.advantage.model.path": "trainer.critic.model.path",
    "algorithm.advantage.learning_rate": "trainer.critic.optimizer_config.lr",
    "algorithm.advantage.name gae has a value model, and training.micro_batch_tokens": (
        "trainer.critic"
    ),
    "algorithm.advantage.name": "trainer.algorithm.advantage_estimator",
    "algorithm.kl.estimator": "trainer.algorithm.kl_estimator_type",
    "set algorithm.kl.coef above 0, with algorithm.kl.where reward": (
        "trainer.algorithm.use_kl_in_reward"
    ),
    "set algorithm.kl.coef above 0, with algorithm.kl.where loss": "trainer.algorithm.use_kl_loss",
    "algorithm.kl.coef is fixed": "trainer.algorithm.kl_ctrl",
    "algorithm.kl.coef": "trainer.algorithm.kl_loss_coef",
    "algorithm.entropy.coef": "trainer.algorithm.entropy_loss_coef "
    "trainer.algorithm.use_entropy_loss",
    "algorithm.loss.name": "trainer.algorithm.policy_loss_type trainer.algorithm.sapo "
    "trainer.algorithm.cispo trainer.algorithm.clip_cov trainer.algorithm.kl_cov",
    "algorithm.reduction": "trainer.algorithm.loss_reduction",
    "algorithm.advantage.scale": "trainer.algorithm.grpo_norm_by_std",
    "algorithm.advantage.lam": "trainer.algorithm.lambd",
    "algorithm.advantage.gamma": "trainer.algorithm.gamma",
    "algorithm.advantage.clip": "trainer.algorithm.value_clip",
    "algorithm.loss.clip_low": "trainer.algorithm.eps_clip_low",
    "algorithm.loss.clip_high": "trainer.algorithm.eps_clip_high",
    "algorithm.loss.dual_clip": "trainer.algorithm.clip_ratio_c",
    "algorithm.loss.divergence": "trainer.algorithm.dppo",
    "algorithm.correction.name": "trainer.algorithm.off_policy_correction "
    "trainer.algorithm.use_tis",
    "algorithm.correction.high": "trainer.algorithm.tis_imp_ratio_cap",
    "algorithm.dynamic_sampling": "trainer.algorithm.dynamic_sampling "
    "trainer.algorithm.zero_variance_filter",
    "algorithm has the keys of advantages and losses": "trainer.algorithm",
    "training.max_staleness": "trainer.fully_async trainer.fully_async.max_staleness_steps",
    "rollout.concurrency": "trainer.fully_async.num_parallel_generation_workers",
    "training.activation_checkpointing": "trainer.gradient_checkpointing "
    "trainer.gradient_checkpointing_use_reentrant",
    "seed": "trainer.seed",
    "turnwise train --resume FOLDER": "trainer.resume_mode trainer.resume_path",
    "output_dir": "trainer.ckpt_path trainer.export_path trainer.log_path",
    "training.keep_last": "trainer.max_ckpts_to_keep",
    "training.checkpoint_every": "trainer.ckpt_interval",
    "turnwise export writes a model of Transformers": "trainer.hf_save_interval",
    "model.dtype": "trainer.bf16 generator.inference_engine.model_dtype",
    "give the number of steps in training.steps": "trainer.epochs",
    "training.steps": "trainer.max_training_steps",
    "training.epochs_per_step": "trainer.update_epochs_per_batch",
    "rollout.prompts_per_step": "trainer.train_batch_size",
    "training.updates_per_step is the number of equal updates": "trainer.policy_mini_batch_size "
    "trainer.critic_mini_batch_size",
    _UNITS: "trainer.micro_train_batch_size_per_gpu trainer.micro_forward_batch_size_per_gpu "
    "trainer.max_tokens_per_microbatch trainer.remove_microbatch_padding",
    "all held-out rows are evaluated at once, up to rollout.concurrency": "trainer.eval_batch_size",
    "held-out rows are evaluated first, unless eval.every is 0": "trainer.eval_before_train",
    "eval.every": "trainer.eval_interval",
    "data.max_prompt_tokens": "trainer.max_prompt_length",
    "training.attention": "trainer.flash_attn",
    "project": "trainer.project_name",
    "name": "trainer.run_name",
    "trackers": "trainer.logger",
    "the run folder has it (trajectories.keep)": "trainer.dump_data_batch "
    "trainer.dump_eval_results",
    "serving.workers": "generator.inference_engine.num_engines "
    "generator.inference_engine.data_parallel_size",
    "weights.transport": "generator.inference_engine.weight_sync_backend",
    "weights.delta": "generator.inference_engine.delta_weight_sync",
    "engine.tensor_parallel_size": "generator.inference_engine.tensor_parallel_size",
    "engine.pipeline_parallel_size": "generator.inference_engine.pipeline_parallel_size",
    "engine.prefix_caching": "generator.inference_engine.enable_prefix_caching",
    "engine.routing_replay": "generator.inference_engine.enable_return_routed_experts",
    "engine.max_num_batched_tokens": "generator.inference_engine.max_num_batched_tokens",
    "engine.max_num_seqs": "generator.inference_engine.max_num_seqs",
    "engine.vllm_args": "generator.inference_engine.engine_init_kwargs",
    "engine.vllm_args has keys of these names": "generator.inference_engine",
    "sampling.n": "generator.n_samples_per_prompt",
    "rollouts are always asynchronous, unless training.max_staleness is 0": "generator.batched "
    "generator.async_engine",
    "rollout.max_turns": "generator.max_turns",
    "model.max_length": "generator.max_input_length",
    "model.chat_template": "generator.chat_template",
    "model.template_args": "generator.chat_template_kwargs",
    "the section sampling has its keys": "generator.sampling_params",
    "sampling.max_tokens": "generator.sampling_params.max_generate_length",
    "sampling.temperature": "generator.sampling_params.temperature trainer.algorithm.temperature",
    "sampling.top_p": "generator.sampling_params.top_p",
    "sampling.min_p": "generator.sampling_params.min_p",
    "sampling.top_k": "generator.sampling_params.top_k",
    "sampling.stop": "generator.sampling_params.stop",
    "the section eval.sampling has its keys": "generator.eval_sampling_params",
    "eval.sampling.n": "generator.eval_n_samples_per_prompt",
    "algorithm.mask_truncated": "generator.apply_overlong_filtering "
    "generator.zero_reward_on_non_stop",
    "each turn's tokens are kept, whatever the chat template does": "generator",
    "environment": "environment.env_class",
    _ENVIRONMENT: "environment.skyrl_gym",
}

_PRIME_RL = {
    "training.steps": "max_steps",
    "model.max_length": "seq_len inference.vllm.max_model_len",
    "model.path": "model.name orchestrator.model.name trainer.model.name",
    "set training.ranks and serving.workers": "deployment deployment.num_train_gpus "
    "deployment.num_infer_gpus",
    "see docs/how-to/slurm.md": "slurm",
    _TRACKER: "monitors wandb",
    "training.checkpoint_every": "ckpt ckpt.interval",
    "training.keep_last": "ckpt.keep_last",
    "training.context_parallel": "trainer.model.cp",
    "training.activation_checkpointing": "trainer.model.ac",
    "the layers are Transformers' own, and not compiled": "trainer.model.compile",
    "training.attention": "trainer.model.attn",
    "model.lora.rank": "trainer.model.lora trainer.model.lora.rank orchestrator.model.lora",
    "model.lora.alpha": "trainer.model.lora.alpha",
    "model.lora.target_modules": "trainer.model.lora.target_modules",
    _ONE_LAYOUT: "trainer trainer.model",
    "training.optimizer": "trainer.optim trainer.optim.type",
    "training.learning_rate": "trainer.optim.lr optim.lr",
    "training.weight_decay": "trainer.optim.weight_decay optim.weight_decay",
    "training.max_grad_norm": "trainer.optim.max_norm optim.max_norm",
    "training.lr_schedule": "trainer.scheduler trainer.scheduler.type",
    "training.warmup_steps": "trainer.scheduler.warmup_steps",
    "algorithm.loss.name": "trainer.loss trainer.loss.type",
    "weights.transport": "trainer.weight_broadcast weight_broadcast",
    "rollout.prompts_per_step": "orchestrator.batch_size",
    "sampling.n": "orchestrator.group_size orchestrator.rollouts_per_example",
    "training.max_staleness": "orchestrator.max_off_policy_steps max_async_level",
    "rollout.concurrency": "orchestrator.concurrency orchestrator.concurrency.max_inflight",
    "algorithm.advantage.name": "orchestrator.algo orchestrator.advantage",
    "algorithm.teacher": "orchestrator.algo.teacher orchestrator.teacher",
    "the section sampling has its keys": "orchestrator.train.sampling orchestrator.sampling",
    "sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens "
    "orchestrator.sampling.max_tokens",
    "sampling.temperature": "orchestrator.train.sampling.temperature "
    "orchestrator.sampling.temperature",
    "environments": "orchestrator.train.source orchestrator.env orchestrator.train.env",
    "algorithm.dynamic_sampling": "orchestrator.buffer orchestrator.train.filters",
    "eval.every": "orchestrator.eval orchestrator.eval.interval",
    "data.eval_limit": "orchestrator.eval.num_examples",
    "the section eval.sampling has its keys": "orchestrator.eval.sampling",
    "eval.sampling.max_tokens": "orchestrator.eval.sampling.max_completion_tokens",
    "eval.sampling.n": "orchestrator.eval.group_size",
    "data.eval_path": "orchestrator.eval.source",
    "model.chat_template": "orchestrator.renderer",
    "the driver schedules rollouts; rollout and serving have its keys": "orchestrator",
    "engine.tensor_parallel_size": "inference.vllm.tensor_parallel_size inference.parallel.tp",
    "serving.workers": "inference.vllm.data_parallel_size inference.parallel.dp",
    "engine.routing_replay": "inference.vllm.enable_return_routed_experts "
    "trainer.enable_router_replay",
    "rollout.tool_parser": "inference.vllm.tool_call_parser",
    "engine.vllm_args has keys of these names": "inference inference.vllm",
    "turnwise train --resume FOLDER": "resume",
    "ray_env": "env_vars inference.env_vars",
    "name": "run.name",
    "data.path": "data.name",
}

_SLIME = {
    "model.path": "hf_checkpoint",
    "turnwise train --resume FOLDER": "load",
    "algorithm.kl.model.path": "ref_load",
    "output_dir": "save",
    "training.checkpoint_every": "save_interval",
    "data.path": "prompt_data",
    "data.eval_path": "eval_prompt_data",
    "the class in environment chooses the row's fields": "input_key label_key metadata_key "
    "tool_key",
    "prompts are always made by the chat template": "apply_chat_template",
    "data.shuffle": "rollout_shuffle",
    "the class in environment, or rollout.rewards, chooses the reward": "rm_type custom_rm_path "
    "reward_key",
    "training.steps": "num_rollout",
    "rollout.prompts_per_step": "rollout_batch_size",
    "sampling.n": "n_samples_per_prompt",
    "sampling.max_tokens": "rollout_max_response_len",
    "data.max_prompt_tokens": "rollout_max_prompt_len",
    "model.max_length": "rollout_max_context_len",
    "sampling.temperature": "rollout_temperature",
    "sampling.top_p": "rollout_top_p",
    "sampling.top_k": "rollout_top_k",
    "sampling.stop": "rollout_stop",
    "sampling.stop_token_ids": "rollout_stop_token_ids",
    "training.updates_per_step is the number of equal updates": "global_batch_size "
    "num_steps_per_rollout",
    "micro-batches are always balanced over the ranks": "balance_data",
    "eval.every": "eval_interval",
    "eval.sampling.n": "n_samples_per_eval_prompt",
    "eval.sampling.max_tokens": "eval_max_response_len",
    "eval.sampling.temperature": "eval_temperature",
    "eval.sampling.top_p": "eval_top_p",
    _UNITS: "use_dynamic_batch_size max_tokens_per_gpu micro_batch_size "
    "log_probs_max_tokens_per_gpu",
    "algorithm.advantage.name": "advantage_estimator",
    "set algorithm.kl.coef above 0, with algorithm.kl.where loss": "use_kl_loss",
    "algorithm.kl.coef": "kl_loss_coef",
    "algorithm.kl.estimator": "kl_loss_type",
    "algorithm.entropy.coef": "entropy_coef",
    "set both algorithm.loss.clip_low and algorithm.loss.clip_high": "eps_clip",
    "algorithm.loss.clip_high": "eps_clip_high",
    "algorithm.loss.dual_clip": "eps_clip_c",
    "algorithm.correction.name": "use_tis",
    "algorithm.correction.high": "tis_clip",
    "training.learning_rate": "lr",
    "training.lr_schedule": "lr_decay_style",
    "training.warmup_steps": "lr_warmup_iters",
    "training.weight_decay": "weight_decay",
    "training.max_grad_norm": "clip_grad",
    "training.activation_checkpointing": "recompute_granularity recompute_method "
    "recompute_num_layers",
    "engine.tensor_parallel_size": "rollout_num_gpus_per_engine",
    "set serving.workers": "rollout_num_gpus",
    "set training.ranks and serving.workers": "actor_num_nodes actor_num_gpus_per_node",
    "training.colocated": "colocate",
    "algorithm.dynamic_sampling": "over_sampling_batch_size dynamic_sampling_filter_path",
    "rollout.loop": "custom_generate_function_path rollout_function_path",
    "engine.vllm_args has keys of the engine's memory": "sglang_mem_fraction_static",
    "model.lora.rank": "lora_rank",
    _ONE_LAYOUT: "sequence_parallel expert_model_parallel_size expert_tensor_parallel_size",
    "training.attention": "attention_backend",
    "training.optimizer": "adam_beta1 adam_beta2",
    "there is no dropout": "attention_dropout hidden_dropout",
    "training.weights_dtype is float32 by default": "accumulate_allreduce_grads_in_fp32 "
    "attention_softmax_in_fp32",
}

OTHER_KEYS = {
    name: ours
    for table in (_SLIME, _PRIME_RL, _SKYRL, _NEMO_RL)
    for ours, names in table.items()
    for name in names.split()
}
"""Keys of these systems, mapped to our keys or to sentences."""
