"""Loading a checked `Config` from a YAML file and `key.sub=value` overrides, and dumping it.

Each mistake is reported in one sentence that names the key most likely intended. Secrets are masked
in everything that leaves the machine, such as trackers and exported pages.

To add a kind of secret to mask: write a name in `_SECRET_NAME`, or a form in `masked_value`.
"""

import difflib
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from turnwise.config.algorithm import PARTS
from turnwise.config.aliases import ALIASES, REPLACED_KEYS
from turnwise.config.base import NEEDED_KEYS, Tree, sections
from turnwise.config.explain import CHOICES, known_keys
from turnwise.config.schema import Config
from turnwise.config.yaml_text import read_yaml
from turnwise.errors import InputError

_OUT_OF_FILES = {"serving": {"api_key"}}  # keys that are not written to files
MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[^a-z])(key|token|secret|pass|password|passwd|credentials?|authorization|cookie)$"
)
_SECRET_SECTIONS = ("env", "headers", "ray_env")  # in which any value may be a secret
_USER = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in a URL
_PARAMETER = re.compile(r"(?<=[?&#])([^=?&#\s]+)=([^&#\s]+)")  # of a URL: name and value
_REFERENCE = re.compile(r"(\w+ )?\$\{\w+\}")  # the name of an environment variable, not a secret

ConfigSource = str | Path | Config | Mapping[str, object]
"""A YAML file, a `Config`, a dictionary, or a configuration of OmegaConf or a dataclass."""


def load_config(
    source: ConfigSource,
    overrides: Sequence[str] = (),
    defaults: Tree | None = None,
    settings: Mapping[str, object] | None = None,
    optional: Collection[str] = (),
) -> Config:
    """Read a configuration, apply `key.sub=value` overrides (YAML values), and check the result.

    Args:
        source: The path of a YAML file, or keys and values: a dictionary, a `Config`, OmegaConf's
            `DictConfig` or a dataclass.
        overrides: Changes as text, which take precedence over everything else.
        defaults: Values for keys that the file does not set.
        settings: Values by dotted key; they take precedence over the file, but not over overrides.
        optional: Keys that may have no value here: environment, data.path, data.eval_path.

    Raises:
        InputError: when the file, an override or a key cannot be used; the message names it, and
            for an unknown key the closest known key.

    Example:
        config = load_config("config.yaml", ["training.steps=10", "sampling.stop=[END]"])
    """
    return make_config(read_tree(source), overrides, defaults, settings, optional)


def read_tree(source: ConfigSource) -> Tree:
    """Return the keys and values of a configuration, which `load_config` describes."""
    if isinstance(source, Config):
        return source.model_dump()
    if not isinstance(source, str | Path):
        return _plain(source)
    try:
        tree = read_yaml(Path(source).read_text(encoding="utf-8"), str(source)) or {}
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {source}") from None
    except IsADirectoryError:
        raise InputError(f"{source} is a folder, not a configuration file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the configuration file {source} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"the configuration file {source} must hold keys and values")
    return tree


def _plain(source: object) -> Tree:
    """Return a mapping, an OmegaConf configuration or a dataclass as dictionaries and values."""
    omegaconf = sys.modules.get("omegaconf")  # a user who has such an object has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(source):
        source = omegaconf.OmegaConf.to_container(source, resolve=True)
    elif is_dataclass(source) and not isinstance(source, type):
        source = asdict(source)
    if not isinstance(source, Mapping):
        raise InputError(
            "a configuration is a YAML file, a dictionary, an OmegaConf configuration or a "
            f"dataclass, not {type(source).__name__}"
        )
    return {
        key: _plain(item) if isinstance(item, Mapping) else item for key, item in source.items()
    }


def make_config(
    tree: Tree,
    overrides: Sequence[str] = (),
    defaults: Tree | None = None,
    settings: Mapping[str, object] | None = None,
    optional: Collection[str] = (),
) -> Config:
    """Make a configuration as `load_config` does, from a parsed file, which is left unchanged."""
    changed = deepcopy(tree)
    for key, value in (settings or {}).items():
        set_key(changed, key, value)
    for override in overrides:
        apply_override(changed, override)
    return parse_config(_filled(changed, defaults or {}), optional)


def parse_config(tree: Tree, optional: Collection[str] = ()) -> Config:
    """Check a tree of plain values, as `load_config` does; raise an InputError with one sentence
    for each mistake."""
    several = ("environment", "data.path") if tree.get("environments") else ()
    given = {*optional, *several}
    missing = [key for key in NEEDED_KEYS if value_of(tree, key) is None and key not in given]
    problems = [_explain_missing(key) for key in missing]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain_mistake(e) for e in error.errors(include_url=False)]
    else:
        evaluates = "data.eval_path" in optional or any(
            part.data.heldout for part in config.parts().values()
        )
        if config.eval.target is not None and not (config.eval.every and evaluates):
            problems.append(
                "eval.target needs evaluations: set data.eval_path, and eval.every above 0"
            )
        if not problems:
            return config
    raise InputError("configuration: " + "; ".join(problems))


def dump_config(config: Config, *, secrets: bool = False) -> str:
    """Return the configuration as YAML that `load_config` reads, by default without API keys."""
    exclude = None if secrets else _OUT_OF_FILES
    return yaml.safe_dump(config.model_dump(exclude=exclude), sort_keys=False)


def masked(config: Config) -> dict[str, object]:
    """Return a configuration as plain values, with a mask for each value that may be a secret.

    A mask replaces the values of `headers`, `env` and `ray_env`; texts whose key is named token,
    key, secret, password or similarly; and, in URLs, user names and parameters with such names.
    `serving.api_key` is left out.
    """
    tree = config.model_dump(mode="json", exclude=_OUT_OF_FILES)
    return {key: masked_value(key, value) for key, value in tree.items()}


def has_secrets(config: Config) -> bool:
    """Return whether `masked` masks something."""
    return masked(config) != config.model_dump(mode="json", exclude=_OUT_OF_FILES)


def masked_value(name: str, value: object) -> object:
    """Mask a value that is a secret by its key (the last part of a dotted key) or by its form."""
    if isinstance(value, Mapping):
        section = name in _SECRET_SECTIONS
        return {
            key: masked_value("secret" if section else str(key), item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            masked_value(name, _masked_argument(before, item))
            for before, item in pairwise(["", *value])
        ]
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(name) and not _REFERENCE.fullmatch(value):
        return MASK
    return _USER.sub(f"{MASK}@", _PARAMETER.sub(_masked_parameter, value))


def _masked_argument(before: object, value: object) -> object:
    """Mask a secret in a list of command arguments: WORD in --key=WORD, or in --token WORD, where
    --token is the item `before`."""
    if not isinstance(value, str) or not isinstance(before, str):
        return value
    option, separator, _ = value.partition("=")
    if separator and option.startswith("-") and _is_secret(option):
        return f"{option}={MASK}"
    if before.startswith("-") and _is_secret(before) and not value.startswith("-"):
        return MASK
    return value


def _masked_parameter(found: re.Match[str]) -> str:
    name, value = found.groups()
    secret = _is_secret(name) and not _REFERENCE.fullmatch(value)
    return f"{name}={MASK}" if secret else found[0]


def _is_secret(name: str) -> bool:
    """Return whether a name is the name of a secret, in any spelling, such as hf_token, API-KEY or
    apiKey."""
    return bool(_SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def apply_override(tree: Tree, override: str) -> None:
    """Set one key of a tree by `key.sub=value`."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"an override must have the form key.sub=value, not {override!r}")
    try:
        value = read_yaml(text, f"the override of {key}", key)
    except yaml.YAMLError:
        raise InputError(f"the value of {key} is not valid YAML: {text!r}") from None
    set_key(tree, key, value)


def set_key(tree: Tree, key: str, value: object) -> None:
    """Set the value of a dotted key in a tree, creating missing sections.

    A part of the algorithm that is a bare name becomes a section with that name.
    """
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents, start=1):
        if tree.get(parent) is None:
            tree[parent] = {}
        elif isinstance(tree[parent], str) and ".".join(parents[:depth]) in PARTS:
            tree[parent] = {"name": tree[parent]}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise InputError(f"{key}: {parent} is a value, not a section, and has no keys")
    tree[leaf] = value


def _filled(tree: Tree, defaults: Tree) -> Tree:
    filled = {**tree}
    for key, value in defaults.items():
        if filled.get(key) is None:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(filled[key], dict):
            filled[key] = _filled(filled[key], value)
    return filled


def value_of(tree: Tree, key: str) -> object:
    """Return the value of a dotted key, or None if it is not set."""
    value: object = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value


def _explain_mistake(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as a sentence that names the key."""
    loc = [str(part) for part in error["loc"]]
    # pydantic adds the name of the chosen kind after a key that has several kinds.
    key = ".".join(p for i, p in enumerate(loc) if ".".join(loc[:i]) not in CHOICES)
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.name must be one of {known}, not {error['ctx']['tag']!r}"
    if error["type"] == "extra_forbidden":
        owner, _, leaf = key.rpartition(".")
        if leaf in REPLACED_KEYS:
            return f"{key} is not supported: {REPLACED_KEYS[leaf]}"
        if key in known_keys():
            fields = [kind.model_fields for kind in CHOICES[owner] if leaf in kind.model_fields]
            names = " and ".join(each["name"].default for each in fields)
            return f"{key} belongs to {names}, not to {loc[-2]} ({owner}.name)"
        unknown: dict[str, list[str]] = {}
        for each, meant in _explain_unknown(key, error["input"]):
            unknown.setdefault(meant, []).append(each)
        return "; ".join(f"there is no key {', '.join(keys)}{m}" for m, keys in unknown.items())
    if error["type"] == "missing":
        field = Config.model_fields.get(key)
        parts = sections(field.annotation) if field is not None else []
        below = [n for part in parts for n, f in part.model_fields.items() if f.is_required()]
        missing = [key, *(f"{key}.{name}" for name in below)]
        explained = [_explain_missing(k) for k in missing if k in known_keys()]
        return "; ".join(explained or [f"{key} must be set"])
    value = error["input"]
    if error["type"] in ("model_type", "union_tag_not_found"):
        return f"{key} must be a section with its own keys, not {value!r}"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    given = f", not {value!r}" if isinstance(value, str | int | float) else ""
    return f"{key}: {error['msg']}{given}"


def _explain_unknown(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield an unknown key, or each key below it if it is a section of another system, with the
    end of the sentence about it, which names our key or says how we do without one."""
    others = import_module("turnwise.compat.keys")  # imported only if a key is unknown
    answer: str | None = others.answer(key)
    if isinstance(value, dict) and value and others.is_section(key):
        for name, item in value.items():
            yield from _explain_unknown(f"{key}.{name}", item)
    elif answer is None:
        yield key, _nearest(key)
    else:
        yield key, f"; did you mean {answer}?" if answer in known_keys() else f": {answer}"


def _explain_missing(key: str) -> str:
    return f"{key} must be set ({known_keys()[key].rstrip('.')})"


def _nearest(key: str) -> str:
    """Return a hint that names the known key most likely meant, or where to find all keys."""
    known = list(known_keys())
    section, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    tops = list(dict.fromkeys(k.partition(".")[0] for k in known))
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]

    def close(name: str, candidates: Sequence[str], cutoff: float) -> list[str]:
        return difflib.get_close_matches(name, candidates, 1, cutoff)

    beside = f"{section}." if section else ""
    alias = ALIASES.get(leaf.lower().replace("-", "_"), "")
    owner, _, own = alias.rpartition(".")
    if own in siblings and section.endswith(owner):
        alias = beside + own
    meant = (
        ([alias] if alias else [])
        or [beside + name for name in close(leaf, siblings, 0.75)]
        or elsewhere
        or ([] if section else close(key, tops, 0.75))
        or close(key, known, 0.75)
        or [beside + name for name in close(leaf, siblings, 0.4)]
    )
    return f"; did you mean {meant[0]}?" if meant else "; `turnwise config` prints all keys"
