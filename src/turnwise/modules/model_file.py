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
values are, together with everything else, where the configuration is made.
"""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from turnwise.config import REPLACED_KEYS, known_keys
from turnwise.errors import InputError


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
        InputError: naming the file that cannot be read, is included by itself, or has a key that
            is unknown (with the nearest known one) or that vLLM no longer has.
    """
    return _read(Path(path).expanduser(), ())


def as_overrides(settings: Settings) -> list[str]:
    """The settings as `key.sub=value` overrides of a configuration."""
    return [
        f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10_000)}"
        for key, value in settings.items()
    ]


def _read(path: Path, including: tuple[Path, ...]) -> Settings:
    where = path.resolve()
    if where in including:
        chain = " -> ".join(str(p.name) for p in (*including[including.index(where) :], where))
        raise InputError(f"the model file {path} includes itself: {chain}")
    tree = _load(path, including[-1] if including else None)
    includes = tree.pop("includes", None) or []
    includes = [includes] if isinstance(includes, str) else includes
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise InputError(f"{path}: includes must be a list of files, not {includes!r}")
    settings: Settings = {}
    for name in includes:
        settings |= _read(path.parent / Path(name).expanduser(), (*including, where))
    return settings | dict(_named(tree, path))


def _load(path: Path, included_by: Path | None) -> dict[str, Any]:
    by = f", which {included_by} includes" if included_by else ""
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise InputError(f"there is no model file {path}{by}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the model file {path}{by} cannot be read: {reason}") from None
    if not isinstance(tree, dict):
        raise InputError(f"the model file {path}{by} must hold keys and values")
    return tree


def _named(tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """The values of one file under the configuration's keys."""
    for section, values in tree.items():
        if section not in _SECTIONS:
            raise InputError(f"{path}: {_unknown('', str(section))}")
        if values is not None and not isinstance(values, dict):
            raise InputError(f"{path}: {section} must hold keys and values, not {values!r}")
        for name, value in (values or {}).items():
            if name not in _SECTIONS[section]:
                raise InputError(f"{path}: {_unknown(section, str(name))}")
            yield from _leaves(_SECTIONS[section][name], value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(f"{key}.{name}", below)
    else:
        yield key, value


def _unknown(section: str, name: str) -> str:
    """What is wrong with a key, and which one may have been meant."""
    full = f"{section}.{name}" if section else name
    if name in REPLACED_KEYS:
        return f"{full} is gone: {REPLACED_KEYS[name]}"
    known = {f"{s}.{k}": k for s, keys in _SECTIONS.items() for k in keys}
    own = [key for key in known if section and key.startswith(f"{section}.")]
    meant = (
        difflib.get_close_matches(full, own, 1, 0.75)
        or [key for key, leaf in known.items() if leaf == name]
        or difflib.get_close_matches(full, [*_SECTIONS, *known], 1, 0.0)
    )
    return f"there is no key {full}; did you mean {meant[0]}?"
