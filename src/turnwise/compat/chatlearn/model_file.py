"""The YAML file of a model: its names for configuration keys, and its includes.

    includes: [shared.yaml]      # relative to this file; a later one wins, own keys win over all
    model: {path: ..., dtype: bfloat16}
    tokenizer: {tool_parser: hermes}
    sampling: {n: 8, temperature: 1.0}
    eval_sampling: {n: 1, temperature: 0}
    scheduler: {max_num_seqs: 128}
    cache: {prefix_caching: true}
    engine: {threads: 1}         # all other keys of engine

Sections are merged key by key, and so are values that are mappings. Only names are checked here;
values are checked with the whole configuration. ChatLearn's flat keys (`temperature`,
`eval_top_p`, `seq_length` ..., see `chatlearn`) may be used beside sections or instead of them, and
any text may be an environment variable, `${VARIABLE:default}`.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

from turnwise.compat.chatlearn.yaml_file import Settings, leaves, with_included
from turnwise.config import (
    ALIASES,
    REPLACED_KEYS,
    asks_for_nothing,
    known_keys,
)
from turnwise.config.base import Tree
from turnwise.errors import InputError
from turnwise.pipeline import chatlearn


def _section(prefix: str) -> dict[str, str]:
    """Return every key of a section of the configuration, by its last name."""
    return {key.removeprefix(prefix): key for key in known_keys() if key.startswith(prefix)}


_SCHEDULER = {
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
}
_CACHE = {
    "kv_cache_gib": "engine.kv_cache_gib",
    "prefix_caching": "engine.prefix_caching",
    "block_size": "engine.vllm_args.block_size",
    "gpu_memory_utilization": "engine.vllm_args.gpu_memory_utilization",
}
_TOKENIZER = {
    "path": "model.tokenizer",
    "tool_parser": "rollout.tool_parser",
    "reasoning_parser": "serving.reasoning_parser",
    "template_args": "model.template_args",
    "trust_remote_code": "model.trust_remote_code",
}
_ELSEWHERE = {*_SCHEDULER.values(), *_CACHE.values(), *_TOKENIZER.values()}
_SECTIONS = {
    "model": _section("model."),
    "tokenizer": _TOKENIZER,
    "sampling": _section("sampling."),
    "eval_sampling": _section("eval.sampling."),
    "scheduler": _SCHEDULER,
    "cache": _CACHE,
    "engine": _section("engine."),
}
for _name in ("model", "engine"):  # one name for each key
    _SECTIONS[_name] = {k: key for k, key in _SECTIONS[_name].items() if key not in _ELSEWHERE}


def read_model_file(path: str | Path) -> Settings:
    """Return the settings of a model's file and of everything it includes.

    Raises:
        InputError: naming the file that cannot be read or is included by itself, or every key
            that is unknown (with the nearest known one), that vLLM no longer has, or that is not
            supported.
    """
    return _resolved(path)[0]


def read_model_args(path: str | Path) -> chatlearn.Args:
    """Return the values of a file's flat keys (ChatLearn's names), as written in the file.

    Raises:
        InputError: as `read_model_file` does.
    """
    return _resolved(path)[1]


def _resolved(path: str | Path) -> tuple[Settings, chatlearn.Args]:
    """Return the settings of a file, and its flat keys, whose values they include."""
    mistakes: list[str] = []
    settings: Settings = {}
    flat: chatlearn.Args = {}
    for place, tree in with_included(Path(path).expanduser(), "model file"):
        own, sections = _parted(tree)
        for key in sorted(own.keys() - chatlearn.KNOWN):
            if key not in REPLACED_KEYS or not asks_for_nothing(key, own.pop(key)):
                mistakes.append(f"{place}: {_unknown('', key)}")
        mistakes += [f"{place}: {mistake}" for mistake in _unknown_in(sections)]
        settings |= dict(_named(sections))
        flat |= own
    flat = {key: value for key, value in flat.items() if value is not None}
    if not mistakes:
        mistakes = [f"{path}: {mistake}" for mistake in chatlearn.mistakes(flat)]
    if mistakes:
        raise InputError("; ".join(mistakes))
    meant = chatlearn.settings_of(flat)
    for key in sorted(meant.keys() & settings.keys()):
        if meant[key] != settings[key]:
            raise InputError(
                f"{path}: {key} is {settings[key]!r} in a section and {meant[key]!r} by a flat key "
                "of ChatLearn's; keep one"
            )
    return settings | meant, flat


def _parted(tree: Tree) -> tuple[chatlearn.Args, Tree]:
    """Return the flat keys of one file, and its sections."""
    flat = {
        str(key): None if value == "None" else value
        for key, value in tree.items()
        if key not in _SECTIONS or (key in chatlearn.KNOWN and isinstance(value, str))
    }
    return flat, {key: value for key, value in tree.items() if key not in flat}


def _unknown_in(sections: Tree) -> Iterator[str]:
    """Yield a sentence for each mistake in the sections of one file."""
    for section, values in sections.items():
        if values is not None and not isinstance(values, dict):
            yield f"{section} must hold keys and values, not {values!r}"
            continue
        for name, value in (values or {}).items():
            known = name in _SECTIONS[section]
            if not known and not (name in REPLACED_KEYS and asks_for_nothing(name, value)):
                yield _unknown(section, str(name))


def _named(sections: Tree) -> Iterator[tuple[str, object]]:
    """Yield the values of one file's sections, with the configuration's keys."""
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if name in _SECTIONS[section]:
                yield from leaves(_SECTIONS[section][name], value)


def _unknown(section: str, name: str) -> str:
    """Return a sentence about an unknown key, with the one that was probably meant."""
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
        or difflib.get_close_matches(full, [*_SECTIONS, *known, *chatlearn.KNOWN], 1, 0.0)
    )
    return f"there is no key {full}; did you mean {meant[0]}?"
