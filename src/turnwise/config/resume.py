"""The rule of each key of the configuration when a run is resumed with another value.

A resumed run does what its configuration says now; the checkpoint provides the weights, the
optimizer's moments, the position in the schedule and in the data. The few keys that a checkpoint
depends on cannot change.
"""

from collections.abc import Mapping

from turnwise.config.explain import known_keys
from turnwise.config.load import value_of
from turnwise.config.schema import Config
from turnwise.errors import InputError

OnResume = tuple[bool, str]
"""The rule of a key, or of all keys of a section: whether it may change; and the effect of another
value, or the reason why there can be none."""


def _each(rule: OnResume, keys: str, section: str = "") -> dict[str, OnResume]:
    return {section + key: rule for key in keys.split()}


_HOME = (False, "a run is resumed in its own folder, which may be moved as a whole")
_ADAPTER = (False, "the checkpoint's adapter has this form")
_SHOWN = (True, "applies from now on")
_DATA = (True, "applies from now on, if the number of rows stays and they have the same names")
_SAME_MODEL = (True, "for a copy of the same model elsewhere; another model does not fit")
_OPTIMIZER = (True, "applies from the next update on")
_LIMIT = (True, "applies from the next step on")

RULES: Mapping[str, OnResume] = {
    **_each(_HOME, "name output_dir"),
    "seed": (False, "the order of the rows that are left in this epoch depends on it"),
    **_each(_LIMIT, "deterministic exactness"),
    "environment": (True, "applies from now on; groups that were waiting keep their rewards"),
    "environment_args": (True, "applies from now on; see data.path where the rows depend on it"),
    "environments": (
        True,
        "applies from now on, if their names and numbers of rows stay; weights count from now on",
    ),
    **_each(
        _SHOWN, "trackers project entity tags samples_every log_level watchdog_seconds ray_address"
    ),
    "model.path": _SAME_MODEL,
    "model.adapter": (False, "training does not start from an adapter"),
    "model.tokenizer": (True, "for a copy of the same tokenizer elsewhere"),
    "model.chat_template": (True, "applies to new groups, and to models that are saved"),
    "model.dtype": (True, "applies from now on; weights that learn are kept as they are"),
    "model.max_length": _LIMIT,
    "model.trust_remote_code": _SHOWN,
    **_each((True, "applies to new groups"), "template_args escape_special_tokens", "model."),
    "model.lora": _ADAPTER,
    **_each(_DATA, "path subset split limit", "data."),
    **_each((True, "applies to the next evaluation"), "eval_path eval_split eval_limit", "data."),
    "data.max_prompt_tokens": _LIMIT,
    "data.curriculum": (True, "applies from now on; false forgets the outcomes of earlier groups"),
    "data.max_rest": _LIMIT,
    "rollout": (True, "applies to new groups"),
    "sampling": (True, "applies to new groups; those that were waiting keep their size"),
    "eval": (True, "applies to the next evaluation"),
    **_each(_SHOWN, "engine serving weights"),
    "algorithm.advantage": _LIMIT,
    "algorithm.advantage.name": (
        True,
        "applies from the next step on; to one with a value model only if the checkpoint has one",
    ),
    "algorithm.advantage.learning_rate": _OPTIMIZER,
    "algorithm.advantage.warmup_steps": (True, "counts the steps of the whole run"),
    "algorithm.advantage.model": _SAME_MODEL,
    **_each(_LIMIT, "loss reduction kl", "algorithm."),
    "algorithm.kl.model": (True, "another reference model from now on"),
    **_each(_LIMIT, "correction dynamic_sampling overlong_tokens overlong_penalty", "algorithm."),
    "training.steps": (True, "the new end of the run, also of its schedule"),
    **_each(_LIMIT, "max_staleness stale_policy", "training."),
    "training.ranks": (True, "a checkpoint can be loaded with any number of ranks"),
    **_each(
        _SHOWN, "context_parallel colocated offload resources activation_checkpointing", "training."
    ),
    "training.weights_dtype": (False, "the checkpoint's weights and moments have this type"),
    **_each(_SHOWN, "packing attention", "training."),
    "training.updates_per_step": (True, "applies from the next step on; a schedule counts updates"),
    "training.learning_rate": _OPTIMIZER,
    **_each(
        (True, "the schedule is the new one, at the checkpoint's update"),
        "warmup_steps lr_schedule",
        "training.",
    ),
    **_each(_OPTIMIZER, "weight_decay max_grad_norm", "training."),
    **_each(
        _SHOWN,
        "micro_batch_tokens threads step_timeout checkpoint_every checkpoint_minutes keep_last "
        "restarts max_skipped",
        "training.",
    ),
    **_each(_SHOWN, "trajectories alarms metrics"),
}
"""The rules by key. A section stands for those of its keys that have none of their own."""


def rule_of(key: str) -> OnResume | None:
    """Return the rule of a key: its own, or that of the nearest section above it."""
    while key and key not in RULES:
        key = key.rpartition(".")[0]
    return RULES.get(key)


def check_unchanged(saved: Config, config: Config) -> None:
    """Check that a resumed run changes only what may change; name the first key that may not."""
    trees = saved.model_dump(), config.model_dump()
    for key in known_keys():
        may_change, meaning = rule_of(key) or (True, "")
        before, now = (value_of(tree, key) for tree in trees)
        if not may_change and before != now:
            raise InputError(
                f"{key} cannot change from {before} to {now} when a run is resumed: {meaning}"
            )
