"""NeMo-RL's programs for GRPO: `setup` and `grpo_train`, called with the program's own dataset and
environments.

A program's configuration becomes ours. The keys in `_CARRIED` keep their values under the name that
`other_keys` gives them. A feature that cannot be carried over is an error that names its key.

    python run_grpo_sliding_puzzle.py --config grpo.yaml [key.sub=value ...]
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path

from torch.utils.data import IterableDataset

from turnwise.compat.keys import answer
from turnwise.compat.nemo_rl.environments import TaskEnvironment, row_of
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.problems import Lazy, Row

Dataset = Iterable[Mapping[str, Foreign]]
"""A dataset of `DatumSpec`s, of torch's two kinds: by index, or only iterable."""
_CARRIED = (
    *("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.max_rollout_turns"),
    *("grpo.seed", "grpo.val_period", "grpo.max_val_samples", "grpo.overlong_filtering"),
    *("grpo.val_num_generations_per_prompt", "loss_fn.reference_policy_kl_penalty"),
    *("loss_fn.reference_policy_kl_type", "loss_fn.ratio_clip_c"),
    *("policy.model_name", "policy.max_total_sequence_length", "policy.precision"),
    *("policy.max_grad_norm", "policy.optimizer.kwargs.lr", "policy.optimizer.kwargs.weight_decay"),
    *("policy.dtensor_cfg.activation_checkpointing", "policy.dtensor_cfg.context_parallel_size"),
    *("policy.generation.max_new_tokens", "policy.generation.temperature"),
    *("policy.generation.top_p", "policy.generation.top_k", "policy.generation.stop_strings"),
    *("policy.generation.stop_token_ids", "policy.generation.val_temperature"),
    *("policy.generation.val_top_p", "policy.generation.val_top_k"),
    "policy.generation.vllm_cfg.tensor_parallel_size",
    *("checkpointing.save_period", "checkpointing.keep_top_k"),
)
"""Keys whose values mean the same under our names; null leaves our default."""
_CLIPS = {"loss_fn.ratio_clip_min": "clip_low", "loss_fn.ratio_clip_max": "clip_high"}
_LORA = {"dim": "rank", "alpha": "alpha"}
_REFUSED = (
    *("policy.megatron_cfg.enabled", "policy.draft.enabled", "grpo.reward_shaping.enabled"),
    *("grpo.reward_scaling.enabled", "grpo.use_dynamic_sampling", "grpo.advantage_clip_low"),
    *("grpo.advantage_clip_high", "grpo.invalid_tool_call_advantage"),
    *("grpo.malformed_thinking_advantage", "loss_fn.disable_ppo_ratio"),
    *("loss_fn.positive_example_nll_weight", "loss_fn.truncated_importance_sampling_type"),
    *("env.should_use_nemo_gym", "grpo.stop_at_validation_metric"),
)
"""Keys of features that a program's configuration cannot switch on here."""


class _Settings(dict[str, Foreign]):
    """A section whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Foreign:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name}") from None

    __setattr__ = dict.__setitem__


def _section(value: Foreign) -> Foreign:
    if isinstance(value, Mapping):
        return _Settings({key: _section(each) for key, each in value.items()})
    return value


class MasterConfig(_Settings):
    """A program's whole configuration; sections are attributes and items.

    Example:
        config = MasterConfig(**OmegaConf.to_container(load_config("grpo.yaml"), resolve=True))
        config.grpo.seed, config.policy["model_name"]
    """

    def __init__(self, **sections: Foreign) -> None:
        super().__init__(_section(sections))


def setup(
    config: MasterConfig, tokenizer: Foreign, dataset: Dataset, val_dataset: Dataset | None = None
) -> tuple[Foreign, ...]:
    """Return the 13 values that NeMo-RL's `setup` returns, for `grpo_train`. Only the dataloaders
    (here the datasets) and the configuration are more than None: `grpo_train` starts the rest.

    Raises:
        InputError: when the configuration asks for a feature that cannot be carried over.
    """
    keys_of(config)
    return *[None] * 4, dataset, val_dataset, *[None] * 4, config, None, None


def grpo_train(
    policy: None,
    policy_generation: None,
    dataloader: Dataset,
    val_dataloader: Dataset | None,
    tokenizer: Foreign,
    loss_fn: None,
    task_to_env: Mapping[str, Foreign],
    val_task_to_env: Mapping[str, Foreign] | None,
    logger: None,
    checkpointer: None,
    grpo_save_state: None,
    master_config: MasterConfig,
) -> None:
    """Train on a dataset's problems with the environments of their tasks.

    The run folder is `checkpointing.checkpoint_dir`, or `logger.log_dir` without checkpoints. A
    program that is started again with as many steps continues from the folder's last checkpoint.
    """
    import turnwise

    config, keys = master_config, keys_of(master_config)
    prompts, steps = config.grpo.num_prompts_per_step, config.grpo.max_num_steps
    if isinstance(dataloader, Sized):
        epochs = config.grpo.get("max_num_epochs") or 1
        steps = min(steps, max(1, epochs * len(dataloader) // prompts))
    heldout = None
    if val_dataloader is None:
        keys["eval.every"] = 0
    else:
        heldout = _rows(val_dataloader, config.grpo.get("max_val_samples") or 256, heldout=True)
    environments = {False: task_to_env, True: val_task_to_env or task_to_env}

    def environment(row: Row) -> TaskEnvironment:
        return TaskEnvironment(row, environments["heldout" in row])

    folder = Path(keys["output_dir"]) / keys["name"]
    resume = folder if any(folder.glob("checkpoints/step-*")) else None
    turnwise.train(
        environment=environment,
        data=_rows(dataloader, prompts * steps),
        eval_data=heldout,
        steps=steps,
        resume=resume,
        **keys,
    )


def _rows(dataset: Dataset, count: int, *, heldout: bool = False) -> Sequence[Row]:
    """Return a dataset's rows, at most `count` if it is only iterable; each is made when it is
    read."""
    mark = {"heldout": True} if heldout else {}
    if hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        indexed: Foreign = dataset
        return Lazy(len(indexed), lambda index: {**row_of(indexed[index]), **mark})
    read, lock, made = iter(dataset), threading.Lock(), list[Row]()

    def row(index: int) -> Row:
        with lock:
            while len(made) <= index:
                made.append({**row_of(next(read)), **mark})
        return made[index]

    return Lazy(min(count, len(dataset)) if isinstance(dataset, Sized) else count, row)


def keys_of(config: MasterConfig) -> dict[str, Foreign]:
    """Return a program's configuration as ours, by dotted keys."""
    flat = dict(_flat(config, ""))
    for key in _REFUSED:
        if flat.get(key):
            raise InputError(f"{key} cannot be carried over: {answer(key) or 'leave it out'}")
    found = {key: flat[key] for key in _CARRIED if flat.get(key) is not None}
    keys: dict[str, Foreign] = {str(answer(key)): value for key, value in found.items()}

    def on(key: str) -> bool:
        return bool(flat.get(key))

    loss = "cispo" if on("loss_fn.use_cispo") else "ppo_clip"
    if on("loss_fn.sequence_level_importance_ratios"):
        loss = "gspo"
    keys["algorithm.loss.name"] = loss
    for theirs, ours in _CLIPS.items():
        if flat.get(theirs) is not None:
            keys[f"algorithm.loss.{ours}"] = flat[theirs]
    normalized = flat.get("grpo.normalize_rewards", True)
    other = "rloo" if flat.get("grpo.use_leave_one_out_baseline", True) else "dr_grpo"
    keys["algorithm.advantage.name"] = "grpo" if normalized else other
    whole = flat.get("loss_fn.token_level_loss", True)
    keys["algorithm.reduction"] = "token_mean" if whole else "sequence_mean"
    if on("loss_fn.use_kl_in_reward"):
        keys["algorithm.kl.where"] = "reward"
    if on("loss_fn.use_importance_sampling_correction"):
        bound = flat.get("loss_fn.truncated_importance_sampling_ratio")
        keys |= {"algorithm.correction.name": "token_tis", "algorithm.correction.high": bound}
    if on("grpo.async_grpo.enabled"):
        keys["training.max_staleness"] = flat["grpo.async_grpo.max_trajectory_age_steps"]
    if on("policy.dtensor_cfg.lora_cfg.enabled"):
        lora = config.policy.dtensor_cfg.lora_cfg
        keys |= {f"model.lora.{ours}": lora[theirs] for theirs, ours in _LORA.items()}
    if not on("checkpointing.enabled"):
        keys["training.checkpoint_every"] = 0
    key = "checkpointing.checkpoint_dir" if on("checkpointing.enabled") else "logger.log_dir"
    folder = Path(flat.get(key) or "runs/grpo")
    return {
        "eval.every": 0,
        **keys,
        "output_dir": str(folder.parent),
        "name": folder.name,
        "data.shuffle": on("data.shuffle"),
        "rollout.loop": "turnwise.compat.nemo_rl.environments:MessageLogLoop",
    }


def _flat(tree: Mapping[str, Foreign], prefix: str) -> Iterator[tuple[str, Foreign]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
