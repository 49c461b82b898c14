"""Conditions on rows of data (`data.filter`): one expression, of which only harmless parts exist.

It is never given to Python's `eval`: names are fields of the row, and there are comparisons, `and`,
`or`, `not`, `in`, arithmetic and `len`. No part of it can call anything else, or read anything but
the row. Its length is limited, so it also ends soon.
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
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PARTS = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare),
    *(ast.BinOp, ast.Name, ast.Load, ast.Constant, ast.Attribute, ast.Subscript, ast.Call),
    *(ast.List, ast.Tuple, *_COMPARISONS, *_OPERATIONS),
)
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
        if len(expression) > _MOST:
            raise ValueError(f"a condition has at most {_MOST} characters")
        try:
            self._tree = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{expression!r} is no condition such as reward >= 1") from error
        for node in ast.walk(self._tree):
            call = isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name)
                and node.func.id == "len"
                and len(node.args) == 1
                and not node.keywords
            )
            if call or not isinstance(node, _PARTS):
                raise ValueError(
                    f"{ast.unparse(node)!r} cannot be part of a condition, which has fields, "
                    "comparisons, and, or, not, in, + - * /, and len()"
                )
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        self.fields = sorted(names - {"len", *_CONSTANTS})
        """Names of the fields of a row that it reads."""

    def __call__(self, row: Mapping[str, object]) -> bool:
        """Return whether a row meets the condition."""
        return bool(_value(self._tree, row))


def _value(node: ast.expr, row: Mapping[str, object]) -> _Value:
    """Return the value of a part of a condition; null where it has none."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _CONSTANTS[name] if name in _CONSTANTS else row.get(name)
        case ast.Attribute(value=of, attr=name):
            return _item(_value(of, row), name)
        case ast.Subscript(value=of, slice=key):
            return _item(_value(of, row), _value(key, row))
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, row) for item in items]
        case ast.BoolOp(op=op, values=parts):
            stops = isinstance(op, ast.Or)
            return next((stops for part in parts if bool(_value(part, row)) is stops), not stops)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _value(part, row)
        case ast.UnaryOp(operand=part):
            return _tried(operator.neg, _value(part, row))
        case ast.BinOp(left=left, op=op, right=right):
            values = _value(left, row), _value(right, row)
            if not all(isinstance(value, int | float) for value in values):
                return None  # a text times a number could fill the memory
            return _tried(_OPERATIONS[type(op)], *values)
        case ast.Call(args=[part]):
            return _tried(len, _value(part, row))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, row) for part in (left, *others)]
            pairs = zip(ops, values, values[1:], strict=False)
            return all(_tried(_COMPARISONS[type(op)], a, b) for op, a, b in pairs)
    raise AssertionError(node)  # `RowFilter` admits no other


def _item(of: _Value, key: _Value) -> _Value:
    if not isinstance(of, Mapping | list):
        return None
    return _tried(operator.getitem, of, key)


def _tried(function: Callable[..., _Value], *values: _Value) -> _Value:
    try:
        return function(*values)
    except (TypeError, LookupError, ArithmeticError):  # such as null >= 1
        return None
