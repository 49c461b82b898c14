"""Reading of YAML. A key that is given twice with different values is an error, because YAML would
silently keep only the later value."""

from collections.abc import Hashable, Iterator

import yaml

from turnwise.errors import InputError

_MERGE = "tag:yaml.org,2002:merge"  # of the key <<, which merges another mapping


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which notes the keys that occur twice in one mapping."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[str, int, int]] = []  # key, and its first and second line
        self._path: list[str] = []  # keys that lead to the node in progress

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        if index is not None:  # it is None for the document and for keys
            self._path.append(str(index.value if isinstance(index, yaml.ScalarNode) else index))
        node = super().compose_node(parent, index)  # type: ignore[arg-type]  # it is an int too
        if index is not None:
            self._path.pop()
        return node

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[Hashable, tuple[yaml.Node, yaml.Node]] = {}
        for name, own in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            value = name.value if name.tag == _MERGE else self.construct_object(name)
            before, known = first.setdefault((type(value), value), (name, own))
            if before is not name and yaml.serialize(own) != yaml.serialize(known):
                lines = before.start_mark.line + 1, name.start_mark.line + 1
                self.twice.append((".".join([*self._path, name.value]), *lines))
        return node


def read_yaml(text: str, source: str, prefix: str = "") -> object:
    """Read a YAML document.

    Args:
        source: Name of the text, such as its file; an error message begins with it.
        prefix: Key that has the text as its value; "" if the text is a whole document.

    Raises:
        InputError: when a key is given twice in one mapping, with different values; the error names
            the key and its lines.
        yaml.YAMLError: when the text is not valid YAML.
    """
    loader = _Loader(text)
    try:
        value: object = loader.get_single_data()
    finally:
        loader.dispose()
    if loader.twice:
        raise InputError("; ".join(_sentences(loader.twice, source, prefix)))
    return value


def _sentences(twice: list[tuple[str, int, int]], source: str, prefix: str) -> Iterator[str]:
    for key, first, second in sorted(twice, key=lambda each: each[2]):
        name = f"{prefix}.{key}" if prefix else key
        line = "" if prefix else f", line {second}"
        before = "" if first == second else f" (first in line {first})"
        yield f"{source}{line}: the key {name} is given twice{before}: keep one of them"
