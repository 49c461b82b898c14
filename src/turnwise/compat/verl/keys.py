"""Keys of verl's `ppo_trainer.yaml`, each with our equivalent key or a sentence that replaces it.

This table is the source of error messages, of a test of the documentation, and of verl's names in a
chat scheduler's `self.config`. A key that is not listed gets the answer for the nearest listed key
above it.

To add an answer to a key of verl: write its entry here. A test walks the keys of verl's page.
"""

ROOT = "actor_rollout_ref."
"""A section of verl's file. `_KEYS` omits this prefix in most names, and users may omit it too."""
_KEYS = {
    "model.tokenizer": "data.tokenizer model.tokenizer_path",
    "data.path": "data.train_files",
    "data.eval_path": "data.val_files",
    "data.limit": "data.train_max_samples",
    "data.eval_limit": "data.val_max_samples",
    "the class in environment chooses the row's fields": "data.prompt_key data.image_key",
    "the class in environment, or rollout.rewards, chooses the reward": "data.reward_fn_key",
    "videos are not supported": "data.video_key",
    "data.max_prompt_tokens": "data.max_prompt_length rollout.prompt_length",
    "rollout.max_response_tokens": "data.max_response_length rollout.response_length",
    "rollout.prompts_per_step": "data.train_batch_size data.gen_batch_size",
    "environments give messages": "data.return_raw_input_ids data.return_raw_chat "
    "data.return_full_prompt data.return_multi_modal_inputs",
    "data.shuffle": "data.shuffle",
    "all held-out rows are evaluated, and their order does not matter": "data.validation_shuffle",
    "seed": "data.seed",
    "data.max_prompt_tokens leaves longer prompts out": "data.filter_overlong_prompts "
    "data.filter_overlong_prompts_workers data.truncation",
    "model.trust_remote_code": "data.trust_remote_code model.trust_remote_code",
    "model.template_args": "data.apply_chat_template_kwargs",
    "data.path may be environment, whose rows the class in environment makes": "data.custom_cls",
    "data.curriculum lets rows rest that teach nothing": "data.sampler",
    "list the tools in rollout.tools": "data.tool_config_path rollout.multi_turn.tool_config_path",
    "all held-out rows are evaluated at once, up to rollout.concurrency": "data.val_batch_size",
    "model.path": "model.path",
    "model.chat_template": "model.custom_chat_template",
    "your code is imported by the names in the configuration": "model.external_lib",
    "the model's own config.json, in the folder of model.path, is used": "model.override_config",
    "training.attention": "model.override_config.attn_implementation",
    "training.activation_checkpointing": "model.enable_gradient_checkpointing "
    "model.enable_activation_offload",
    "training.packing": "model.use_remove_padding",
    "the layers are Transformers' own, and not compiled": "model.use_liger "
    "model.use_fused_kernels model.use_fused_loss model.fused_kernel_options model.tiled_mlp "
    "model.return_last_hidden_state actor.use_torch_compile",
    "model.lora.rank": "model.lora_rank",
    "model.lora.alpha": "model.lora_alpha",
    "model.lora.target_modules": "model.target_modules",
    "training starts from a merged model": "model.lora_adapter_path",
    "training.colocated": "actor_rollout_ref.hybrid_engine",
    "training.step_timeout": "actor_rollout_ref.nccl_timeout",
    "there is one trainer with FSDP2 on training.ranks processes": "actor.strategy "
    "actor.fsdp_config",
    "training.updates_per_step is the number of equal updates": "actor.ppo_mini_batch_size",
    "training.micro_batch_tokens": "actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu "
    "actor.ppo_max_token_len_per_gpu rollout.log_prob_micro_batch_size "
    "rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_max_token_len_per_gpu "
    "rollout.log_prob_use_dynamic_bsz actor.use_dynamic_bsz",
    "algorithm.teacher": "distillation",
    "training.max_grad_norm": "actor.grad_clip actor.optim.clip_grad",
    "set both algorithm.loss.clip_low and algorithm.loss.clip_high": "actor.clip_ratio",
    "algorithm.loss.clip_low": "actor.clip_ratio_low",
    "algorithm.loss.clip_high": "actor.clip_ratio_high",
    "algorithm.loss.dual_clip": "actor.clip_ratio_c",
    "algorithm.loss.name": "actor.policy_loss.loss_mode",
    "algorithm.reduction": "actor.loss_agg_mode",
    "algorithm.entropy.coef": "actor.entropy_coeff",
    "set algorithm.kl.coef above 0, with algorithm.kl.where loss": "actor.use_kl_loss",
    "algorithm.kl.coef": "actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
    "algorithm.kl.estimator": "actor.kl_loss_type algorithm.kl_penalty",
    "algorithm.correction.name": "actor.rollout_correction algorithm.rollout_correction",
    "algorithm.correction.high": "actor.rollout_correction.rollout_is_threshold",
    "training.epochs_per_step": "actor.ppo_epochs",
    "each pass over a batch has the same micro-batches": "actor.data_loader_seed actor.shuffle",
    "training.context_parallel": "actor.ulysses_sequence_parallel_size "
    "ref.ulysses_sequence_parallel_size",
    "engine.routing_replay": "actor.router_replay.mode",
    "checkpoints hold all that a run needs; turnwise export writes the model": "actor.checkpoint",
    "training.learning_rate": "actor.optim.lr",
    "training.warmup_steps": "actor.optim.lr_warmup_steps",
    "give the number of updates in training.warmup_steps": "actor.optim.lr_warmup_steps_ratio",
    "training.weight_decay": "actor.optim.weight_decay",
    "training.lr_schedule": "actor.optim.warmup_style actor.optim.lr_scheduler_type",
    "training.lr_schedule decays to 0, in one cycle": "actor.optim.min_lr_ratio "
    "actor.optim.num_cycles",
    "training.steps": "actor.optim.total_training_steps trainer.total_training_steps",
    "training.optimizer": "actor.optim actor.optim.optimizer",
    "list it in training.offload, with training.colocated true": (
        "actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload"
    ),
    "training.offload frees memory between steps only": "actor.fsdp_config.offload_policy",
    "each decoder layer is a unit, and resharded after the forward pass": (
        "actor.fsdp_config.wrap_policy actor.fsdp_config.reshard_after_forward"
    ),
    "training.ranks": "actor.fsdp_config.fsdp_size",
    "training.weights_dtype": "actor.fsdp_config.model_dtype",
    "model.dtype": "actor.fsdp_config.dtype rollout.dtype",
    "algorithm.kl.model.path": "ref.model.path",
    "it is computed as the policy is (training.micro_batch_tokens, training.offload)": "ref",
    "the engine is vLLM; the section engine has its keys": "rollout.name",
    "rollouts are always asynchronous, unless training.max_staleness is 0": "rollout.mode",
    "rollout.chat_scheduler": "rollout.chat_scheduler",
    "sampling.temperature": "rollout.temperature",
    "sampling.top_k": "rollout.top_k",
    "sampling.top_p": "rollout.top_p",
    "sampling.n": "rollout.n critic.rollout_n",
    "sampling.temperature 0 is greedy": "rollout.do_sample",
    "tokens must come from the distribution that the trainer computes": "rollout.use_fire_sampling",
    "sampling.ignore_eos": "rollout.ignore_eos",
    "engine.vllm_args has keys of these names": "rollout.gpu_memory_utilization "
    "rollout.enforce_eager rollout.enable_chunked_prefill",
    "engine.prefix_caching": "rollout.enable_prefix_caching",
    "engine.vllm_args": "rollout.engine_kwargs",
    "engines sleep while a trainer computes (training.colocated)": "rollout.free_cache_engine",
    "engines load the model of model.path, and then the trainer's weights": "rollout.load_format",
    "weights.transport gathers and sends one chunk at a time": "rollout.layered_summon "
    "rollout.update_weights_bucket_megabytes",
    "engine.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "engine.pipeline_parallel_size": "rollout.pipeline_model_parallel_size",
    "serving.workers": "rollout.data_parallel_size",
    "engine.max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "engine.max_num_seqs": "rollout.max_num_seqs",
    "model.max_length": "rollout.max_model_len",
    "engine.metrics collects them, and is the opposite": "rollout.disable_log_stats",
    "the engines' log-probs are always recorded": "rollout.calculate_log_probs",
    "eval.sampling.temperature": "rollout.val_kwargs.temperature rollout.val_kwargs.do_sample",
    "eval.sampling.top_k": "rollout.val_kwargs.top_k",
    "eval.sampling.top_p": "rollout.val_kwargs.top_p",
    "eval.sampling.n": "rollout.val_kwargs.n",
    "rollout.max_turns": "rollout.multi_turn.max_turns rollout.multi_turn.max_assistant_turns",
    "the environment's `done` ends its answers": "rollout.multi_turn.max_user_turns",
    "all calls of a turn run at once": "rollout.multi_turn.max_parallel_calls",
    "rollout.tool_max_chars": "rollout.multi_turn.max_tool_response_length",
    "an environment's `step` answers the model": "rollout.multi_turn.interaction_config_path",
    "rollout.chat_scheduler names a class with callbacks": "rollout.multi_turn.completion_callback",
    "rollout.tool_parser": "rollout.multi_turn.format",
    "rollout.loop": "rollout.multi_turn rollout.agent",
    "rollout.processes": "rollout.agent.num_workers",
    "your program may start subclasses of VllmAsyncGenerationWorker": (
        "rollout.agent.custom_async_server"
    ),
    "spans are OpenTelemetry's, and its own variables name their collector": "rollout.trace",
    "algorithm.advantage.learning_rate": "critic.optim.lr",
    "algorithm.advantage.model.path": "critic.model.path",
    "algorithm.advantage.clip": "critic.cliprange_value",
    "algorithm.advantage.name gae has a value model, and training.micro_batch_tokens": "critic",
    "rewards are computed as trajectories finish": "reward_model.reward_manager "
    "reward_model.launch_reward_fn_async",
    "rollout.tools has python and shell in a sandbox": "reward_model.sandbox_fusion",
    "name it in rollout.rewards, as {model: PATH}; it scores answers as they come": "reward_model",
    "name it in rollout.rewards, as {function: package.module:function}": "custom_reward_function",
    "algorithm.advantage.gamma": "algorithm.gamma",
    "algorithm.advantage.lam": "algorithm.lam",
    "algorithm.advantage.name": "algorithm.adv_estimator",
    "algorithm.advantage.name dr_grpo does not divide by it": "algorithm.norm_adv_by_std_in_grpo",
    "set algorithm.kl.coef above 0, with algorithm.kl.where reward": "algorithm.use_kl_in_reward",
    "algorithm.kl.coef is fixed": "algorithm.kl_ctrl",
    "algorithm.dynamic_sampling": "algorithm.filter_groups",
    "micro-batches are always balanced over the ranks": "trainer.balance_batch",
    "give the number of steps in training.steps": "trainer.total_epochs",
    "project": "trainer.project_name",
    "name": "trainer.experiment_name",
    "trackers": "trainer.logger",
    "samples_every": "trainer.log_val_generations",
    "the run folder has it (trajectories.keep)": "trainer.rollout_data_dir "
    "trainer.validation_data_dir",
    "set ray_address, serving.resources and training.resources": "trainer.nnodes",
    "set training.ranks and serving.workers": "trainer.n_gpus_per_node",
    "training.checkpoint_every": "trainer.save_freq",
    "eval.every": "trainer.test_freq",
    "held-out rows are evaluated first, unless eval.every is 0": "trainer.val_before_train",
    "turnwise eval evaluates a model": "trainer.val_only",
    "algorithm.advantage.warmup_steps": "trainer.critic_warmup",
    "turnwise train --resume FOLDER": "trainer.resume_mode trainer.resume_from_path",
    "output_dir": "trainer.default_local_dir trainer.default_hdfs_dir",
    "training.keep_last": "trainer.remove_previous_ckpt_in_save trainer.max_actor_ckpt_to_keep "
    "trainer.max_critic_ckpt_to_keep trainer.del_local_ckpt_after_load",
    "engine.start_timeout": "trainer.ray_wait_register_center_timeout",
    "GPUs are used where there are any": "trainer.device",
    "the operating system divides the cores": "ray_init.num_cpus ray_kwargs.ray_init.num_cpus",
    "ray_env": "ray_init.runtime_env.env_vars ray_kwargs.ray_init.runtime_env.env_vars",
    "ray_address": "ray_kwargs.ray_init.address",
}
VERL_KEYS = {
    f"{ROOT if name.startswith(('actor.', 'model.', 'ref', 'rollout.')) else ''}{name}": ours
    for ours, names in _KEYS.items()
    for name in names.split()
}
"""verl's keys, mapped to our keys or to sentences."""
