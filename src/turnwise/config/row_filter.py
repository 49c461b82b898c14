"""Conditions on rows of data (`data.filter`): one expression, of which only harmless parts exist.

It is never given to Python's `eval`: names are fields of the row, and there are comparisons, `and`,
`or`, `not`, `in` and `len`. It can call nothing else, and read nothing but the row.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_Value: TypeAlias = Any
"""A value in a row, or one computed from it."""
_MOST = 500  # characters of an expression
_COMPARISONS: dict[type[ast.cmpop], Callable[[_Value, _Value], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_CONSTANTS = {"true": True, "false": False, "null": None}  # as in YAML and JSON


class RowFilter:
    """A condition on rows, such as `reward >= 1 and len(turns) < 6`.

    A field below another is written with a dot or in brackets: `reward_parts.tests`,
    `metrics["steps"]`. One that a row lacks is null, and a comparison by size with null, or of a
    text with a number, is false.

    Raises:
        ValueError: when the expression has a part that conditions do not have.

    Example:
        >>> good = RowFilter("reward >= 1 and status == 'completed'")
        >>> good({"reward": 1.0, "status": "completed"}), good({"reward": None, "status": ""})
        (True, False)
    """

    def __init__(self, expression: str) -> None:
        try:
            self._tree = ast.parse(expression[: _MOST + 1].strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{expression!r} is no condition such as reward >= 1") from error
        if len(expression) > _MOST:
            raise ValueError(f"a condition has at most {_MOST} characters")
        self.fields: set[str] = set()
        """Names of the fields of a row that it reads."""
        _value(self._tree, {}, self.fields)  # finds parts that conditions do not have

    def __call__(self, row: Mapping[str, object]) -> bool:
        """Return whether a row meets the condition."""
        return bool(_value(self._tree, row, set()))


def _value(node: ast.expr, row: Mapping[str, object], fields: set[str]) -> _Value:
    """Return the value of a part of a condition, null where it has none; add the fields of the row
    that it reads."""

    def value(part: ast.expr) -> _Value:
        return _value(part, row, fields)

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(id=name):
            fields.add(name)
            return row.get(name)
        case ast.Attribute(value=of, attr=name):
            return _tried(_item, value(of), name)
        case ast.Subscript(value=of, slice=key) if not isinstance(key, ast.Slice):
            return _tried(_item, value(of), value(key))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value(item) for item in items]
        case ast.BoolOp(op=op, values=parts):
            values = [bool(value(part)) for part in parts]
            return any(values) if isinstance(op, ast.Or) else all(values)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not value(part)
        case ast.Call(func=ast.Name(id="len"), args=[part], keywords=[]):
            return _tried(len, value(part))
        case ast.Compare(left=left, ops=ops, comparators=others) if _COMPARISONS.keys() >= {
            type(op) for op in ops
        }:
            values = [value(part) for part in (left, *others)]
            pairs = zip(ops, values, values[1:], strict=False)
            return all([_tried(_COMPARISONS[type(op)], a, b) for op, a, b in pairs])
    raise ValueError(
        f"{ast.unparse(node)!r} cannot be part of a condition, which has fields, comparisons, and, "
        "or, not, in, and len()"
    )


def _item(of: _Value, key: _Value) -> _Value:
    return of[key] if isinstance(of, dict | list) else None


def _tried(function: Callable[..., _Value], *values: _Value) -> _Value:
    try:
        return function(*values)
    except (TypeError, LookupError):  # such as null >= 1
        return None
