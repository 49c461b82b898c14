"""Loading a checked `Config` from a YAML file and `key.sub=value` overrides, and dumping it."""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import yaml
from pydantic import ValidationError

from turnwise.config.algorithm import PARTS
from turnwise.config.base import Tree
from turnwise.config.errors import explain_missing, explain_mistake
from turnwise.config.explain import needed_keys
from turnwise.config.schema import Config
from turnwise.errors import InputError


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    defaults: Tree | None = None,
    settings: Mapping[str, object] | None = None,
    optional: Collection[str] = (),
) -> Config:
    """Read a YAML file, apply `key.sub=value` overrides (values are YAML), and check the result.

    Args:
        overrides: Changes as text, which take precedence over everything else.
        defaults: Values for keys that the file does not set.
        settings: Values by dotted key; they take precedence over the file, but not over overrides.
        optional: Keys that may have no value here: environment, data.path, data.eval_path.

    Raises:
        InputError: naming the file, the override, or every key that is unknown, missing or
            invalid, with the closest known key.

    Example:
        config = load_config("config.yaml", ["training.steps=10", "sampling.stop=[END]"])
    """
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the configuration file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"the configuration file {path} must hold keys and values")
    return make_config(tree, overrides, defaults, settings, optional)


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
    """Check a tree of plain values.

    Args:
        optional: See `load_config`.

    Raises:
        InputError: with one sentence for each mistake.
    """
    several = ("environment", "data.path") if tree.get("environments") else ()
    given = {*optional, *several}
    missing = [key for key in needed_keys() if _value(tree, key) is None and key not in given]
    problems = [explain_missing(key) for key in missing]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [explain_mistake(e) for e in error.errors(include_url=False)]
    else:
        evaluates = "data.eval_path" in optional or any(
            part.data.eval_path is not None for part in config.parts().values()
        )
        if config.eval.target is not None and not (config.eval.every and evaluates):
            problems.append(
                "eval.target needs evaluations: set data.eval_path, and eval.every above 0"
            )
        if not problems:
            return config
    raise InputError("configuration: " + "; ".join(problems))


def dump_config(config: Config, *, secrets: bool = False) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back.

    Args:
        secrets: Include API keys.
    """
    exclude = None if secrets else {"serving": {"api_key"}}
    return yaml.safe_dump(config.model_dump(exclude=exclude), sort_keys=False)


def apply_override(tree: Tree, override: str) -> None:
    """Set one key of a tree by `key.sub=value`.

    Raises:
        InputError: when the override has another form, or a part of the key is a value.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"an override must have the form key.sub=value, not {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"the value of {key} is not valid YAML: {text!r}") from None
    set_key(tree, key, value)


def set_key(tree: Tree, key: str, value: object) -> None:
    """Set the value of a dotted key in a tree, creating missing sections.

    A part of the algorithm that is a bare name becomes a section with that name.

    Raises:
        InputError: when a part of the key is a value.
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
    """Return the tree with missing or empty keys set to their defaults."""
    filled = {**tree}
    for key, value in defaults.items():
        if filled.get(key) is None:
            filled[key] = value
        elif isinstance(value, dict) and isinstance(filled[key], dict):
            filled[key] = _filled(filled[key], value)
    return filled


def _value(tree: Tree, key: str) -> object:
    """Return the value of a dotted key, or None if it is not set."""
    value: object = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value
