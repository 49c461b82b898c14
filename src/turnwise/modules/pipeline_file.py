"""A pipeline's file: several models, each with a file of its own, and how they learn together.

    pipeline: ppo                    # or grpo, or online_dpo
    models:
      policy:     {model_config_file: policy.yaml}       # samples: see `model_file`
      reference:  {model_config_file: reference.yaml}    # what the KL penalty compares with
      reward:     {model_config_file: reward.yaml}       # a reward model; or {function: a.b:c}
      value:      {model_config_file: value.yaml}        # ppo: the value model
      ppo_policy: {model_config_file: ppo_policy.yaml}   # how the policy is trained
      ppo_value:  {model_config_file: ppo_value.yaml}    # how the value model is
    runtime:
      colocation: [policy,ppo_policy]
      num_episode: ${num_episode:200}
      sample_per_episode: 1024
      data_path: ${data_path}
    rollout: {concurrency: 64}       # any section of a configuration

The names are ChatLearn's. All of it becomes one `Config`: a model's file and `runtime` say in
their words what keys of the configuration say in ours, sections of the configuration in the same
file have the last word over them, and overrides over all. What each model is here:

    policy       the engines; `num_gpu` devices (serving.workers, each of
                 engine.tensor_parallel_size)
    ppo_policy   the trainer; `num_gpu` processes (training.ranks). `policy` in its group of
                 `colocation` is training.colocated
    reference    algorithm.kl.model, a frozen model in the trainer's processes
    value,       algorithm.advantage.model, in the trainer's processes: both files are of the same
    ppo_value    model, which learns in every step
    reward,      an entry of rollout.rewards: a model in a process of its own, or a function
    any_reward

Keys of `runtime`, and what they set (s samples an episode, n = sampling.n):

    num_episode              training.steps
    sample_per_episode       rollout.prompts_per_step = s / n
    train_global_batch_size  training.updates_per_step = s / it
    train_micro_batch_size   training.micro_batch_tokens = it * model.max_length
    save_episode_interval    training.checkpoint_every
    eval_episode_interval    eval.every
    data_path, eval_data_path                      data.path, data.eval_path
    training_data_num_limit, eval_data_num_limit   data.limit, data.eval_limit; -1 is all
    output_dir, exp_name     output_dir, name
    debug                    log_level
    enable_resume_training   false: a run that is there already is an error, not taken up

Files of models beside the policy have sections `model` (path, dtype), `training` and `algorithm`
(ppo_policy; ppo_value has training.learning_rate), or ChatLearn's flat keys: load, bf16; of
ppo_policy lr, lr_warmup_iters, lr_decay_style, clip_grad, weight_decay, init_kl_coef, cliprange,
gamma, lam, dpo_weight, seq_length, recompute_activations; of ppo_value lr and cliprange_value.
They may include what the policy's file includes. A reference without a weight for its penalty
gets algorithm.kl.coef 0.02; ppo takes the penalty off the rewards.

What is accepted without effect is listed when the pipeline starts (`PipelineFile.notes`).
Without `environment` the rows of the data are `{"prompt": text}` or `{"messages": [...]}`,
answered in one turn. `${NAME:default}` is the value of an environment variable.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from turnwise.config import Config, ModelConfig, apply_override, known_keys, make_config
from turnwise.errors import InputError
from turnwise.modules.model_file import read_model_file
from turnwise.modules.yaml_file import Tree, leaves, merged, with_included

_OWN_SECTIONS = ("pipeline", "models", "runtime", "runtime_env", "includes")
"""Sections of a pipeline's file beside those of a configuration."""
_CONVERSATION = "turnwise.modules.conversation:Conversation"

_PIPELINES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm.advantage.name": "grpo"},
    "ppo": {
        "algorithm.advantage.name": "gae",
        "algorithm.kl.where": "reward",
        "algorithm.kl.estimator": "k1",
    },
    "online_dpo": {"algorithm.loss.name": "dpo"},
}
"""Defaults of each kind of pipeline."""
_ONLY: dict[str, tuple[str, ...]] = {
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
"""Keys that the files of models may set for some pipelines, so that they serve all."""
_REWARDS = "rollout.rewards"
_KL_COEF = 0.02
"""Weight of the KL penalty towards a reference model that the file names, unless it says."""

_RUNTIME = {
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
"""Keys of `runtime` whose value is that of one key of the configuration."""
_SIZES = ("sample_per_episode", "train_global_batch_size", "train_micro_batch_size")
_COMPUTED = (*_SIZES, "colocation", "debug", "enable_resume_training")
_FIXED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_training_epoch": (
        lambda value: value == 1,
        "a sample is trained once; set it to 1 and raise num_episode",
    ),
    "max_relay_episode": (
        lambda value: value in (0, 1),
        "samples of earlier episodes are not trained again; set it to 0",
    ),
    "data_ratio": (lambda value: value is None, "mix the data into one file of data_path"),
    "lora": (
        lambda value: not (isinstance(value, dict) and value.get("enable_lora")),
        "all weights are trained; set lora.enable_lora to false",
    ),
}
"""Keys of which some values have no meaning here: whether one has, and what to do instead."""

_ENGINES = "engines take as many requests together as engine.max_num_seqs and their memory allow"
_ALWAYS = "it is always so: every update is checked on a prompt whose log-probs the trainer knows"
_MEMORY = "engines sleep while the trainer computes, where they share their processes"
_TRANSPORT = "weights.transport says how weights travel"
_NO_EFFECT = {
    "generation_batch_size": _ENGINES,
    "batch_generation": _ENGINES,
    "validate_param_sync": _ALWAYS,
    "data_checkpoint_path": "each checkpoint holds what of the data was seen",
    "max_data_ckpt_nums": "training.keep_last says how many checkpoints are kept",
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
        "training.resources and serving.resources say what processes ask Ray for",
    ),
    **dict.fromkeys(
        ("nsys", "profiler_dir", "concurrent_setup", "stream_data_loader_type"),
        "there is one way",
    ),
}
"""Keys that are accepted and change nothing, and why that is right."""
_MODEL_KEYS = (
    "model_config_file",
    "num_gpu",
    "num_device",
    "num_replica",
    "trainable",
    "function",
    "weight",
)

_COMPANIONS = {"load": "model.path", "bf16": "model.dtype", "dtype": "model.dtype"}
_TRAINER = {
    **_COMPANIONS,
    "clip_grad": "training.max_grad_norm",
    "cliprange": "algorithm.loss.clip_low",
    "dpo_weight": "algorithm.loss.beta",
    "gamma": "algorithm.advantage.gamma",
    "init_kl_coef": "algorithm.kl.coef",
    "lam": "algorithm.advantage.lam",
    "lr": "training.learning_rate",
    "lr_decay_style": "training.lr_schedule",
    "lr_warmup_iters": "training.warmup_steps",
    "recompute_activations": "training.activation_checkpointing",
    "seed": "seed",
    "seq_length": "model.max_length",
    "weight_decay": "training.weight_decay",
}
_VALUE_TRAINER = {
    **_COMPANIONS,
    "cliprange_value": "algorithm.advantage.clip",
    "gamma": "algorithm.advantage.gamma",
    "lam": "algorithm.advantage.lam",
    "lr": "training.learning_rate",
}
_FLAT = {
    "ppo_policy": _TRAINER,
    "ppo_value": _VALUE_TRAINER,
    "reference": _COMPANIONS,
    "reward": _COMPANIONS,
    "value": _COMPANIONS,
}
"""Flat keys of the models' files, ChatLearn's, and the keys that they stand for."""
_READ = {
    "ppo_policy": ("model.", "training.", "algorithm.", "seed"),
    "ppo_value": (*_VALUE_TRAINER.values(),),
    "reference": ("model.path", "model.dtype"),
    "reward": ("model.path", "model.dtype"),
    "value": ("model.path", "model.dtype"),
}
"""What each role takes of its file's keys; the rest of sections that several models share is
another's."""
_SHARED = ("model", "tokenizer", "sampling", "eval_sampling", "scheduler", "cache", "engine")
"""Sections of the policy's file, which the files of others may include."""


@dataclass(slots=True)
class PipelineFile:
    """A pipeline's file, resolved."""

    config: Config
    resumes: bool = True
    """Whether a run that is there already is taken up."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each group of keys without effect."""


def is_pipeline_file(path: str | Path) -> bool:
    """Whether a YAML file holds `models` or `runtime`, and no configuration alone."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # the next reader reports it
    return isinstance(tree, dict) and not tree.keys().isdisjoint(("models", "runtime"))


def read_pipeline_file(path: str | Path, overrides: Sequence[str] = ()) -> PipelineFile:
    """Read a pipeline's file and the files of its models.

    Args:
        overrides: `key.sub=value` changes, of `models` and `runtime` or of the configuration.

    Raises:
        InputError: naming the file and every key that cannot be used, or two files that disagree.

    Example:
        config = read_pipeline_file("rlhf.yaml", ["runtime.num_episode=10"]).config
    """
    return _Reader(Path(path).expanduser(), overrides).read()


class _Reader:
    """Reads one pipeline's file."""

    def __init__(self, path: Path, overrides: Sequence[str]) -> None:
        self._path = path
        self._tree = _load(path)
        for override in overrides:
            if _section_of(override) in _OWN_SECTIONS:
                apply_override(self._tree, override)
        self._overrides = [o for o in overrides if _section_of(o) not in _OWN_SECTIONS]
        self._settings: Tree = {}
        self._sources: dict[str, str] = {}
        self._mistakes: list[str] = []
        self._without_effect: dict[str, list[str]] = {}

    def read(self) -> PipelineFile:
        models, runtime = self._section("models"), self._section("runtime")
        unknown = self._tree.keys() - {*_OWN_SECTIONS, *Config.model_fields}
        for name in sorted(map(str, unknown)):
            known = [*_OWN_SECTIONS, *Config.model_fields]
            self._mistakes.append(f"there is no section {name}{_nearest(name, known)}")
        entries = {str(name): self._entry(str(name), entry) for name, entry in models.items()}
        if "policy" not in entries:
            self._mistakes.append("models needs a policy: the model that samples and is trained")
        kind = self._kind(entries)
        rewards: list[Tree] = []
        for name, entry in entries.items():
            role = _role(name)
            if role is None:
                known = [*_FLAT, "policy"]
                self._mistakes.append(
                    f"models.{name} is no model of a pipeline{_nearest(name, known)} "
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
            self._put(_REWARDS, rewards, "models")
        self._runtime(runtime)
        self._colocation(runtime.get("colocation"), entries)
        self._raise_mistakes()
        for key, kinds in _ONLY.items():
            if kind not in kinds:
                self._settings.pop(key, None)
        for key, value in _PIPELINES[kind].items():
            self._settings.setdefault(key, value)
        if "reference" in entries and kind != "online_dpo":
            self._settings.setdefault("algorithm.kl.coef", _KL_COEF)
        config = self._config(self._sizes(runtime))
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
        """The pipeline's name, by its models where the file does not say."""
        kind = self._tree.get("pipeline")
        if kind is None:
            return "ppo" if {"value", "ppo_value"} & entries.keys() else "grpo"
        if kind not in _PIPELINES:
            self._mistakes.append(f"pipeline is one of {', '.join(_PIPELINES)}, not {kind!r}")
            return "grpo"
        return str(kind)

    def _check_kind(self, kind: str, config: Config) -> None:
        """See that a key of the configuration does not make another pipeline of it."""
        wanted = {key: value for key, value in _PIPELINES[kind].items() if key.endswith(".name")}
        for key, value in wanted.items():
            _, part, _ = key.split(".")
            found = getattr(config.algorithm, part).name
            if found != value and (kind != "grpo" or found == "gae"):
                raise InputError(f"{self._path}: pipeline {kind} needs {key} {value}, not {found}")

    def _entry(self, name: str, entry: Any) -> Tree:
        """One model's keys, those without effect left out."""
        if entry is not None and not isinstance(entry, dict):
            raise InputError(f"{self._path}: models.{name} must hold keys and values")
        known = self._known(f"models.{name}", entry or {}, _MODEL_KEYS)
        learns = name in ("ppo_policy", "ppo_value")
        if known.pop("trainable", learns) is not learns:
            self._mistakes.append(
                f"models.{name}.trainable is {not learns}: ppo_policy and ppo_value learn, and no "
                "others"
            )
        return known

    def _known(self, section: str, values: Tree, known: Sequence[str]) -> Tree:
        """The values that are there and have a meaning; the others are noted or a mistake."""
        kept: Tree = {}
        for key, value in values.items():
            if key in _FIXED:
                is_meant, instead = _FIXED[key]
                if not is_meant(value):
                    self._mistakes.append(f"{section}.{key} is {value!r}: {instead}")
            elif key in _NO_EFFECT:
                if value not in (None, False):
                    self._without_effect.setdefault(_NO_EFFECT[key], []).append(f"{section}.{key}")
            elif key not in known:
                names = [*known, *_NO_EFFECT, *_FIXED]
                self._mistakes.append(f"there is no key {section}.{key}{_nearest(key, names)}")
            elif value is not None:
                kept[key] = value
        return kept

    def _take(self, name: str, role: str, entry: Tree) -> None:
        """Take the settings of a model's entry and file, rewards excepted."""
        settings = self._file(name, role, entry)
        number = entry.get("num_gpu") or entry.get("num_device")
        if role == "policy":
            for key, value in settings.items():
                self._put(key, value, self._source(name, entry))
            devices = settings.get("engine.tensor_parallel_size", 1)
            devices *= settings.get("engine.pipeline_parallel_size", 1)
            workers = entry.get("num_replica") or (number and number // devices)
            if workers:
                self._put("serving.workers", workers, f"models.{name}")
        elif role == "ppo_policy":
            for key, value in settings.items():
                self._put(key, value, self._source(name, entry))
            if number:
                self._put("training.ranks", number, f"models.{name}")
        else:
            for key, value in settings.items():
                self._put(key, value, self._source(name, entry))
        for key in ("function", "weight"):
            if key in entry:
                self._mistakes.append(f"models.{name}.{key} is for rewards")

    def _reward(self, name: str, entry: Tree) -> Tree:
        """The entry of rollout.rewards of one reward."""
        settings = self._file(name, "reward", entry)
        part: Tree = settings[_REWARDS][0] if settings else {"name": name}
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

    def _file(self, name: str, role: str, entry: Tree) -> Tree:
        """The settings of a model's own file, where it has one."""
        if "model_config_file" not in entry:
            return {}
        path = self._path.parent / Path(str(entry["model_config_file"])).expanduser()
        if role == "policy":
            return read_model_file(path)
        return model_settings(name, role, path)

    def _source(self, name: str, entry: Tree) -> str:
        return str(entry.get("model_config_file", f"models.{name}"))

    def _put(self, key: str, value: Any, source: str) -> None:
        """Set a key of the configuration, which no other source may set to something else."""
        if key in self._settings and self._settings[key] != value:
            self._mistakes.append(
                f"{self._sources[key]} and {source} disagree on {key}: {self._settings[key]!r} "
                f"and {value!r}"
            )
        self._settings[key] = value
        self._sources[key] = source

    def _runtime(self, runtime: Tree) -> None:
        for key, value in self._known("runtime", runtime, (*_RUNTIME, *_COMPUTED)).items():
            if key in _RUNTIME and not (key.endswith("_num_limit") and value == -1):
                self._put(_RUNTIME[key], value, "runtime")
        if runtime.get("debug"):
            self._put("log_level", "debug", "runtime")

    def _colocation(self, groups: Any, entries: Mapping[str, Tree]) -> None:
        """Whether the engines live in the trainer's processes."""
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

    def _sizes(self, runtime: Tree) -> Tree:
        """What an episode's and a batch's samples are in our keys, which count otherwise."""
        sizes = {name: runtime[name] for name in _SIZES if runtime.get(name) is not None}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{self._path}: runtime.{name} is a number from 1 on, not {value!r}"
                )
        config = self._config({})
        made: Tree = {}
        group, total = config.sampling.n, sizes.get("sample_per_episode")
        if total is not None:
            made["rollout.prompts_per_step"] = self._quotient(
                "sample_per_episode", total, group, f"sampling.n {group}, the samples of a prompt"
            )
        batch = sizes.get("train_global_batch_size")
        if batch is not None:
            total = total or config.rollout.prompts_per_step * group
            made["training.updates_per_step"] = (
                1
                if batch >= total
                else self._quotient(
                    "sample_per_episode", total, batch, f"train_global_batch_size {batch}"
                )
            )
        if "train_micro_batch_size" in sizes:
            made["training.micro_batch_tokens"] = (
                sizes["train_micro_batch_size"] * config.model.max_length
            )
        return made

    def _quotient(self, name: str, total: int, part: int, what: str) -> int:
        if total % part:
            raise InputError(f"{self._path}: runtime.{name} {total} is no multiple of {what}")
        return total // part

    def _config(self, more: Tree) -> Config:
        """The configuration: settings under the file's own sections, under overrides."""
        tree: Tree = {}
        for key, value in {**self._settings, **more}.items():
            _set(tree, key, value)
        own = {key: value for key, value in self._tree.items() if key not in _OWN_SECTIONS}
        defaults = {"environment": _CONVERSATION}
        return make_config(merged(tree, own), self._overrides, defaults)

    def _raise_mistakes(self) -> None:
        if self._mistakes:
            raise InputError(f"{self._path}: {'; '.join(self._mistakes)}")


def model_settings(name: str, role: str, path: str | Path) -> Tree:
    """What the file of a model beside the policy sets, by dotted keys of the configuration.

    Args:
        role: ppo_policy, ppo_value, reference, reward or value.

    Raises:
        InputError: naming the file, and every key that is unknown.
    """
    settings = _role_settings(path, role)
    if role == "ppo_policy":
        return settings
    if role == "reward":
        keys = {"model.path": "model", "model.dtype": "dtype"}
        return {_REWARDS: [{"name": name} | {keys[k]: v for k, v in settings.items()}]}
    section = "algorithm.kl" if role == "reference" else "algorithm.advantage"
    moved = {"training.learning_rate": f"{section}.learning_rate"}
    return {
        f"{section}.{key}" if key.startswith("model.") else moved.get(key, key): value
        for key, value in settings.items()
    }


def _role_settings(path: str | Path, role: str) -> Tree:
    """Sections of its file that each model reads."""
    flat, settings = _FLAT[role], {}
    mistakes: list[str] = []
    known = known_keys()
    for key, value in _load(Path(path).expanduser()).items():
        if value is None or key == "includes":
            continue
        if key in flat:
            if key == "bf16":
                value = "bfloat16" if value else "float32"
            settings[flat[key]] = value
            if key == "cliprange":
                settings["algorithm.loss.clip_high"] = value
        elif isinstance(value, dict) and key in (*_SHARED, "training", "algorithm"):
            for full, leaf in leaves(str(key), value):
                if _is_read(full, role):
                    settings[full] = leaf
                elif key not in _SHARED and not _is_known(full, known):
                    mistakes.append(f"there is no key {full}{_nearest(full, [*known])}")
                elif key not in _SHARED:
                    mistakes.append(
                        f"{full} is no key of a {role}'s file: it goes into ppo_policy's"
                    )
                elif key == "model" and full.split(".")[1] not in ModelConfig.model_fields:
                    mistakes.append(f"there is no key {full}{_nearest(full, [*known])}")
        else:
            names = [*flat, *_SHARED, "training", "algorithm"]
            mistakes.append(f"there is no key {key}{_nearest(str(key), names)}")
    if mistakes:
        raise InputError(f"{path}: {'; '.join(mistakes)}")
    return settings


def _is_read(key: str, role: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in _READ[role])


def _is_known(key: str, known: Mapping[str, str]) -> bool:
    return key in known or any(key.startswith(f"{name}.") for name in known)


def _role(name: str) -> str | None:
    """Return a model's role by its name."""
    if name == "reward" or name.endswith("_reward"):
        return "reward"
    return name if name == "policy" or name in _FLAT else None


def _names(group: Any) -> set[str]:
    """The models of one group of `colocation`, a list or a text with commas."""
    parts = group if isinstance(group, list) else str(group).split(",")
    return {str(part).strip() for part in parts if str(part).strip()}


def _section_of(override: str) -> str:
    return override.partition("=")[0].partition(".")[0]


def _nearest(name: str, known: Sequence[str]) -> str:
    meant = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {meant[0]}?" if meant else ""


def _set(tree: Tree, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value


def _load(path: Path) -> Tree:
    """A file's tree over those that it includes."""
    tree: Tree = {}
    for _, own in with_included(path, "file"):
        tree = merged(tree, own)
    return tree
