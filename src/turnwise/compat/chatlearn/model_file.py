"""The YAML files of a pipeline's models: their keys, ChatLearn's flat keys, and their includes.

docs/how-to/pipelines.md lists the keys. Sections, and values that are mappings, are merged key by
key. This module checks names; most values are checked with the whole configuration.
"""

import ast
import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from turnwise.config import (
    ALIASES,
    PARTS,
    REPLACED_KEYS,
    UNNEEDED_KEYS,
    ModelConfig,
    SamplingConfig,
    has_no_effect,
    known_keys,
)
from turnwise.config.base import Tree
from turnwise.config.yaml_text import read_yaml
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError

Settings = Tree
"""Values by dotted keys of the configuration."""
Args = Tree
"""Values by ChatLearn's flat keys."""
Notes = dict[str, list[str]]
"""Accepted keys whose effect differs from ChatLearn's, by the sentence that explains it."""
REWARDS = "rollout.rewards"
UNNAMED = "the model of model_provider"
"""Placeholder for `model.path` until a module has named its model."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::(.*))?\}")
_BOTH = ("sampling", "eval.sampling")


def _by_ends(keys: str) -> dict[str, str]:
    """Map the last part of each dotted key to the key."""
    return {key.rpartition(".")[2]: key for key in keys.split()}


def _words(text: str) -> list[str]:
    return text.split()


_EVAL = {f"eval_{name}": f"eval.sampling.{name}" for name in SamplingConfig.model_fields}
OURS = {
    **ALIASES,
    **_by_ends(
        """
        algorithm.advantage.gamma algorithm.advantage.lam engine.max_num_batched_tokens
        engine.max_num_seqs engine.vllm_args.block_size engine.vllm_args.gpu_memory_utilization
        model.dtype model.template_args.enable_thinking model.tokenizer model.trust_remote_code
        output_dir sampling.min_p sampling.temperature sampling.top_k sampling.top_p seed
        training.weight_decay
        """
    ),
    **_EVAL,
    "bf16": "model.dtype",
    "dpo_weight": "algorithm.loss.beta",
    "lr_decay_style": "training.lr_schedule",
    "lr_warmup_iters": "training.warmup_steps",
    "recompute_activations": "training.activation_checkpointing",
}
"""ChatLearn's names, mapped to keys of the configuration."""
_COMPANION = ("load", "bf16", "dtype")
_FLAT: dict[str, Sequence[str]] = {
    "policy": _words(
        """
        block_size dtype enable_thinking generation_batch_size gpu_memory_utilization load
        max_num_batched_tokens max_num_seqs min_p pipeline_model_parallel_size seed seq_length
        temperature tensor_model_parallel_size tokenizer top_k top_p trust_remote_code
        """
    )
    + list(_EVAL),
    "ppo_policy": _words(
        """
        load bf16 dtype clip_grad cliprange dpo_weight gamma init_kl_coef lam lr lr_decay_style
        lr_warmup_iters recompute_activations seed seq_length weight_decay
        """
    ),
    "ppo_value": (*_COMPANION, "cliprange_value", "gamma", "lam", "lr"),
    "reference": _COMPANION,
    "reward": _COMPANION,
    "value": _COMPANION,
}
"""Keys of `OURS` that the file of each role may contain as flat keys."""
_COUNTS = ("n", "num_inference_per_prompt", "max_new_tokens")
_SHARED = ("ignore_eos", "prompt_logprobs")  # flat keys that set both training and evaluation
_READ = _words("stop_token_list prompt_key use_beam_search vllm_input_ids_key vllm_prompt_key")
"""Further flat keys of the policy's file, which `_meant` and modules read."""

FixedKeys = dict[str, tuple[tuple[object, ...], str]]
"""Keys that accept only some values: the accepted values, and advice for any other value."""
_FIXED: FixedKeys = {
    "apply_replica_id_to_seed": ((True,), "every engine has its own seed, derived from seed"),
    "bf16": ((True, False), "set it to true for model.dtype bfloat16, or to false"),
    "enable_stage_resume": ((False,), "set training.checkpoint_every"),
    "enforce_eager": ((True, False), "set it to true or false"),
    "fp16": ((False,), "model.dtype is bfloat16 or float32"),
    "include_prompt": (
        (True,),
        "all_tokens begin with the prompt; cut them at prompt_token_length in decode_internal",
    ),
    "init_shuffle_prompts": ((0,), "pass the prompts to build_dataset in the desired order"),
    "new_token_limit": ((True, False), "set it to true or false"),
}

STRUCTURE = {
    "ffn_hidden_size": "intermediate_size",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "num_query_groups": "num_key_value_heads",
}
"""Flat keys of the model's structure, mapped to the keys of its config.json that must agree."""
_IN_FOLDER = (
    "no effect; the folder of load (model.path), in Hugging Face's format, contains the model's "
    "structure"
)
_UNUSED = {
    _IN_FOLDER: _words(
        """
        adaptive_parallel_strategy_on_checkpoint add_bias_linear add_position_embedding
        apply_query_key_layer_scaling attention_dropout attention_softmax_in_fp32 build_path
        distributed_backend distributed_timeout_minutes exit_on_missing_checkpoint finetune
        gradient_accumulation_fusion group_query_attention hidden_dropout hysteresis
        inference_batch_times_seqlen_threshold init_method_std load_iteration log_num_zeros_in_grad
        make_vocab_size_divisible_by masked_softmax_fusion max_position_embeddings
        max_tokens_to_oom no_load_args no_load_optim no_load_rng no_load_scheduler normalization
        num_workers numerical_stable parallel_output retro_encoder_attention_dropout
        retro_encoder_hidden_dropout reward_bias save_inference save_inference_interval
        sequence_parallel swiglu tokenizer_model tokenizer_type transformer_impl
        untie_embeddings_and_output_weights use_attn_acc use_checkpoint_args
        use_distributed_optimizer use_flash_attn use_legacy_models use_rotary_position_embeddings
        """
    ),
    "no effect; the sections algorithm and training, and the keys of ppo_policy's file that have "
    "counterparts there, set what is trained": _words(
        """
        adam_beta1 adam_beta2 clipped_value_only cliprange cliprange_reward cliprange_value
        do_math_eval dpo_weight fix_kl_coef gamma horizon init_kl_coef lam lm_coef log_entropy
        log_interval loss_on_prompts lr_decay_iters math_coef min_lr ngram_coef raw_reward_coeff
        recompute_granularity save_interval scale_reward target train_iters
        train_to_compare_num_responses trainer_engine use_checkpoint_opt_param_scheduler use_ipo
        """
    ),
    "no effect; rows are read in the driver, and the last step is complete": _words(
        "drop_last num_tokenize_threads"
    ),
    "no effect; vLLM loads the folder of load, preempts as it must, and returns all ids": _words(
        "preemption_mode skip_special_tokens vllm_load_format"
    ),
}
"""Unused flat keys of Megatron and of ChatLearn's trainer, by the reason. In ChatLearn's examples,
the files of all models contain these keys."""
_REASONS = {key: why for why, keys in _UNUSED.items() for key in keys}
_KNOWN = frozenset([*_FLAT["policy"], *_COUNTS, *_SHARED, *_READ, *_FIXED, *STRUCTURE])
_OTHERS = {
    **_REASONS,
    **{
        key: f"no effect in the other models' files; {owner}'s file sets it"
        for owner, keys in [*reversed(_FLAT.items()), ("policy", _KNOWN)]
        for key in keys
        if key not in _COMPANION
    },
    **dict.fromkeys(STRUCTURE, _IN_FOLDER),
}
"""Keys without effect in the files of models other than the policy, with the reasons: the unused
keys, and keys that only another model's file sets."""

_RENAMED = {
    "tokenizer": {
        "path": "model.tokenizer",
        **_by_ends("rollout.tool_parser serving.reasoning_parser model.template_args"),
        "trust_remote_code": "model.trust_remote_code",
    },
    "scheduler": _by_ends("engine.max_num_seqs engine.max_num_batched_tokens"),
    "cache": _by_ends(
        "engine.kv_cache_gib engine.prefix_caching engine.vllm_args.block_size "
        "engine.vllm_args.gpu_memory_utilization"
    ),
}
_ELSEWHERE = {key for keys in _RENAMED.values() for key in keys.values()}
_SECTIONS = {
    prefix.replace(".", "_"): {
        key.removeprefix(f"{prefix}."): key
        for key in known_keys()
        if key.startswith(f"{prefix}.") and key not in _ELSEWHERE
    }
    for prefix in ("model", "sampling", "eval.sampling", "engine")
} | _RENAMED
"""For each section of a model's file: its key names, mapped to keys of the configuration."""
_TRAINER_SECTIONS = ("model.", "training.", "algorithm.")
"""Sections in which ppo_policy's file may set any key; other files may only set keys in `_FLAT`."""
ROLES = tuple(role for role in _FLAT if role != "policy")


def _expanded(value: object) -> object:
    """Replace the `${NAME:default}` texts of a YAML value, at any depth, by environment variables.

    The texts of the variables are read as Python or YAML values. A variable that is not set, and
    has no default, becomes None.
    """
    if isinstance(value, dict):
        return {key: _expanded(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_expanded(below) for below in value]
    if not isinstance(value, str) or not (found := _VARIABLE.fullmatch(value.strip())):
        return value
    text: str | None = os.environ.get(found[1], found[2])
    if text is None:
        return None
    readers: tuple[Callable[[str], object], ...] = (ast.literal_eval, yaml.safe_load)
    for read in readers:
        with suppress(ValueError, SyntaxError, yaml.YAMLError):
            return read(text)
    return text


def with_included(
    path: Path, kind: str, including: tuple[Path, ...] = ()
) -> Iterator[tuple[Path, Tree]]:
    """Yield a file's included files, then the file, each with its tree; later trees take
    precedence.

    Args:
        kind: Noun for the file in errors, such as "model file".
        including: The chain of files that include this one, to find a cycle.
    """
    where = path.resolve()
    if where in including:
        chain = " -> ".join(str(p.name) for p in (*including[including.index(where) :], where))
        raise InputError(f"the {kind} {path} includes itself: {chain}")
    by = f", which {including[-1]} includes" if including else ""
    try:
        tree = _expanded(read_yaml(path.read_text(), str(path)) or {})
    except FileNotFoundError:
        raise InputError(f"there is no {kind} {path}{by}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the {kind} {path}{by} cannot be read: {reason}") from None
    if not isinstance(tree, dict):
        raise InputError(f"the {kind} {path}{by} must hold keys and values")
    includes = tree.pop("includes", None) or []
    includes = [includes] if isinstance(includes, str) else includes
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise InputError(f"{path}: includes must be a list of files, not {includes!r}")
    for name in includes:
        yield from with_included(path.parent / Path(name).expanduser(), kind, (*including, where))
    yield path, tree


def load_merged(path: Path) -> Tree:
    """Return a file's tree, merged over the trees of the files that it includes."""
    tree: Tree = {}
    for _, own in with_included(path, "file"):
        tree = merged(tree, own)
    return tree


def merged(base: Tree, over: Tree) -> Tree:
    """Merge two trees key by key, at any depth; values of `over` take precedence."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each leaf below a key."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" with the most similar known name, or "" if no name is
    similar."""
    meant = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {meant[0]}?" if meant else ""


class ModelFile(NamedTuple):
    """A model's file, merged with all files that it includes."""

    settings: Settings
    args: Args
    """The policy's flat keys, which `settings` also contains under our names; a reward's own keys;
    empty for other models."""
    notes: Notes


def sentences(notes: Notes) -> list[str]:
    """Return a sentence for each group of keys."""
    return [f"{', '.join(dict.fromkeys(keys))}: {said}" for said, keys in notes.items()]


def read_model(path: str | Path) -> ModelFile:
    """Read the policy's file; raise an InputError that names every key that cannot be used."""
    mistakes: list[str] = []
    settings, flat, notes = Settings(), Args(), Notes()
    for place, tree in with_included(Path(path).expanduser(), "model file"):
        for section, name, value in _entries(place, tree, mistakes):
            if name in (_SECTIONS[section] if section else _KNOWN):
                if section:
                    settings |= _leaves(_SECTIONS[section][name], value)
                else:
                    flat[name] = value
            elif not section and name in _REASONS:
                if value and value != "None":
                    notes.setdefault(_REASONS[name], []).append(name)
            elif name in UNNEEDED_KEYS and not has_no_effect(name, value):
                notes.setdefault(f"no effect; {REPLACED_KEYS[name]}", []).append(name)
            elif not has_no_effect(name, value):
                mistakes.append(f"{place}: {_unknown(section, name)}")
    flat = {key: value for key, value in flat.items() if value not in (None, "None")}
    mistakes = mistakes or [f"{path}: {mistake}" for mistake in _mistakes(flat)]
    if mistakes:
        raise InputError("; ".join(mistakes))
    meant = _meant(flat)
    for key in sorted(meant.keys() & settings.keys()):
        if meant[key] != settings[key]:
            raise InputError(
                f"{path}: {key} is {settings[key]!r} in a section and {meant[key]!r} by a flat key "
                "of ChatLearn's; keep one"
            )
    if "block_size" in flat:
        said = "the number of tokens in a block of vLLM's KV cache, and no size in MB"
        notes[said] = ["block_size"]
    return ModelFile(settings | meant, flat, notes)


def check_structure(args: Args, path: str) -> list[str]:
    """Compare flat keys of the model's structure with the config.json of `path` (model.path).

    Raise `InputError` for the first key whose value differs. Return a note for keys that could not
    be compared because config.json, or the key in it, is missing.
    """
    config: JsonObject = {}
    with suppress(OSError, ValueError):
        config = json.loads((Path(path).expanduser() / "config.json").read_text())
    unknown = []
    for key, name in STRUCTURE.items():
        value, own = args.get(key), config.get(name)
        if value is not None and own is None:
            unknown.append(key)
        elif value is not None and own != value:
            raise InputError(
                f"{key} is {value!r}, and the model in {path} has {own!r} ({name}): its own "
                "configuration decides; remove the key, or set load to another folder"
            )
    where = f"{_IN_FOLDER}; not compared, because there is no config.json with them in {path}"
    return sentences({where: unknown}) if unknown else []


def _entries(place: Path, tree: Tree, mistakes: list[str]) -> Iterator[tuple[str, str, object]]:
    """Yield the section ("" for a flat key), the name and the value of each key of a file."""
    for key, value in tree.items():
        if key not in _SECTIONS or (key in _KNOWN and isinstance(value, str)):
            yield "", str(key), value
        elif value is None or isinstance(value, dict):
            yield from ((key, str(name), below) for name, below in (value or {}).items())
        else:
            mistakes.append(f"{place}: {key} must hold keys and values, not {value!r}")


def _unknown(section: str, name: str) -> str:
    """Return a sentence about an unknown key, with the key that was probably meant."""
    full = f"{section}.{name}" if section else name
    if name in REPLACED_KEYS:
        return f"{full} is not supported: {REPLACED_KEYS[name]}"
    known = {f"{s}.{k}": k for s, keys in _SECTIONS.items() for k in keys}
    own = [key for key in known if section and key.startswith(f"{section}.")]
    alias = ALIASES.get(name.lower().replace("-", "_"), "")
    named = {key: f"{s}.{k}" for s, keys in _SECTIONS.items() for k, key in keys.items()}
    if not section and alias and alias not in named:
        return f"{full} is no key of a model's file: it is {alias} in the configuration"
    meant = (
        [named[key] for key in (full, alias) if key in named]
        or difflib.get_close_matches(full, own, 1, 0.75)
        or [key for key, leaf in known.items() if leaf == name]
        or difflib.get_close_matches(full, [*_SECTIONS, *known, *_KNOWN], 1, 0.0)
    )
    return f"there is no key {full}; did you mean {meant[0]}?"


def _mistakes(args: Args) -> Iterator[str]:
    """Yield a sentence for each flat key, or group of keys, with an unusable value."""
    for key, (meant, instead) in _FIXED.items():
        if key in args and args[key] not in meant:
            yield f"{key} {args[key]!r} is not supported: {instead}"
    for key in _COUNTS:
        if key in args and (not isinstance(args[key], int) or args[key] < 1):
            yield f"{key} must be a whole number of 1 or more, not {args[key]!r}"
    if not args.get("new_token_limit", True) and "seq_length" not in args:
        yield "new_token_limit false samples up to seq_length, which is not set"


def _meant(args: Args) -> Settings:
    """Translate the policy's flat keys, whose values `_mistakes` has checked, to settings."""
    both = {key: args[key] for key in _SHARED if key in args}
    if args.get("use_beam_search"):
        both["use_beam_search"] = args["use_beam_search"]
    stop, new = args.get("stop_token_list"), args.get("max_new_tokens")
    if stop is not None:
        both["stop"] = [t for t in stop.split(";") if t] if isinstance(stop, str) else stop
    settings = Settings()
    if not args.get("new_token_limit", True):
        if new is not None:
            settings["data.max_prompt_tokens"] = args["seq_length"] - new
        new = args["seq_length"]
    if new is not None:
        both["max_tokens"] = new
    settings |= {f"{section}.{key}": v for section in _BOTH for key, v in both.items()}
    settings |= {OURS[name]: value for name, value in args.items() if name in _FLAT["policy"]}
    if settings.get("engine.max_num_seqs") == -1:
        del settings["engine.max_num_seqs"]
    if "n" in args or "num_inference_per_prompt" in args:
        n = args.get("n", 1)
        settings["sampling.n"] = n * args.get("num_inference_per_prompt", 1)
        if "n" in args:
            settings["eval.sampling.n"] = n
    if args.get("bf16"):
        settings["model.dtype"] = "bfloat16"
    if args.get("enforce_eager"):
        settings["engine.vllm_args.enforce_eager"] = True
    return settings


def args_of(
    model: ModelConfig, sampling: SamplingConfig, held_out: SamplingConfig, own: Args
) -> Args:
    """Return a configuration under ChatLearn's names, with the model's remaining flat keys
    `own`."""
    both = {"temperature", "top_k", "top_p"}
    path = None if model.path == UNNAMED else model.path
    return {
        "prompt_key": None,
        "vllm_prompt_key": "prompt",
        "vllm_input_ids_key": "input_ids",
        "init_shuffle_prompts": 0,
        **own,
        "load": path,
        "tokenizer": model.tokenizer or path,
        "num_inference_per_prompt": 1,  # `n` below already includes it
        "seq_length": model.max_length,
        "max_new_tokens": sampling.max_tokens,
        "n": sampling.n,
        "ignore_eos": sampling.ignore_eos,
        "prompt_logprobs": 1 if sampling.prompt_logprobs else None,
        "use_beam_search": sampling.use_beam_search,
        "stop_token_list": list(sampling.stop),
        **sampling.model_dump(include=both),
        **{f"eval_{key}": value for key, value in held_out.model_dump(include=both).items()},
    }


def role_of(name: str) -> str | None:
    """Return a model's role by its name in `models`; None if the name belongs to no role."""
    role = "reward" if name.endswith("_reward") else name
    return role if role in _FLAT else None


def model_settings(name: str, role: str, path: str | Path) -> ModelFile:
    """Read the file of a model other than the policy; `name` is its name in `models`."""
    flat, trains = {key: OURS[key] for key in _FLAT[role]}, role == "ppo_policy"
    settings, notes, own = Settings(), Notes(), Args()
    mistakes: list[str] = []
    for key, value in load_merged(Path(path).expanduser()).items():
        if key in flat and value is not None:
            if key == "bf16":
                value = "bfloat16" if value else "float32"
            settings[flat[key]] = value
            if key == "cliprange":  # its alias is clip_high
                settings["algorithm.loss.clip_low"] = value
        elif isinstance(value, dict) and key in (*_SECTIONS, "training", "algorithm"):
            for full, leaf in _leaves(str(key), value):
                section, part, *_ = [*full.split("."), ""]
                if full in flat.values() or (trains and full.startswith(_TRAINER_SECTIONS)):
                    bare = full in PARTS and isinstance(leaf, str)
                    settings[f"{full}.name" if bare else full] = leaf
                elif section not in _SECTIONS and any(
                    f"{full}.".startswith(f"{known}.") for known in known_keys()
                ):
                    what = f"no key of a {role}'s file: it goes into ppo_policy's"
                    mistakes.append(f"{full} is {what}")
                elif section not in _SECTIONS or (
                    section == "model" and part not in ModelConfig.model_fields
                ):  # other keys of known sections belong to another model: ignored
                    mistakes.append(f"there is no key {full}{nearest(full, [*known_keys()])}")
        elif value in (None, "None"):
            pass
        elif why := _OTHERS.get(str(key)):
            if value:
                notes.setdefault(why, []).append(str(key))
        else:
            hint = nearest(str(key), [*flat, *_SECTIONS, "training", "algorithm"])
            if role == "reward" and not hint:
                own[str(key)] = value  # a key of the user's own reward
            else:
                mistakes.append(f"there is no key {key}{hint}")
    if mistakes:
        raise InputError(f"{path}: {'; '.join(mistakes)}")
    if role == "reward":
        keys = {"model.path": "model", "model.dtype": "dtype"}
        settings = {REWARDS: [{"name": name} | {keys[k]: v for k, v in settings.items()}]}
    elif not trains:
        section = "algorithm.kl" if role == "reference" else "algorithm.advantage"
        moved = {"training.learning_rate": f"{section}.learning_rate"}
        settings = {
            f"{section}.{key}" if key.startswith("model.") else moved.get(key, key): value
            for key, value in settings.items()
        }
    return ModelFile(settings, own, notes)
