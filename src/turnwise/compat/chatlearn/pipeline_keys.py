"""Keys of a pipeline's file: supported, partly supported, and without effect."""

from collections.abc import Callable

from turnwise.compat.chatlearn.yaml_file import Settings

OWN_SECTIONS = ("pipeline", "models", "runtime", "runtime_env", "includes")
"""Sections of a pipeline's file beside those of a configuration."""
CONVERSATION = "turnwise.pipeline.conversation:Conversation"
"""Default of `environment`: rows are prompts, answered in one turn."""
REWARDS = "rollout.rewards"

KINDS: dict[str, Settings] = {
    "grpo": {"algorithm.advantage.name": "grpo"},
    "ppo": {
        "algorithm.advantage.name": "gae",
        "algorithm.kl.where": "reward",
        "algorithm.kl.estimator": "k1",
    },
    "online_dpo": {"algorithm.loss.name": "dpo"},
}
"""Defaults of each kind of pipeline."""
ONLY_FOR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            f"algorithm.advantage.{key}"
            for key in ("gamma", "lam", "clip", "learning_rate", "model.path", "model.dtype")
        ),
        ("ppo",),
    ),
    "algorithm.loss.beta": ("online_dpo",),
    "algorithm.loss.clip_low": ("ppo", "grpo"),
    "algorithm.loss.clip_high": ("ppo", "grpo"),
}
"""Keys that only some kinds of pipeline have; the others ignore them in the files of models."""
KL_COEF = 0.02
"""Default weight of the KL penalty towards a reference model that the file names."""

RUNTIME = {
    "num_episode": "training.steps",
    "save_episode_interval": "training.checkpoint_every",
    "eval_episode_interval": "eval.every",
    "data_path": "data.path",
    "eval_data_path": "data.eval_path",
    "training_data_num_limit": "data.limit",
    "eval_data_num_limit": "data.eval_limit",
    "output_dir": "output_dir",
    "exp_name": "name",
}
"""Keys of `runtime` that stand for one key of the configuration."""
SIZES = ("sample_per_episode", "train_global_batch_size", "train_micro_batch_size")
COMPUTED = (*SIZES, "colocation", "debug", "enable_resume_training")
FIXED: dict[str, tuple[Callable[[object], bool], str]] = {
    "num_training_epoch": (
        lambda value: value == 1,
        "a sample is trained once; set it to 1 and raise num_episode",
    ),
    "max_relay_episode": (
        lambda value: value in (0, 1),
        "samples of earlier episodes are not trained again; set it to 0",
    ),
    "data_ratio": (lambda value: value is None, "mix the data into one file of data_path"),
}
"""Keys that accept only some values: a test of the value, and advice for the others."""

_ENGINES = "engines take as many requests together as engine.max_num_seqs and their memory allow"
_ALWAYS = "every update is checked on a prompt whose log-probs the trainer knows"
_MEMORY = "engines sleep while the trainer computes, where they share their processes"
_TRANSPORT = "weights.transport selects how weights are sent"
NO_EFFECT = {
    "generation_batch_size": _ENGINES,
    "batch_generation": _ENGINES,
    "validate_param_sync": _ALWAYS,
    "data_checkpoint_path": "each checkpoint contains the position in the data",
    "max_data_ckpt_nums": "training.keep_last sets the number of checkpoints kept",
    "enable_eval_before_training": "with evaluations, the model is evaluated before the first step",
    "log_interval": "every step is written to metrics.jsonl",
    **dict.fromkeys(
        ("concurrent_comm", "param_sync_comm_type", "param_sync_max_workers", "sync_frequency"),
        _TRANSPORT,
    ),
    **dict.fromkeys(("free_sync_collective_group", "coalesced_buffer_mb"), _TRANSPORT),
    **dict.fromkeys(
        (
            "free_memory",
            "force_free_memory",
            "offload_optimizer_states",
            "offload_weights",
            "free_grad_buffers",
            "bucket_size_mb_in_memory_manager",
            "sync_memory_optimization_level",
        ),
        _MEMORY,
    ),
    **dict.fromkeys(
        ("gpu_per_process", "num_cpu", "cpu_per_process", "cpu_schedule_strategy"),
        "training.resources and serving.resources say which resources processes ask Ray for",
    ),
    **dict.fromkeys(
        ("nsys", "profiler_dir", "concurrent_setup", "stream_data_loader_type"),
        "there is only one way",
    ),
}
"""Keys that are accepted and change nothing, and why."""
MODEL_KEYS = (
    "model_config_file",
    "num_gpu",
    "num_device",
    "num_replica",
    "trainable",
    "function",
    "weight",
    "lora",
)
