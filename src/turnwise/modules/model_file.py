"""A model's YAML file: its own names for keys of the configuration, and files that it includes.

    includes: [shared.yaml]      # relative to this file; a later one wins, own keys win over all
    model: {path: ..., dtype: bfloat16}
    tokenizer: {tool_parser: hermes}
    sampling: {n: 8, temperature: 1.0}
    eval_sampling: {n: 1, temperature: 0}
    scheduler: {max_num_seqs: 128}
    cache: {prefix_caching: true}
    engine: {threads: 1}         # what is neither scheduler nor cache

Sections are merged key by key, a value that is itself a mapping too. Only names are checked here;
values are, together with everything else, where the configuration is made. ChatLearn's flat keys
(`temperature`, `eval_top_p`, `seq_length` ..., see `chatlearn`) may stand beside sections or take
their place, and any text may be `${VARIABLE:default}`, from the environment.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from turnwise.config import ALIASES, REPLACED_KEYS, asks_for_nothing, known_keys
from turnwise.errors import InputError
from turnwise.modules import chatlearn
from turnwise.modules.yaml_file import leaves, with_included


def _section(prefix: str) -> dict[str, str]:
    """Every key of a section of the configuration, by its last name."""
    return {k.removeprefix(prefix): k for k in known_keys() if k.startswith(prefix)}


_SCHEDULER = {
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
}
_CACHE = {
    "kv_cache_gib": "engine.kv_cache_gib",
    "prefix_caching": "engine.prefix_caching",
    "block_size": "engine.extra.block_size",
    "gpu_memory_utilization": "engine.extra.gpu_memory_utilization",
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

Settings = dict[str, Any]
"""Values by dotted keys of the configuration."""


def read_model_file(path: str | Path) -> Settings:
    """The settings of a model's file and of all that it includes.

    Raises:
        InputError: naming the file that cannot be read or is included by itself, or every key
            that is unknown (with the nearest known one), that vLLM no longer has, or that has no
            meaning here.
    """
    return _resolved(path)[0]


def read_model_args(path: str | Path) -> chatlearn.Args:
    """The values of a file's flat keys, ChatLearn's names, as they are written there.

    Raises:
        InputError: as `read_model_file` does.
    """
    return _resolved(path)[1]


def as_overrides(settings: Settings) -> list[str]:
    """The settings as `key.sub=value` overrides of a configuration."""
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000)}"
        for key, value in settings.items()
    ]


def _resolved(path: str | Path) -> tuple[Settings, chatlearn.Args]:
    """The settings of a file, and its flat keys, which are a part of them."""
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


def _parted(tree: Mapping[str, Any]) -> tuple[chatlearn.Args, dict[str, Any]]:
    """The flat keys of one file, and its sections."""
    flat = {
        str(key): None if value == "None" else value
        for key, value in tree.items()
        if key not in _SECTIONS or (key in chatlearn.KNOWN and isinstance(value, str))
    }
    return flat, {key: value for key, value in tree.items() if key not in flat}


def _unknown_in(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each mistake in the sections of one file."""
    for section, values in sections.items():
        if values is not None and not isinstance(values, dict):
            yield f"{section} must hold keys and values, not {values!r}"
            continue
        for name, value in (values or {}).items():
            known = name in _SECTIONS[section]
            if not known and not (name in REPLACED_KEYS and asks_for_nothing(name, value)):
                yield _unknown(section, str(name))


def _named(sections: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of one file's sections under the configuration's keys."""
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if name in _SECTIONS[section]:
                yield from leaves(_SECTIONS[section][name], value)


def _unknown(section: str, name: str) -> str:
    """What is wrong with a key, and which one may have been meant."""
    full = f"{section}.{name}" if section else name
    if name in REPLACED_KEYS:
        return f"{full} is gone: {REPLACED_KEYS[name]}"
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
