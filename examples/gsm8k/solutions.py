"""Worked solutions of GSM8K as conversations with a calculator.

The annotations in the rows are the calculations: `48/2 = <<48/2=24>>24 clips` becomes the
text up to the annotation, a call for each operation in it, and, after the tool's answer, the rest.
"""

import ast
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from .environment import Gsm8k, calculate

_ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>]*>>")
_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_SCHEMA = get_json_schema(calculate)


def solved_conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a worked solution: a turn for each operation, then the answer."""
    messages: list[dict[str, Any]] = [*Gsm8k(row).problem]
    said, position = "", 0
    for annotation in _ANNOTATION.finditer(row["answer"]):
        said += row["answer"][position : annotation.start()]
        position = annotation.end()
        for a, operation, b in _operations(annotation[1]):
            arguments = {"a": a, "operation": operation, "b": b}
            call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
            messages.append({"role": "assistant", "content": said.strip(), "tool_calls": [call]})
            messages.append({"role": "tool", "content": str(calculate(a, operation, b))})
            said = ""
    messages.append({"role": "assistant", "content": (said + row["answer"][position:]).strip()})
    return messages


def earns(row: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """Return the reward of a conversation's last message."""
    return Gsm8k(row).reward(SimpleNamespace(final_text=messages[-1]["content"]))


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """Render a conversation with the chat template."""
    return str(tokenizer.apply_chat_template(messages, tools=[_SCHEMA], tokenize=False))


def _operations(expression: str) -> Iterator[tuple[Any, Any, Any]]:
    """Return an expression's operations in the order of their evaluation; none where it has more
    than numbers and + - * /."""
    try:
        tree = ast.parse(expression.replace(",", "").replace("$", "").strip(), mode="eval").body
        yield from _evaluate(tree)[1]
    except (SyntaxError, ValueError, ZeroDivisionError):
        return


def _evaluate(node: ast.expr) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Return a node's value, and the operations that compute it."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value, []
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value, []
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            a, first = _evaluate(left)
            b, second = _evaluate(right)
            operation: Any = _OPERATIONS[type(op)]
            return calculate(a, operation, b), [*first, *second, (a, operation, b)]
    raise ValueError(ast.dump(node))
