"""YAML files that include others and read environment variables."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from turnwise.compat.chatlearn.keys import expand
from turnwise.config.base import Tree
from turnwise.errors import InputError

Settings = Tree
"""Values by dotted keys of the configuration."""


def with_included(path: Path, kind: str) -> Iterator[tuple[Path, Tree]]:
    """Yield the trees of a file and of everything it includes; included files come first.

    A later tree therefore has the last word.

    Args:
        kind: Name of such a file in errors: "model file".

    Raises:
        InputError: naming the file that cannot be read, holds no keys, or includes itself.
    """
    yield from _read(path, kind, ())


def load_merged(path: Path, kind: str) -> Tree:
    """Return a file's tree over those that it includes.

    Raises:
        InputError: as `with_included` does.
    """
    tree: Tree = {}
    for _, own in with_included(path, kind):
        tree = merged(tree, own)
    return tree


def _read(path: Path, kind: str, including: tuple[Path, ...]) -> Iterator[tuple[Path, Tree]]:
    where = path.resolve()
    if where in including:
        chain = " -> ".join(str(p.name) for p in (*including[including.index(where) :], where))
        raise InputError(f"the {kind} {path} includes itself: {chain}")
    by = f", which {including[-1]} includes" if including else ""
    try:
        tree = expand(yaml.safe_load(path.read_text()) or {})
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
        yield from _read(path.parent / Path(name).expanduser(), kind, (*including, where))
    yield path, tree


def merged(base: Tree, over: Tree) -> Tree:
    """Merge two trees, section by section; `over` has the last word."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values below a key, with their dotted keys."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from leaves(f"{key}.{name}", below)
    else:
        yield key, value
