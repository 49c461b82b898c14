"""The rules for keys of the configuration whose values change when a run is resumed.

A resumed run follows its current configuration, while the checkpoint provides the weights, the
optimizer's moments, and the positions in the schedule and in the data. The few keys that a
checkpoint depends on cannot change.
"""

from turnwise.config.explain import known_keys
from turnwise.config.load import value_of
from turnwise.config.schema import Config
from turnwise.errors import InputError

OnResume = tuple[bool, str]
"""The rule of a key, or of all keys of a section: whether it may change, and the effect of a change
or the reason why it cannot change."""
_KEYS: dict[OnResume, str] = {
    (False, "a run is resumed in its own folder, which may be moved as a whole"): "name output_dir",
    (False, "the order of the rows that are left in this epoch depends on it"): "seed data.shuffle",
    (True, "applies from the next step on"): (
        "deterministic exactness model.max_length data.max_prompt_tokens data.max_rest "
        "algorithm.advantage algorithm.loss algorithm.reduction algorithm.kl "
        "algorithm.correction algorithm.dynamic_sampling algorithm.overlong_tokens "
        "algorithm.overlong_penalty algorithm.entropy algorithm.off_policy_mask_threshold "
        "algorithm.mask_truncated training.max_staleness training.stale_policy"
    ),
    (True, "applies from now on; groups that were waiting keep their rewards"): "environment",
    (True, "applies from now on; groups that were waiting keep the log-probs of the one before"): (
        "algorithm.teacher"
    ),
    (True, "applies from now on; see data.path where the rows depend on it"): "environment_args",
    (
        True,
        "applies from now on, if their names and rows stay; weights count from now on",
    ): "environments",
    (True, "applies from now on"): (
        "trackers project entity tags samples_every log_level watchdog_seconds ray_address "
        "ray_env model.trust_remote_code engine serving weights training.context_parallel "
        "training.colocated training.offload training.resources data.allow_urls "
        "training.activation_checkpointing training.packing training.attention "
        "training.micro_batch_tokens training.threads training.step_timeout "
        "training.checkpoint_every training.checkpoint_minutes training.keep_last "
        "training.restarts training.max_skipped trajectories alarms metrics"
    ),
    (True, "for a copy of the same model elsewhere; another model does not fit"): (
        "model.path algorithm.advantage.model"
    ),
    (False, "training does not start from an adapter"): "model.adapter",
    (True, "for a copy of the same tokenizer elsewhere"): "model.tokenizer",
    (True, "applies to new groups, and to models that are saved"): "model.chat_template",
    (True, "applies from now on; weights that learn are kept as they are"): "model.dtype",
    (True, "applies to new groups"): "model.template_args model.escape_special_tokens rollout",
    (False, "the checkpoint's adapter has this form"): "model.lora",
    (
        False,
        "the checkpoint has moments of the weights that were trained alone",
    ): "model.train_vision",
    (True, "for the same rows elsewhere: other rows are refused, and edited ones are named"): (
        "data.path data.subset data.split data.limit data.filter"
    ),
    (True, "applies to the next evaluation"): (
        "data.eval_path data.eval_sets data.eval_split data.eval_limit eval"
    ),
    (True, "applies from now on; false forgets the outcomes of earlier groups"): "data.curriculum",
    (True, "applies to new groups; those that were waiting keep their size"): "sampling",
    (
        True,
        "applies from the next step on; to one with a value model only if the checkpoint has one",
    ): "algorithm.advantage.name",
    (True, "applies from the next update on"): (
        "algorithm.advantage.learning_rate training.learning_rate training.weight_decay "
        "training.max_grad_norm"
    ),
    (True, "counts the steps of the whole run"): "algorithm.advantage.warmup_steps",
    (
        True,
        "applies from the next step on; an adaptive coefficient goes on from the checkpoint's",
    ): ("algorithm.entropy.coef"),
    (True, "another reference model from now on; with kl.sync_steps, the checkpoint's model"): (
        "algorithm.kl.model"
    ),
    (True, "applies from the next step on; 0 brings the original reference model back"): (
        "algorithm.kl.sync_steps"
    ),
    (True, "the new end of the run, also of its schedule"): "training.steps",
    (True, "a checkpoint can be loaded with any number, except with adamw_8bit"): "training.ranks",
    (False, "the checkpoint's weights and moments have this type"): "training.weights_dtype",
    (False, "the checkpoint has the moments of this optimizer"): "training.optimizer",
    (True, "applies from the next step on; a schedule counts updates"): (
        "training.updates_per_step training.epochs_per_step"
    ),
    (True, "the schedule is the new one, at the checkpoint's update"): (
        "training.warmup_steps training.lr_schedule"
    ),
}
RULES = {key: rule for rule, keys in _KEYS.items() for key in keys.split()}
"""The rules by key. The rule of a section applies to its keys without a rule of their own."""


def rule_of(key: str) -> OnResume | None:
    """Return the rule of a key: its own rule, or the rule of the nearest section above it."""
    while key and key not in RULES:
        key = key.rpartition(".")[0]
    return RULES.get(key)


def check_unchanged(saved: Config, config: Config) -> None:
    """Raise an `InputError` that names the first changed key that may not change on resume."""
    trees = saved.model_dump(), config.model_dump()
    for key in known_keys():
        may_change, meaning = rule_of(key) or (True, "")
        before, now = (value_of(tree, key) for tree in trees)
        if not may_change and before != now:
            raise InputError(
                f"{key} cannot change from {before} to {now} when a run is resumed: {meaning}"
            )
