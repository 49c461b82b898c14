"""The file of a pipeline: several models, each with its own file, and how they are trained.

The names are ChatLearn's; docs/how-to/pipelines.md lists them. The files become one `Config`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from turnwise.compat.chatlearn.model_file import (
    OURS,
    REWARDS,
    ROLES,
    UNNAMED,
    Args,
    FixedKeys,
    Notes,
    Settings,
    check_structure,
    load_merged,
    merged,
    model_settings,
    nearest,
    read_model,
    role_of,
    sentences,
)
from turnwise.config import Config, apply_override, make_config, set_key
from turnwise.config.base import Tree
from turnwise.config.load import value_of
from turnwise.config.yaml_text import read_yaml
from turnwise.errors import InputError

DEFAULTS: Settings = {"environment": "turnwise.compat.chatlearn.prompts:ConversationPrompt"}
"""Default of `environment`: rows are prompts, answered in one turn."""
DRAFT: Settings = {**DEFAULTS, "model": {"path": UNNAMED}}
"""Defaults of the draft configuration, which modules see before `model_provider` has returned."""
_OWN_SECTIONS = ("pipeline", "models", "runtime", "runtime_env", "includes")
"""Sections of a pipeline's file in addition to the sections of a configuration."""
_KINDS: dict[str, Settings] = {
    "grpo": {"algorithm.advantage.name": "grpo"},
    "ppo": {
        "algorithm.advantage.name": "gae",
        "algorithm.kl.where": "reward",
        "algorithm.kl.estimator": "k1",
    },
    "online_dpo": {"algorithm.loss.name": "dpo"},
}
"""Defaults of each kind of pipeline."""
_GAE = ("gamma", "lam", "clip", "learning_rate", "model.path", "model.dtype")
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    **{f"algorithm.advantage.{key}": ("ppo",) for key in _GAE},
    "algorithm.loss.beta": ("online_dpo",),
    "algorithm.loss.clip_low": ("ppo", "grpo"),
    "algorithm.loss.clip_high": ("ppo", "grpo"),
}
"""Keys that only these kinds of pipeline use; other kinds ignore the keys in the models' files."""
_KL_COEF = 0.02  # default KL weight of a file with a reference model

_RUNTIME = (
    *("num_episode", "save_episode_interval", "eval_episode_interval", "output_dir", "exp_name"),
    *("data_path", "eval_data_path", "training_data_num_limit", "eval_data_num_limit"),
)
"""Keys of `runtime` that each set one key of the configuration."""
_SIZES = ("sample_per_episode", "train_global_batch_size", "train_micro_batch_size")
_COMPUTED = (*_SIZES, "colocation", "debug", "enable_resume_training")
_FIXED: FixedKeys = {
    "num_training_epoch": ((1,), "a sample is trained once; set it to 1 and raise num_episode"),
    "max_relay_episode": ((0, 1), "samples of earlier episodes are not trained again; set it to 0"),
    "data_ratio": ((None,), "mix the data into one file of data_path"),
}
_NO_EFFECT = {
    key: why
    for keys, why in {
        "generation_batch_size batch_generation": "engines take as many requests together as "
        "engine.max_num_seqs and their memory allow",
        "validate_param_sync": "every update is checked on a prompt whose log-probs the trainer "
        "knows",
        "data_checkpoint_path": "each checkpoint contains the position in the data",
        "max_data_ckpt_nums": "training.keep_last sets the number of checkpoints kept",
        "enable_eval_before_training": "with evaluations, the model is evaluated before the first "
        "step",
        "log_interval": "every step is written to metrics.jsonl",
        "concurrent_comm param_sync_comm_type param_sync_max_workers sync_frequency "
        "free_sync_collective_group coalesced_buffer_mb": "weights.transport selects how weights "
        "are sent",
        "free_memory force_free_memory offload_optimizer_states offload_weights free_grad_buffers "
        "bucket_size_mb_in_memory_manager sync_memory_optimization_level": "engines sleep while "
        "the trainer computes, where they share their processes",
        "gpu_per_process num_cpu cpu_per_process cpu_schedule_strategy": "training.resources and "
        "serving.resources say which resources processes ask Ray for",
        "nsys profiler_dir concurrent_setup stream_data_loader_type": "there is only one way",
    }.items()
    for key in keys.split()
}
"""Keys that are accepted but have no effect, with the reason."""
_MODEL_KEYS = (
    *("model_config_file", "num_gpu", "num_device", "num_replica"),
    *("trainable", "function", "weight", "lora", "module"),
)
_LORA_KEYS = ("enable_lora", "lora_dim", "lora_scaling", "lora_dropout", "lora_layer")
"""Keys of a model's `lora`. Only linear layers get adapters, and dropout is never applied."""
_LORA_DIM, _LORA_SCALING = 8, 1.0
"""ChatLearn's defaults. ChatLearn divides lora_scaling by lora_dim, so lora_scaling is our
alpha."""


def is_pipeline_file(path: str | Path) -> bool:
    """Return whether a YAML file has `models` or `runtime`, which only pipelines' files have."""
    try:
        tree = read_yaml(Path(path).read_text(), str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, InputError):
        return False  # the next reader reports the error
    return isinstance(tree, dict) and not tree.keys().isdisjoint(("models", "runtime"))


def changed_tree(path: Path, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    """Return a file's tree, merged over the files that it includes and changed by the overrides of
    its own sections, and the other overrides, which are changes to the configuration."""
    tree, others = load_merged(path), list[str]()
    for override in overrides:
        if override.partition("=")[0].partition(".")[0] in _OWN_SECTIONS:
            apply_override(tree, override)
        else:
            others.append(override)
    return tree, others


class PipelineFile:
    """The contents of a pipeline's file and of its models' files.

    Args:
        overrides: `key.sub=value` changes to `models`, to `runtime` or to the configuration.
        settings: Values by dotted keys of the configuration. They take precedence over the file;
            overrides take precedence over them.
        defaults: Values for keys that nothing else sets.
    """

    def __init__(
        self,
        path: str | Path,
        overrides: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        defaults: Tree = DEFAULTS,
    ) -> None:
        self._path = Path(path).expanduser()
        self._tree, self._overrides = changed_tree(self._path, overrides)
        self._over = settings or {}
        self._defaults = defaults
        self._settings = Settings()
        self._devices: int | None = None
        """Number of devices of all the policy's engines together; None if the file does not set
        it."""
        self._sources: dict[str, str] = {}
        self._mistakes: list[str] = []
        self._notes = Notes()
        self.module: str | None = None
        """Path of the policy's own class, package.module:Class; None if it is not in the file."""
        self.args = Args()
        """Flat keys of the policy's file."""
        self.config = self._read()
        self.resumes = bool(self._section("runtime").get("enable_resume_training", True))
        """Whether `turnwise pipeline` resumes a run that already exists."""
        self.notes = [
            *sentences(self._notes),
            *check_structure(self.args, self.config.model.path),
        ]
        """One sentence for each group of keys whose effect differs from ChatLearn's."""

    def _read(self) -> Config:
        models, runtime = self._section("models"), self._section("runtime")
        known = [*_OWN_SECTIONS, *Config.model_fields]
        for name in sorted(map(str, self._tree.keys() - {*known})):
            self._mistakes.append(f"there is no section {name}{nearest(name, known)}")
        entries: dict[str, Tree] = {}
        for name, entry in models.items():
            if entry is not None and not isinstance(entry, dict):
                raise InputError(f"{self._path}: models.{name} must hold keys and values")
            entries[str(name)] = own = self._known(f"models.{name}", entry or {}, _MODEL_KEYS)
            learns = name in ("ppo_policy", "ppo_value")
            if own.pop("trainable", learns) is not learns:
                self._mistakes.append(
                    f"models.{name}.trainable is {not learns}: ppo_policy and ppo_value learn, and "
                    "no others"
                )
        if "policy" not in entries:
            self._mistakes.append("models needs a policy: the model that samples and is trained")
        # Without the key `pipeline`, the models in the file decide which pipeline it is.
        kind = self._tree.get("pipeline")
        if kind is None:
            kind = "ppo" if {"value", "ppo_value"} & entries.keys() else "grpo"
        elif kind not in _KINDS:
            self._mistakes.append(f"pipeline is one of {', '.join(_KINDS)}, not {kind!r}")
            kind = "grpo"
        self._models(entries, kind)
        self._runtime(runtime, entries)
        for key, value in self._section("runtime_env").items():
            if key == "env_vars":
                self._put("ray_env", value or {}, f"runtime_env.{key}")
            else:
                self._note("no effect; the nodes' own environments count", f"runtime_env.{key}")
        if self._mistakes:
            raise InputError(f"{self._path}: {'; '.join(self._mistakes)}")
        for key, kinds in _ONLY_FOR.items():
            if kind not in kinds:
                self._settings.pop(key, None)
        for key, value in _KINDS[kind].items():
            self._settings.setdefault(key, value)
        if "reference" in entries and kind != "online_dpo":
            self._settings.setdefault("algorithm.kl.coef", _KL_COEF)
        workers = self._workers()
        before = self._config(workers)
        step = before.rollout.prompts_per_step
        sizes = self._sizes(runtime, step, before.sampling.n, before.model.max_length)
        config = self._config(workers | sizes)
        for key, value in _KINDS[kind].items():
            if key.endswith(".name"):  # the file's `algorithm` section may contradict the kind
                found = getattr(config.algorithm, key.split(".")[1]).name
                if found != value and (kind != "grpo" or found == "gae"):
                    raise InputError(
                        f"{self._path}: pipeline {kind} needs {key} {value}, not {found}"
                    )
        return config

    def _section(self, name: str) -> Tree:
        section: Tree = self._tree.get(name) or {}
        if not isinstance(section, dict):
            raise InputError(f"{self._path}: {name} must hold keys and values, not {section!r}")
        return section

    def _known(self, section: str, values: Tree, known: Sequence[str]) -> Tree:
        """Return the values that have an effect; record the keys without effect, and mistakes."""
        kept: Tree = {}
        for key, value in values.items():
            if key in _FIXED:
                meant, instead = _FIXED[key]
                if value not in meant:
                    self._mistakes.append(f"{section}.{key} is {value!r}: {instead}")
            elif key in _NO_EFFECT:
                if value not in (None, False):
                    self._note(f"no effect; {_NO_EFFECT[key]}", f"{section}.{key}")
            elif key not in known:
                names = [*known, *_NO_EFFECT, *_FIXED]
                self._mistakes.append(f"there is no key {section}.{key}{nearest(key, names)}")
            elif value is not None:
                kept[key] = value
        return kept

    def _models(self, entries: Mapping[str, Tree], kind: str) -> None:
        """Collect the settings from the models' entries and files."""
        rewards: list[Tree] = []
        for name, entry in entries.items():
            role = role_of(name)
            if role is None:
                self._mistakes.append(
                    f"models.{name} is no model of a pipeline{nearest(name, [*ROLES, 'policy'])} "
                    "(a reward's name ends in _reward)"
                )
                continue
            settings, file = Settings(), str(entry.get("model_config_file"))
            if "module" in entry and role == "policy":
                self.module = str(entry["module"])
            elif "module" in entry:
                self._mistakes.append(
                    f"models.{name}.module: only the policy may have a class of its own here; a "
                    "reward's own code is a function, and other classes need a program (Pipeline)"
                )
            if "model_config_file" in entry:
                path = self._path.parent / Path(file).expanduser()
                read = read_model(path) if role == "policy" else model_settings(name, role, path)
                settings = read.settings
                self.args |= read.args if role == "policy" else {}
                for said, keys in read.notes.items():
                    self._note(said, *keys)
            number = entry.get("num_gpu") or entry.get("num_device")
            if role == "reward":
                part: Tree = settings[REWARDS][0] if settings else {"name": name}
                part |= {key: entry[key] for key in ("function", "weight") if key in entry}
                if not part.keys() & {"function", "model", "dtype"}:
                    self._mistakes.append(
                        f"models.{name} needs a model_config_file with model.path, or a function "
                        "(package.module:function)"
                    )
                rewards.append(part | ({"gpus": number} if number else {}))
                continue
            if kind != "ppo" and role in ("value", "ppo_value"):
                self._note("no effect; only ppo has a value model", f"models.{name}")
            self._lora(name, entry.get("lora"))
            for key, value in settings.items():
                self._put(key, value, file)
            if role == "policy" and (replicas := entry.get("num_replica")):
                self._put("serving.workers", replicas, f"models.{name}")
            elif role == "policy":
                self._devices = number or None
            elif role == "ppo_policy" and number:
                self._put("training.ranks", number, f"models.{name}")
            for key in ("function", "weight"):
                if key in entry:
                    self._mistakes.append(f"models.{name}.{key} is for rewards")
        if rewards:
            self._put(REWARDS, rewards, "models")

    def _note(self, said: str, *keys: str) -> None:
        self._notes.setdefault(said, []).extend(keys)

    def _lora(self, name: str, section: object) -> None:
        """Collect the settings from a model's `lora`."""
        where = f"models.{name}.lora"
        if section is not None and not isinstance(section, dict):
            self._mistakes.append(f"{where} must hold keys and values")
        if not isinstance(section, dict) or not section.get("enable_lora"):
            return
        given = {k: v for k, v in section.items() if v not in (None, "") and v is not False}
        rank = given.get("lora_dim", _LORA_DIM)
        if unknown := sorted(given.keys() - {*_LORA_KEYS}):
            self._mistakes.append(f"{where}.{unknown[0]} is not supported: remove it")
        elif name == "ppo_value":
            pass  # the value model shares the policy's backbone and thus its adapters
        elif name != "ppo_policy":
            self._mistakes.append(f"{where}: adapters are trained by ppo_policy; set it there")
        elif rank == 0:
            self._mistakes.append(
                f"{where}.lora_dim is 0: set enable_lora to false to train no adapter"
            )
        else:
            self._put("model.lora.rank", rank, where)
            self._put("model.lora.alpha", float(given.get("lora_scaling", _LORA_SCALING)), where)

    def _put(self, key: str, value: object, source: str) -> None:
        """Set a key of the configuration; a second source with a different value is a mistake."""
        if key in self._settings and self._settings[key] != value:
            self._mistakes.append(
                f"{self._sources[key]} and {source} disagree on {key}: {self._settings[key]!r} "
                f"and {value!r}"
            )
        self._settings[key] = value
        self._sources[key] = source

    def _runtime(self, runtime: Tree, entries: Mapping[str, Tree]) -> None:
        for key, value in self._known("runtime", runtime, (*_RUNTIME, *_COMPUTED)).items():
            if key in _RUNTIME and not (key.endswith("_num_limit") and value == -1):
                self._put(OURS[key], value, "runtime")
        if runtime.get("debug"):
            self._put("log_level", "debug", "runtime")
        groups = runtime.get("colocation")
        if groups is None:
            return
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list):
            self._mistakes.append(f"runtime.colocation is a list of names, not {groups!r}")
            return
        lists = (g if isinstance(g, list) else str(g).split(",") for g in groups)
        named = [{str(part).strip() for part in parts} - {""} for parts in lists]
        if all(len(group) == 1 for group in named):  # a plain list of names is one group
            named = [set[str]().union(*named)]
        for name in sorted(set[str]().union(*named) - entries.keys()):
            self._mistakes.append(f"runtime.colocation names {name}, which is not in models")
        together = any({"policy", "ppo_policy"} <= group for group in named)
        self._put("training.colocated", together, "runtime.colocation")

    def _workers(self) -> Settings:
        """Return the number of engines on the policy's `num_gpu` devices; {} if that is not set."""
        if self._devices is None:
            return {}
        tree = self._merged({})
        for key, value in self._over.items():
            set_key(tree, key, value)
        for override in self._overrides:
            apply_override(tree, override)
        given = (value_of(tree, f"engine.{kind}_parallel_size") for kind in ("tensor", "pipeline"))
        # The check of the configuration reports any other values.
        each = math.prod(n for n in given if isinstance(n, int) and n > 0)
        sizes = "engine.tensor_parallel_size * pipeline_parallel_size"
        what = f"the {each} devices of an engine ({sizes})"
        count = self._quotient("models.policy.num_gpu", self._devices, each, what)
        return {"serving.workers": count}

    def _sizes(self, runtime: Tree, prompts: int, group: int, max_length: int) -> Settings:
        """Convert the sizes of an episode and of batches, in samples, to our settings; a step has
        `prompts` prompts with `group` samples each."""
        sizes = {name: runtime[name] for name in _SIZES if runtime.get(name) is not None}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{self._path}: runtime.{name} must be a whole number of 1 or more, not "
                    f"{value!r}"
                )
        made: Settings = {}
        total = sizes.get("sample_per_episode")
        where = "runtime.sample_per_episode"
        if total is not None:
            what = f"sampling.n {group}, the number of samples of each prompt"
            made["rollout.prompts_per_step"] = self._quotient(where, total, group, what)
        batch = sizes.get("train_global_batch_size")
        if batch is not None:
            total = total or prompts * group
            what = f"train_global_batch_size {batch}"
            updates = 1 if batch >= total else self._quotient(where, total, batch, what)
            made["training.updates_per_step"] = updates
        if "train_micro_batch_size" in sizes:
            tokens = sizes["train_micro_batch_size"] * max_length
            made["training.micro_batch_tokens"] = tokens
        return made

    def _quotient(self, where: str, total: int, part: int, what: str) -> int:
        if not isinstance(total, int):
            raise InputError(f"{self._path}: {where} must be a whole number, not {total!r}")
        if total % part:
            raise InputError(f"{self._path}: {where} {total} is no multiple of {what}")
        return total // part

    def _config(self, more: Settings) -> Config:
        """Return the configuration. Sources in increasing precedence: the models' settings, the
        file's own sections, the caller's settings, overrides."""
        evaluates = "ppo_policy" not in self._section("models")  # then it may name no training data
        optional = ("data.path",) if evaluates else ()
        tree = self._merged(more)
        return make_config(tree, self._overrides, self._defaults, self._over, optional)

    def _merged(self, more: Settings) -> Tree:
        """Merge the models' settings and the file's own sections, which take precedence."""
        tree: Tree = {}
        for key, value in {**self._settings, **more}.items():
            set_key(tree, key, value)
        own = {key: value for key, value in self._tree.items() if key not in _OWN_SECTIONS}
        return merged(tree, own)
