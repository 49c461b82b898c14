"""The file of a pipeline: several models, each with its own file, and how they are trained.

    pipeline: ppo                    # or grpo, or online_dpo
    models:
      policy:     {model_config_file: policy.yaml}       # samples: see `model_file`
      reference:  {model_config_file: reference.yaml}    # for the KL penalty
      reward:     {model_config_file: reward.yaml}       # a reward model; or {function: a.b:c}
      value:      {model_config_file: value.yaml}        # ppo: the value model
      ppo_policy: {model_config_file: ppo_policy.yaml}   # training of the policy
      ppo_value:  {model_config_file: ppo_value.yaml}    # training of the value model
    runtime:
      colocation: [policy,ppo_policy]
      num_episode: ${num_episode:200}
      sample_per_episode: 1024
      data_path: ${data_path}
    rollout: {concurrency: 64}       # any section of a configuration

The names are ChatLearn's. All of it becomes one `Config`: the models' files and `runtime` are
translated to keys of the configuration; sections of the configuration in the same file win over
them, and overrides win over everything. The models are:

    policy       the engines; `num_gpu` devices (serving.workers, each of
                 engine.tensor_parallel_size)
    ppo_policy   the trainer; `num_gpu` processes (training.ranks). `policy` in its group of
                 `colocation` is training.colocated
    reference    algorithm.kl.model, a frozen model in the trainer's processes
    value,       algorithm.advantage.model, in the trainer's processes: both files are of the same
    ppo_value    model, which learns in every step
                 with model.lora (ppo_policy's `lora`), an adapter on the policy's weights
    reward,      an entry of rollout.rewards: a model in its own process, or a function
    any_reward

Keys of `runtime` and the keys that they set (s samples an episode, n = sampling.n):

    num_episode              training.steps
    sample_per_episode       rollout.prompts_per_step = s / n
    train_global_batch_size  training.updates_per_step = s / train_global_batch_size
    train_micro_batch_size   training.micro_batch_tokens = train_micro_batch_size * model.max_length
    save_episode_interval    training.checkpoint_every
    eval_episode_interval    eval.every
    data_path, eval_data_path                      data.path, data.eval_path
    training_data_num_limit, eval_data_num_limit   data.limit, data.eval_limit; -1 is all
    output_dir, exp_name     output_dir, name
    debug                    log_level
    enable_resume_training   false: an existing run is an error instead of being resumed

Files of models beside the policy have sections `model` (path, dtype), `training` and `algorithm`
(ppo_policy; ppo_value has training.learning_rate), or ChatLearn's flat keys: load, bf16; in
ppo_policy lr, lr_warmup_iters, lr_decay_style, clip_grad, weight_decay, init_kl_coef, cliprange,
gamma, lam, dpo_weight, seq_length, recompute_activations; in ppo_value lr and cliprange_value.
They may include the files that the policy's file includes. A reference without a weight for its
penalty gets algorithm.kl.coef 0.02; ppo subtracts the penalty from the rewards.

Accepted keys without effect are listed when the pipeline starts (`PipelineFile.notes`).
Without `environment` the rows of the data are `{"prompt": text}` or `{"messages": [...]}`,
answered in one turn. `${NAME:default}` is the value of an environment variable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from turnwise.compat.chatlearn.lora_keys import lora_settings
from turnwise.compat.chatlearn.model_file import read_model_file
from turnwise.compat.chatlearn.pipeline_keys import (
    COMPUTED,
    CONVERSATION,
    FIXED,
    KINDS,
    KL_COEF,
    MODEL_KEYS,
    NO_EFFECT,
    ONLY_FOR,
    OWN_SECTIONS,
    REWARDS,
    RUNTIME,
)
from turnwise.compat.chatlearn.role_file import ROLES, model_settings, nearest, role_of
from turnwise.compat.chatlearn.sizes import batch_sizes, worker_count
from turnwise.compat.chatlearn.yaml_file import Settings, load_merged, merged
from turnwise.config import Config, apply_override, make_config, set_key
from turnwise.config.base import Tree
from turnwise.errors import InputError


@dataclass(slots=True)
class PipelineFile:
    """The contents of a pipeline's file and of its models' files."""

    config: Config
    resumes: bool = True
    """Whether a run that already exists is resumed."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each group of keys without effect."""


def is_pipeline_file(path: str | Path) -> bool:
    """Return whether a YAML file is a pipeline's: whether it has `models` or `runtime`."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # the next reader reports it
    return isinstance(tree, dict) and not tree.keys().isdisjoint(("models", "runtime"))


def read_pipeline_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> PipelineFile:
    """Read a pipeline's file and the files of its models.

    Args:
        overrides: `key.sub=value` changes, of `models` and `runtime` or of the configuration.
        settings: Values by dotted keys of the configuration, over the file and under overrides.

    Raises:
        InputError: naming the file and every key that cannot be used, or two files that disagree.

    Example:
        config = read_pipeline_file("rlhf.yaml", ["runtime.num_episode=10"]).config
    """
    return _Reader(Path(path).expanduser(), overrides, settings or {}).read()


class _Reader:
    """Reads one pipeline's file; collects all mistakes before it raises."""

    def __init__(self, path: Path, overrides: Sequence[str], over: Mapping[str, object]) -> None:
        self._path = path
        self._tree = load_merged(path, "file")
        for override in overrides:
            if _section_of(override) in OWN_SECTIONS:
                apply_override(self._tree, override)
        self._overrides = [o for o in overrides if _section_of(o) not in OWN_SECTIONS]
        self._over = over
        self._settings: Settings = {}
        self._devices: int | None = None
        """Devices of the policy's engines, where the file gives their number."""
        self._sources: dict[str, str] = {}
        self._mistakes: list[str] = []
        self._without_effect: dict[str, list[str]] = {}

    def read(self) -> PipelineFile:
        models, runtime = self._section("models"), self._section("runtime")
        unknown = self._tree.keys() - {*OWN_SECTIONS, *Config.model_fields}
        for name in sorted(map(str, unknown)):
            known = [*OWN_SECTIONS, *Config.model_fields]
            self._mistakes.append(f"there is no section {name}{nearest(name, known)}")
        entries = {str(name): self._entry(str(name), entry) for name, entry in models.items()}
        if "policy" not in entries:
            self._mistakes.append("models needs a policy: the model that samples and is trained")
        kind = self._kind(entries)
        rewards: list[Tree] = []
        for name, entry in entries.items():
            role = role_of(name)
            if role is None:
                known = [*ROLES, "policy"]
                self._mistakes.append(
                    f"models.{name} is no model of a pipeline{nearest(name, known)} "
                    "(a reward's name ends in _reward)"
                )
            elif role == "reward":
                rewards.append(self._reward(name, entry))
            else:
                if kind != "ppo" and role in ("value", "ppo_value"):
                    self._without_effect.setdefault("only ppo has a value model", []).append(
                        f"models.{name}"
                    )
                self._take(name, role, entry)
        if rewards:
            self._put(REWARDS, rewards, "models")
        self._runtime(runtime)
        self._colocation(runtime.get("colocation"), entries)
        self._raise_mistakes()
        for key, kinds in ONLY_FOR.items():
            if kind not in kinds:
                self._settings.pop(key, None)
        for key, value in KINDS[kind].items():
            self._settings.setdefault(key, value)
        if "reference" in entries and kind != "online_dpo":
            self._settings.setdefault("algorithm.kl.coef", KL_COEF)
        workers = self._workers()
        sizes = batch_sizes(self._path, runtime, self._config(workers))
        config = self._config(workers | sizes)
        self._check_kind(kind, config)
        resumes = bool(runtime.get("enable_resume_training", True))
        notes = [
            f"{', '.join(keys)}: no effect; {why}" for why, keys in self._without_effect.items()
        ]
        return PipelineFile(config, resumes, notes)

    def _section(self, name: str) -> Tree:
        section = self._tree.get(name) or {}
        if not isinstance(section, dict):
            raise InputError(f"{self._path}: {name} must hold keys and values, not {section!r}")
        return section

    def _kind(self, entries: Mapping[str, Tree]) -> str:
        """Return the kind of pipeline, decided by its models where the file does not name it."""
        kind = self._tree.get("pipeline")
        if kind is None:
            return "ppo" if {"value", "ppo_value"} & entries.keys() else "grpo"
        if kind not in KINDS:
            self._mistakes.append(f"pipeline is one of {', '.join(KINDS)}, not {kind!r}")
            return "grpo"
        return str(kind)

    def _check_kind(self, kind: str, config: Config) -> None:
        """Refuse keys of the configuration that make it another kind of pipeline."""
        wanted = {key: value for key, value in KINDS[kind].items() if key.endswith(".name")}
        for key, value in wanted.items():
            _, part, _ = key.split(".")
            found = getattr(config.algorithm, part).name
            if found != value and (kind != "grpo" or found == "gae"):
                raise InputError(f"{self._path}: pipeline {kind} needs {key} {value}, not {found}")

    def _entry(self, name: str, entry: object) -> Tree:
        """Return one model's keys without those that have no effect."""
        if entry is not None and not isinstance(entry, dict):
            raise InputError(f"{self._path}: models.{name} must hold keys and values")
        known = self._known(f"models.{name}", entry or {}, MODEL_KEYS)
        learns = name in ("ppo_policy", "ppo_value")
        if known.pop("trainable", learns) is not learns:
            self._mistakes.append(
                f"models.{name}.trainable is {not learns}: ppo_policy and ppo_value learn, and no "
                "others"
            )
        return known

    def _known(self, section: str, values: Tree, known: Sequence[str]) -> Tree:
        """Return the values that have an effect; note those without, and mistakes."""
        kept: Tree = {}
        for key, value in values.items():
            if key in FIXED:
                is_meant, instead = FIXED[key]
                if not is_meant(value):
                    self._mistakes.append(f"{section}.{key} is {value!r}: {instead}")
            elif key in NO_EFFECT:
                if value not in (None, False):
                    self._without_effect.setdefault(NO_EFFECT[key], []).append(f"{section}.{key}")
            elif key not in known:
                names = [*known, *NO_EFFECT, *FIXED]
                self._mistakes.append(f"there is no key {section}.{key}{nearest(key, names)}")
            elif value is not None:
                kept[key] = value
        return kept

    def _take(self, name: str, role: str, entry: Tree) -> None:
        """Take the settings of the entry and file of a model that is no reward."""
        settings = self._file(name, role, entry)
        adapters, mistake = lora_settings(name, entry.get("lora"))
        self._mistakes += [mistake] if mistake else []
        for key, value in adapters.items():
            self._put(key, value, f"models.{name}.lora")
        for key, value in settings.items():
            self._put(key, value, str(entry.get("model_config_file", f"models.{name}")))
        number = entry.get("num_gpu") or entry.get("num_device")
        if role == "policy":
            if replicas := entry.get("num_replica"):
                self._put("serving.workers", replicas, f"models.{name}")
            elif number:
                self._devices = number
        elif role == "ppo_policy" and number:
            self._put("training.ranks", number, f"models.{name}")
        for key in ("function", "weight"):
            if key in entry:
                self._mistakes.append(f"models.{name}.{key} is for rewards")

    def _reward(self, name: str, entry: Tree) -> Tree:
        """Return the entry of `rollout.rewards` for one reward."""
        settings = self._file(name, "reward", entry)
        part: Tree = settings[REWARDS][0] if settings else {"name": name}
        if "function" in entry:
            part["function"] = entry["function"]
        if len(part) == 1:
            self._mistakes.append(
                f"models.{name} needs a model_config_file with model.path, or a function "
                "(package.module:function)"
            )
        if number := entry.get("num_gpu") or entry.get("num_device"):
            part["gpus"] = number
        if "weight" in entry:
            part["weight"] = entry["weight"]
        return part

    def _file(self, name: str, role: str, entry: Tree) -> Settings:
        """Return the settings of a model's own file, none where it has no file."""
        if "model_config_file" not in entry:
            return {}
        path = self._path.parent / Path(str(entry["model_config_file"])).expanduser()
        if role == "policy":
            return read_model_file(path)
        return model_settings(name, role, path)

    def _put(self, key: str, value: object, source: str) -> None:
        """Set a key of the configuration, on which all sources must agree."""
        if key in self._settings and self._settings[key] != value:
            self._mistakes.append(
                f"{self._sources[key]} and {source} disagree on {key}: {self._settings[key]!r} "
                f"and {value!r}"
            )
        self._settings[key] = value
        self._sources[key] = source

    def _runtime(self, runtime: Tree) -> None:
        for key, value in self._known("runtime", runtime, (*RUNTIME, *COMPUTED)).items():
            if key in RUNTIME and not (key.endswith("_num_limit") and value == -1):
                self._put(RUNTIME[key], value, "runtime")
        if runtime.get("debug"):
            self._put("log_level", "debug", "runtime")

    def _colocation(self, groups: object, entries: Mapping[str, Tree]) -> None:
        """Set whether the engines live in the trainer's processes."""
        if groups is None:
            return
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list):
            self._mistakes.append(f"runtime.colocation is a list of names, not {groups!r}")
            return
        named = [_names(group) for group in groups]
        if all(len(group) == 1 for group in named):  # one group, a name an entry
            named = [{name for group in named for name in group}]
        for name in sorted({name for group in named for name in group} - entries.keys()):
            self._mistakes.append(f"runtime.colocation names {name}, which is not in models")
        together = any({"policy", "ppo_policy"} <= group for group in named)
        self._put("training.colocated", together, "runtime.colocation")

    def _workers(self) -> Settings:
        """Return the number of engines, if `num_gpu` of the policy gives that of their devices."""
        if self._devices is None:
            return {}
        tree = self._merged({})
        for key, value in self._over.items():
            set_key(tree, key, value)
        for override in self._overrides:
            apply_override(tree, override)
        engine = tree.get("engine")
        count = worker_count(self._path, self._devices, engine if isinstance(engine, dict) else {})
        return {"serving.workers": count}

    def _config(self, more: Settings) -> Config:
        """Return the configuration.

        In increasing precedence: the models' settings, the file's own sections, the caller's
        settings, overrides.
        """
        defaults = {"environment": CONVERSATION}
        return make_config(self._merged(more), self._overrides, defaults, self._over)

    def _merged(self, more: Settings) -> Tree:
        """Return the tree of the models' settings under the file's own sections."""
        tree: Tree = {}
        for key, value in {**self._settings, **more}.items():
            set_key(tree, key, value)
        own = {key: value for key, value in self._tree.items() if key not in OWN_SECTIONS}
        return merged(tree, own)

    def _raise_mistakes(self) -> None:
        if self._mistakes:
            raise InputError(f"{self._path}: {'; '.join(self._mistakes)}")


def _names(group: object) -> set[str]:
    """Return the models of one group of `colocation`, a list or a text with commas."""
    parts = group if isinstance(group, list) else str(group).split(",")
    return {str(part).strip() for part in parts if str(part).strip()}


def _section_of(override: str) -> str:
    return override.partition("=")[0].partition(".")[0]
