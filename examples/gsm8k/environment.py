r"""Grade-school word problems (GSM8K, Cobbe et al. 2021, arXiv:2110.14168) with a calculator.

`Gsm8k` contains one problem: its chat messages, its tool and the reward of a finished trajectory,
which depends only on `final_text`.

The reward is 1.0 or 0.0, and strict. The final answer is the text at the last marker: the rest of
the line after `####`, or the inside of `\boxed{}`. It has to be one number: `72`, `1,080`,
`72.00` or `-3`, with signs of currency, percentage, emphasis or LaTeX around it (`$72`, `72%`,
`**72**`, `1{,}080`). No marker, no number or more than a number (`72 or 73`, `8*9`,
`72 clips`) earns 0.0.

Only the number goes to math-verify, which compares it with the gold answer. Any output of a model
is safe: no text raises or is slow, because neither powers nor LaTeX are ever evaluated.
math-verify's timeouts are switched off: they need signals, which only the main thread may handle,
and rewards run in worker threads.
"""

import logging
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol

from math_verify import ExprExtractionConfig, parse, verify

from turnwise.errors import InputError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its timeouts are off

INSTRUCTION = (
    "Solve the problem step by step; the tool calculate does the arithmetic. End with a line "
    r"#### N or with \boxed{N}, where N is the answer: one number, without a unit."
)

# In characters; far more than any decorated number in the data has. A longer answer is no number.
LONGEST_ANSWER = 64

BEFORE = r"[\s\\$€£¥*()\[\]]*"
AFTER = r"[\s\\$€£¥*()\[\]%.]*"
NUMBER = re.compile(
    rf"{BEFORE}(?P<sign>[-+\u2212]?){BEFORE}"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    rf"{AFTER}"
)


def calculate(a: float, operation: Literal["+", "-", "*", "/"], b: float) -> float:
    """Calculate a + b, a - b, a * b or a / b.

    Args:
        a: The number on the left.
        operation: What to do with the two numbers.
        b: The number on the right; not 0 when dividing.

    Returns:
        The result, to 12 significant digits where it is not whole.
    """
    match operation:
        case "+":
            result = a + b
        case "-":
            result = a - b
        case "*":
            result = a * b
        case "/":
            result = a / b
        case _:
            raise ValueError(f"The operation is one of + - * /, not {operation!r}.")
    if isinstance(result, int):
        return result
    rounded = float(f"{result:.12g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e12 else rounded


class WithFinalText(Protocol):
    """A trajectory as the reward reads it: the text of its last assistant message."""

    @property
    def final_text(self) -> str: ...


class Gsm8k:
    """One row of GSM8K: `question`, and `answer`, a worked solution that ends with `#### N`.

    Raises:
        InputError: The row has no text under one of the two, or no number after `####`.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        for field in ("question", "answer"):
            if not isinstance(row.get(field), str):
                raise InputError(f"A GSM8K row needs a text in the field {field!r}.")
        gold = final_number(row["answer"])
        if gold is None:
            raise InputError("A GSM8K row needs '#### ' and a number at the end of 'answer'.")
        self._gold = parsed(gold)
        self.problem: list[dict[str, str]] = [
            {"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}
        ]
        self.tools: list[Callable[..., Any]] = [calculate]

    def reward(self, trajectory: WithFinalText) -> float:
        """Return 1.0 if the final answer is the gold number, else 0.0."""
        answer = final_number(trajectory.final_text)
        return float(
            answer is not None and verify(self._gold, parsed(answer), timeout_seconds=None)
        )


def final_number(text: str) -> str | None:
    """Return the number after the last marker as plain digits (`-1080.5`), None without one."""
    number = NUMBER.fullmatch(final_answer(text))
    if number is None:
        return None
    whole, point, decimals = number["digits"].replace(",", "").partition(".")
    minus = "-" if number["sign"] in ("-", "\u2212") else ""
    return f"{minus}{whole or '0'}{point}{decimals}"


def final_answer(text: str) -> str:
    """Return the answer at the last marker, empty without one or when it is too long."""
    _, line_marker, after_line_marker = text.replace("{,}", ",").rpartition("####")
    _, box, after_box = after_line_marker.rpartition(r"\boxed{")
    if box:
        answer, closed, _ = after_box.partition("}")
    else:
        answer, closed = after_line_marker.partition("\n")[0], line_marker
    return answer if closed and len(answer) <= LONGEST_ANSWER else ""


def parsed(number: str) -> list[Any]:
    """Return math-verify's parse of plain digits."""
    expressions: list[Any] = parse(
        number, [ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return expressions
