"""Parsed JSON of files, requests and tool calls: its types, and the names of torch types in it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Args = Sequence[object]
Kwargs = Mapping[str, object] | None  # with `Args`, the arguments of a call in another process
JsonObject = dict[str, Any]  # a parsed JSON object; its values are checked where they are used


def dtype_name(dtype: object) -> str:
    """Return the name of a torch type, such as "bfloat16"; a name is returned unchanged."""
    return str(dtype).removeprefix("torch.")


def leaves(tree: object, key: str = "", separator: str = ".") -> Iterator[tuple[str, object]]:
    """Yield the values at the ends of a tree, each with the keys that lead to it, joined."""
    if isinstance(tree, dict) and tree:
        for name, below in tree.items():
            yield from leaves(below, f"{key}{separator}{name}" if key else str(name), separator)
    else:
        yield key, tree
