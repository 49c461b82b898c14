"""Two pages of digits, in a context that holds only one, so that the summaries decide the answer.

The model says `next` for a page. A page is long, so the conversation is shortened after it
(`rollout.context`), and only the problem and the model's own summary are left. The model can say
the digits of both pages only if its first summary has the digits of the first page, and its second
summary has all digits.
"""

import random
from collections.abc import Sequence
from typing import Any

import turnwise

PAGES, DIGITS = 2, 2
NEXT = "next"
PROBLEM = f"Read {PAGES} pages, then say their digits."
REST = " The rest of this page is of no use to anybody." * 3
"""Text that makes a page too long for the context."""


class Recall(turnwise.Environment):
    """One attempt; the row's `pages` are the digits of each page."""

    def __init__(self, row: dict[str, list[str]]) -> None:
        self.problem = PROBLEM
        self.pages = row["pages"]
        self.read = 0
        self.said = ""

    @classmethod
    def rows(cls, split: str) -> Sequence[dict[str, Any]]:
        """Return 2,000 rows to train on, or 100 other rows for another split."""
        numbers = random.Random(0).sample(range(10 ** (PAGES * DIGITS)), 2100)
        chosen = numbers[:2000] if split == "train" else numbers[2000:]
        return [{"pages": pages_of(number)} for number in chosen]

    def step(self, message: dict[str, Any]) -> str | None:
        """Show the next page for `next`; any other message is the answer, and ends the attempt."""
        self.said = message["content"].strip()
        if self.said != NEXT or self.read == len(self.pages):
            return None
        self.read += 1
        return page(self.pages[self.read - 1])

    def reward(self, trajectory: Any) -> float:
        return float(self.said == "".join(self.pages))

    def metrics(self, trajectory: Any) -> dict[str, float]:
        return {"pages_read": float(self.read), "compacted": float(trajectory.events["compacted"])}


def pages_of(number: int) -> list[str]:
    """Split a number that has all digits into the digits of each page."""
    digits = f"{number:0{PAGES * DIGITS}}"
    return [digits[at : at + DIGITS] for at in range(0, PAGES * DIGITS, DIGITS)]


def page(digits: str) -> str:
    """Return the text of a page."""
    return f"{digits}.{REST}"
