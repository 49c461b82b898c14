"""Validation of arguments by JSON schemas that come from outside, such as an MCP server's.

Neither the schema nor the arguments are trusted. A schema may not refer to another document, so
nothing is fetched. Most patterns in a schema are matched in linear time; patterns with lookarounds
or backreferences have a limited number of steps. The cost of a call is computed before validation:
a schema whose references double at each step, and arguments nested too deeply, are refused.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.errors import InputError, first_line, visible
from turnwise.tools.schema import MAX_MISTAKES, ArgumentsError

if TYPE_CHECKING:
    from jsonschema_rs import FancyRegexOptions

_LOG = logging.getLogger(__name__)
_MAX_CHARS = 1 << 18
"""Maximum number of characters of a schema, far more than fit into a prompt."""
_MAX_COST = 100_000
"""Maximum number of checks of one value in the arguments, counted by `_cost_by_depth`."""
_MAX_CALL_COST = 5_000_000
"""Maximum number of checks of one call: about 0.1 s, during which the GIL may be held."""
_MAX_NAMED_COST = 200_000
"""Maximum number of checks of a call whose mistakes are listed one by one."""
_MAX_DEPTH = 100
"""Maximum number of levels of the arguments."""
_MAX_WORK = 2_000_000
"""Maximum number of steps to compute the cost of a schema: about half a second."""
_MIN_DEPTH = 2
"""Number of levels below the arguments object at which a schema's cost must not be too high."""
_MAX_CHAIN = 100
"""Maximum length of a chain of schemas that refer to each other for the same value."""
_MAX_FRAMES = 2_000
"""Maximum product of the length of the longest chain and the levels of arguments, because
validation recurses."""
_MAX_PATTERNS = 500
_PATTERN_COST, _LOOKING_COST = 20, 1_000
"""Cost of a pattern, in checks: if it is matched in linear time, and if it needs backtracking."""
_MAX_STEPS = 5_000
"""Maximum number of backtracking steps of a pattern with lookarounds or backreferences."""
_PATTERN_BYTES = 1 << 20
_SHOWN = 100

_Step = Literal["here", "member", "item", "name"]
"""The values to which a schema inside a schema applies: the same value as the outer schema
("here"), an object's members, an array's items, or an object's keys ("name")."""
_PARTS: dict[str, tuple[_Step, Literal["one", "list", "map"]]] = {
    **dict.fromkeys(("not", "if", "then", "else"), ("here", "one")),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), ("here", "list")),
    **dict.fromkeys(("dependentSchemas", "dependencies"), ("here", "map")),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), ("member", "one")),
    **dict.fromkeys(("properties", "patternProperties"), ("member", "map")),
    "propertyNames": ("name", "one"),
    **dict.fromkeys(("additionalItems", "unevaluatedItems", "contains"), ("item", "one")),
    "prefixItems": ("item", "list"),
    "items": ("item", "one"),  # or "list", in older drafts
}
"""The keywords that contain schemas. Keywords that contain data, such as `default`, are left
out."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class ArgumentsSchema:
    """The JSON schema of a tool's arguments; `$schema` chooses the draft, by default 2020-12.

    `format` is not checked. A pattern that cannot be read is logged and not checked.

    Args:
        schema: The schema, as JSON text.
        name: Name of the tool, for messages.

    Raises:
        InputError: when the text is not a JSON schema, refers to another document, or costs too
            much.
    """

    def __init__(self, schema: str, name: str) -> None:
        import jsonschema_rs  # late, because the tools of many runs are only functions

        if len(schema) > _MAX_CHARS:
            raise _refused(name, f"have more than {_MAX_CHARS:,} characters")
        read = json.loads(schema)
        graph = _Graph(read, name)
        graph.drop_unreadable_patterns()
        self._depth, self._cost = graph.limits()
        self._invalid = jsonschema_rs.ValidationError
        try:
            kind = jsonschema_rs.validator_cls_for(read)
            self._validator = kind(
                read, pattern_options=_patterns(), validate_formats=False, offline=True
            )
        except jsonschema_rs.ValidationError as error:
            raise _refused(name, f"are not a JSON schema: {_named(error)}") from error
        except ValueError as error:  # for example, more than 200 levels
            raise _refused(name, f"cannot be read: {first_line(error)}") from error

    def read(self, arguments_json: str) -> JsonObject:
        """Return a call's arguments; call this in a thread, because it can take long.

        Raises:
            ArgumentsError: when the arguments do not fit; it lists the mistakes and their paths.
        """
        try:
            arguments = json.loads(arguments_json, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
            reason = getattr(error, "msg", "nested too deeply")
            if not isinstance(error, json.JSONDecodeError | RecursionError):
                reason = "a number is too long"
            raise ArgumentsError(f"arguments: not JSON ({reason})") from None
        if not isinstance(arguments, dict):
            raise ArgumentsError("arguments: must be a JSON object")
        values, depth = _measured(arguments)
        if depth > self._depth:
            raise ArgumentsError(f"arguments: nested more than {self._depth} levels deep")
        cost = values * self._cost
        if cost > _MAX_CALL_COST:
            raise ArgumentsError("arguments: too many values for the tool's JSON schema")
        try:
            if self._validator.is_valid(arguments):
                return arguments
            # Listing mistakes is slow, because the validator makes all mistakes, with their values.
            if max(cost, len(arguments_json)) > _MAX_NAMED_COST:
                raise ArgumentsError("arguments: do not fit the tool's JSON schema")
            found = islice(self._validator.iter_errors(arguments), MAX_MISTAKES)
            raise ArgumentsError("; ".join(map(_named, found)))
        except UnicodeEncodeError:
            raise ArgumentsError(
                "arguments: a text has half a character (a lone surrogate)"
            ) from None


@lru_cache(maxsize=1024)
def arguments_schema(schema: str, name: str) -> ArgumentsSchema:
    """Return a tool's `ArgumentsSchema`; cached, because all trajectories have the same tools."""
    return ArgumentsSchema(schema, name)


def check_parameters(parameters: object, name: str) -> ArgumentsSchema:
    """Return the schema of a tool's parameters; raise InputError if `ArgumentsSchema` refuses the
    parameters, or they are not JSON."""
    try:
        return arguments_schema(json.dumps(parameters), name)
    except (TypeError, ValueError, RecursionError) as error:  # not JSON, or it contains itself
        raise _refused(name, f"are not JSON: {first_line(error)}") from error


def _refused(name: str, why: str) -> InputError:
    return InputError(f"tool {name[:_SHOWN]}: its parameters {why}")


def _named(error: Foreign) -> str:
    """Return a mistake with its path. A long message is cut in the middle, because its end names
    the violated rule."""
    message = visible(error.message)
    if len(message) > 2 * _SHOWN:
        message = f"{message[:_SHOWN]}...{message[-_SHOWN:]}"
    path = ".".join(map(str, error.instance_path)) or "arguments"
    return f"{path}: {message}"


def _no_constant(name: str) -> object:
    raise ArgumentsError(f"arguments: not JSON ({name})")


def _measured(value: object) -> tuple[int, int]:
    """Return the number of values, including keys, and the number of levels below the value."""
    values, depth, level = 1, -1, [value]
    while level:
        depth += 1
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                values += 2 * len(each)
                below += each.values()
            elif isinstance(each, list):
                values += len(each)
                below += each
        level = below
    return values, depth


def _patterns() -> "FancyRegexOptions":
    from jsonschema_rs import FancyRegexOptions

    return FancyRegexOptions(backtrack_limit=_MAX_STEPS, size_limit=_PATTERN_BYTES)


@lru_cache(maxsize=4096)
def _pattern_cost(pattern: str) -> int | None:
    """Return a pattern's cost in checks; None if it cannot be read."""
    from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError

    linear = RegexOptions(size_limit=_PATTERN_BYTES)
    for options, cost in ((linear, _PATTERN_COST), (_patterns(), _LOOKING_COST)):
        try:
            Draft202012Validator({"pattern": pattern}, pattern_options=options)
        except (ValidationError, ValueError):
            continue
        return cost
    return None


@dataclass(slots=True)
class _Node:
    """A schema within a schema."""

    schema: JsonObject
    here: list["_Node"]
    """Schemas that apply to the same value."""
    below: list[tuple[_Step, str | int | None, "_Node"]]
    """Schemas that apply to members, items or keys of the value. The second part is the key or
    index of a single member or item; None if the schema applies to several."""
    cost: int = 1
    chain: int = 0
    """Length of the longest chain of schemas for the same value that starts at this schema."""


class _Graph:
    """All schemas that a schema's validation can reach; the schemas are changed in place."""

    def __init__(self, root: object, name: str) -> None:
        self._root, self._name = root, name
        self._nodes: dict[int, _Node] = {}
        self._anchors: dict[str, list[object]] | None = None
        self._work = 0
        self._add(root)
        waiting = list(self._nodes.values())
        while waiting:
            node = waiting.pop()
            known = len(self._nodes)
            for step, key, part in self._parts(node.schema):
                found = self._add(part)
                if found is None:  # true, false, or not a schema, which the validator reports
                    continue
                if step == "here":
                    node.here.append(found)
                else:
                    node.below.append((step, key, found))
            waiting += islice(self._nodes.values(), known, None)
        self._order = self._ordered()

    def _add(self, schema: object) -> _Node | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._nodes:
            # Remove the addresses, so that all references are to places in one document.
            for key in ("$id", "id"):
                if isinstance(schema.get(key), str):
                    del schema[key]
            self._nodes[id(schema)] = _Node(schema, [], [], cost=_own_cost(schema))
        return self._nodes[id(schema)]

    def _parts(self, schema: JsonObject) -> Iterator[tuple[_Step, str | int | None, object]]:
        for keyword, value in schema.items():
            if keyword in _REFERENCES and isinstance(value, str):
                for found in self._targets(value):
                    yield "here", None, found
            if keyword not in _PARTS:
                continue
            step, form = _PARTS[keyword]
            if form == "map" and isinstance(value, dict):
                for key, part in value.items():
                    yield step, key if keyword == "properties" else None, part
            elif isinstance(value, list):
                for index, part in enumerate(value):
                    yield step, index, part
            elif form == "one":
                yield step, None, value

    def _targets(self, reference: str) -> list[object]:
        """Return the schemas to which a reference may lead: one schema, unless anchors share a
        name."""
        if not reference.startswith("#"):
            raise _refused(self._name, f"refer to another document, {reference!r:.80}")
        place = unquote(reference[1:])
        if not place.startswith("/") and place:
            if self._anchors is None:
                self._anchors = _anchors_in(self._root)
            return self._anchors.get(place, [])
        at: object = self._root
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list):
                at = at[int(step)] if step.isdecimal() and int(step) < len(at) else None
            else:
                at = at.get(step) if isinstance(at, dict) else None
        return [at]  # the validator refuses None, and names the place

    def drop_unreadable_patterns(self) -> None:
        """Remove patterns that cannot be read, and log them, because the tool may be useful without
        them."""
        number = 0
        for node in self._nodes.values():
            schema, named = node.schema, node.schema.get("patternProperties")
            named = named if isinstance(named, dict) else {}
            own = [each] if isinstance(each := schema.get("pattern"), str) else []
            number += len(own) + len(named)
            if number > _MAX_PATTERNS:
                raise _refused(self._name, f"have more than {_MAX_PATTERNS} patterns")
            for pattern in [*own, *named]:
                if (cost := _pattern_cost(pattern)) is not None:
                    node.cost += cost
                    continue
                if pattern in own:
                    schema.pop("pattern", None)
                if pattern in named:
                    del named[pattern]
                    # Without the pattern, it is unknown which properties are additional.
                    for others in ("additionalProperties", "unevaluatedProperties"):
                        schema.pop(others, None)
                _LOG.warning(
                    "tool %s: the pattern %s in its parameters cannot be read, and is not checked",
                    visible(self._name[:_SHOWN]),
                    visible(repr(pattern)[:_SHOWN]),
                )

    def _ordered(self) -> list[_Node]:
        """Return the schemas in topological order: each schema comes before the schemas to which it
        leads for the same value. Also set `chain`. Raise InputError if a schema leads to itself."""
        done: dict[int, _Node] = {}
        begun: set[int] = set()
        stack = [(node, False) for node in self._nodes.values()]
        while stack:
            node, is_left = stack.pop()
            key = id(node.schema)
            if key in done:
                continue
            if is_left:
                node.chain = 1 + max((part.chain for part in node.here), default=0)
                if node.chain > _MAX_CHAIN:
                    raise _refused(self._name, f"refer to {_MAX_CHAIN} schemas in a row")
                done[key] = node
                continue
            if key in begun:
                raise _refused(self._name, "have a reference that leads to itself")
            begun.add(key)
            stack.append((node, True))
            stack += [(part, False) for part in node.here if id(part.schema) not in done]
        return [*reversed(done.values())]

    def limits(self) -> tuple[int, int]:
        """Return the maximum number of levels of arguments, and the maximum number of checks of one
        value.

        Raises:
            InputError: when values within `_MIN_DEPTH` levels would need too many checks.
        """
        longest = max((node.chain for node in self._order), default=1)
        depth, largest = min(_MAX_DEPTH, _MAX_FRAMES // longest), 1
        for level, cost in enumerate(self._cost_by_depth()):
            if level > depth:
                break
            if cost > _MAX_COST:
                if level <= _MIN_DEPTH:
                    why = f"are checked by more than {_MAX_COST:,} steps for one value"
                    raise _refused(self._name, why)
                return level - 1, largest
            largest = max(largest, cost)
        return depth, largest

    def _cost_by_depth(self) -> Iterator[int]:
        """Yield, for each level of arguments, the maximum number of checks of one value: the sum,
        over all schemas, of the number of times that the schema applies, times its own checks."""
        if not self._order:
            return
        passed = self._passed()
        times, before = passed[id(self._root)], _Times()
        while times and times != before:  # if two levels are equal, so are all further levels
            yield sum(count * self._nodes[each].cost for each, count in times.items())
            below: dict[tuple[_Step, str | int | None], _Times] = defaultdict(_Times)
            for each, count in times.items():
                for step, key, part in self._nodes[each].below:
                    self._add_times(below[step, key], passed[id(part.schema)], count)
            times, before = _Times(), times
            # Find the worst key. Its own schemas apply, and also the schemas for all keys.
            for (step, key), found in below.items():
                if key is not None:
                    self._add_times(found, below.get((step, None), _Times()))
                for each, count in found.items():
                    times[each] = max(times.get(each, 0), count)

    def _passed(self) -> dict[int, "_Times"]:
        """Return, for each schema, the number of times that it and the schemas to which it leads
        apply to a value."""
        passed: dict[int, _Times] = {}
        for node in reversed(self._order):
            own = passed[id(node.schema)] = _Times({id(node.schema): 1})
            # The validator finds evaluated members by a second walk through the same schemas.
            twice = any(key.startswith("unevaluated") for key in node.schema)
            for part in node.here:
                self._add_times(own, passed[id(part.schema)], 2 if twice else 1)
        return passed

    def _add_times(self, to: "_Times", more: "_Times", count: int = 1) -> None:
        self._work += len(more)
        if self._work > _MAX_WORK:
            raise _refused(self._name, "have too many references to count their steps")
        for schema, times in more.items():
            to[schema] = min(to.get(schema, 0) + count * times, _MAX_COST + 1)


class _Times(dict[int, int]):
    """The number of times that schemas apply to one value."""


def _own_cost(schema: JsonObject) -> int:
    """Return the number of checks of a schema itself, without its patterns."""
    lists = (schema.get(key) for key in ("enum", "required"))
    return 1 + len(schema) // 4 + sum(len(each) for each in lists if isinstance(each, list)) // 4


def _anchors_in(root: object) -> dict[str, list[object]]:
    found: dict[str, list[object]] = defaultdict(list)
    level = [root]
    while level:
        each = level.pop()
        if isinstance(each, dict):
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := each.get(key), str):
                    found[name].append(each)
            level += each.values()
        elif isinstance(each, list):
            level += each
    return found
