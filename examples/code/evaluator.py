"""Runs a small subset of Python by walking its syntax tree: arithmetic, names, loops, `print`.

Nothing is compiled or passed to Python's own `exec`; the code has only the syntax listed here: no
attributes, imports, function definitions, exceptions or files. Numbers, texts, lists and the
number of steps are bounded. This is not a sandbox for Python: code that needs more of the language
requires one.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MOST_STEPS = 20_000
MOST_BITS = 4_096
"""Maximum size of an integer, in bits."""
MOST_ITEMS = 1_000
"""Maximum number of items of a list, characters of its texts, and printed lines."""
MOST_NUMBERS = 10_000
"""Maximum number of numbers in a range."""
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (abs, float, int, len, max, min, range, round, sorted, str, sum)
}


class CodeError(Exception):
    """The code uses something unsupported or exceeds a bound; the message is for the model."""


def evaluate(code: str) -> str:
    """Run code; returns its output, and the value of its last line if that is an expression.

    Raises:
        CodeError: when it cannot be run.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeError(f"the code cannot be read: {error}") from None
    return _Run().run(tree)


class _Run:
    """The state of one run."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._printed: list[str] = []
        self._steps = 0

    def run(self, tree: ast.Module) -> str:
        try:
            *before, last = tree.body or [ast.Pass()]
            self._block(before)
            if isinstance(last, ast.Expr):
                value = self._value(last.value)
                self._printed += [] if value is None else [_text(value)]
            else:
                self._block([last])
        except CodeError:
            raise
        except RecursionError:
            raise CodeError("the code is nested too deeply") from None
        except (ArithmeticError, TypeError, ValueError, LookupError) as error:
            raise CodeError(f"{type(error).__name__}: {error}") from None
        return "\n".join(self._printed)

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._step()
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._names[name] = self._value(value)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                    self._names[name] = self._apply(op, self._name(name), self._value(value))
                case ast.Expr(value=value):
                    self._value(value)
                case ast.If(test=test, body=body, orelse=other):
                    self._block(body if self._value(test) else other)
                case ast.For(target=ast.Name(id=name), iter=items, body=body, orelse=[]):
                    for item in self._items(items):
                        self._names[name] = item
                        self._block(body)
                case ast.While(test=test, body=body, orelse=[]):
                    while self._value(test):
                        self._block(body)
                case ast.Pass():
                    pass
                case _:
                    raise CodeError(f"line {statement.lineno} is not understood")

    def _items(self, node: ast.expr) -> Iterator[Any]:
        yield from self._value(node)

    def _value(self, node: ast.expr) -> Any:
        self._step()
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return _bounded(value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=op, operand=operand):
                return self._apply(op, self._value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._apply(op, self._value(left), self._value(right))
            case ast.BoolOp(op=ast.And(), values=values):
                return all(self._value(value) for value in values)
            case ast.BoolOp(values=values):
                return any(self._value(value) for value in values)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                values = [self._value(part) for part in (left, *comparators)]
                pairs = zip(ops, values, values[1:], strict=False)
                return all(self._apply(op, one, other) for op, one, other in pairs)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test) else other)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return _bounded([_plain(self._value(item)) for item in items])
            case ast.Subscript(value=value, slice=index):
                return self._value(value)[self._value(index)]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self._call(name, [self._value(arg) for arg in args])
        raise CodeError(f"line {getattr(node, 'lineno', 1)} uses syntax that is not understood")

    def _name(self, name: str) -> Any:
        if name not in self._names:
            raise CodeError(f"there is no name {name!r}")
        return self._names[name]

    def _call(self, name: str, args: list[Any]) -> Any:
        if name == "print":
            self._printed.append(" ".join(_text(arg) for arg in args))
            if len(self._printed) > MOST_ITEMS:
                raise CodeError(f"more than {MOST_ITEMS} lines are printed")
            return None
        if name not in _FUNCTIONS:
            known = ", ".join(["print", *_FUNCTIONS])
            raise CodeError(f"there is no function {name!r}; functions: {known}")
        return _bounded(_FUNCTIONS[name](*args))

    def _apply(self, op: ast.AST, *values: Any) -> Any:
        if type(op) not in _OPERATIONS:
            raise CodeError(f"there is no operation {type(op).__name__}")
        if isinstance(op, ast.Mult | ast.Mod) and any(isinstance(v, str | list) for v in values):
            raise CodeError("texts and lists cannot be multiplied or formatted")
        if isinstance(op, ast.Pow) and max(map(_bits, values)) * abs(values[1]) > MOST_BITS:
            raise CodeError("the power is too large")
        return _bounded(_OPERATIONS[type(op)](*values))

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise CodeError(f"the code takes more than {MOST_STEPS} steps")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _bounded(value: Any) -> Any:
    if isinstance(value, range) and len(value) > MOST_NUMBERS:
        raise CodeError(f"a range has more than {MOST_NUMBERS} numbers")
    if isinstance(value, str | list) and _length(value) > MOST_ITEMS:
        raise CodeError(f"a text or list is longer than {MOST_ITEMS}")
    if _bits(value) > MOST_BITS:
        raise CodeError("a number is too large")
    return value


def _length(value: str | list[Any]) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(max(1, len(item)) if isinstance(item, str) else 1 for item in value)


def _plain(value: Any) -> Any:
    """Return an item for a list; lists hold no lists, which could exceed the bound by nesting."""
    if isinstance(value, list | range) or value is None:
        raise CodeError("a list holds numbers and texts only")
    return value


def _text(value: Any) -> str:
    return str(value)
