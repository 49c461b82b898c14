"""Phrasings: ways to put a chain of operations into words.

A phrasing builds a text from left to right: it opens with the first number, each operation
wraps the text so far, and a frame turns the whole into a question. The warm start trains on six
phrasings; the other six appear only in reinforcement learning. Phrasings do not depend on the
choice of the numbers.
"""

import random
from dataclasses import dataclass, field

Step = tuple[int, str, int]

_PEOPLE = ("Mia", "Omar", "Lena", "Ravi", "Ana", "Tom")
_THINGS = ("coins", "stamps", "shells", "books", "beads", "cards")


@dataclass(frozen=True)
class Phrasing:
    """One way to ask; in every text, `{so_far}` is the text so far and `{n}` a number."""

    name: str
    seen: bool
    opening: str
    steps: dict[str, str]
    frame: str
    first: dict[str, str] = field(default_factory=dict)

    def render(self, steps: list[Step], rng: random.Random) -> str:
        """Return a question with the solution `steps`; `rng` picks the people and things."""
        so_far = self.opening.replace("{n}", str(steps[0][0]))
        for index, (_, operation, number) in enumerate(steps):
            texts = self.first if index == 0 and self.first else self.steps
            so_far = texts[operation].replace("{n}", str(number)).replace("{so_far}", so_far)
        question = self.frame.replace("{so_far}", so_far)
        person, thing = rng.choice(_PEOPLE), rng.choice(_THINGS)
        return question.replace("{person}", person).replace("{thing}", thing)


def _suffixes(add: str, subtract: str, multiply: str) -> dict[str, str]:
    texts = {"+": add, "-": subtract, "*": multiply}
    return {operation: "{so_far}" + text for operation, text in texts.items()}


_SEEN = (
    Phrasing(
        name="start",
        seen=True,
        opening="Start with {n}",
        steps=_suffixes(", add {n}", ", subtract {n}", ", multiply by {n}"),
        frame="{so_far}. What is the result?",
    ),
    Phrasing(
        name="imperative",
        seen=True,
        opening="{n}",
        first={
            "+": "Add {so_far} and {n}",
            "-": "Reduce {so_far} by {n}",
            "*": "Multiply {so_far} by {n}",
        },
        steps=_suffixes(", then add {n}", ", then subtract {n}", ", then multiply by {n}"),
        frame="{so_far}.",
    ),
    Phrasing(
        name="words",
        seen=True,
        opening="{n}",
        first=_suffixes(" plus {n}", " minus {n}", " times {n}"),
        steps=_suffixes(", then plus {n}", ", then minus {n}", ", then times {n}"),
        frame="What is {so_far}?",
    ),
    Phrasing(
        name="brackets",
        seen=True,
        opening="{n}",
        steps={"+": "({so_far} + {n})", "-": "({so_far} - {n})", "*": "({so_far} * {n})"},
        frame="Compute {so_far}.",
    ),
    Phrasing(
        name="person",
        seen=True,
        opening="{person} has {n} {thing}",
        steps=_suffixes(", gets {n} more", ", loses {n}", ", multiplies them by {n}"),
        frame="{so_far}. How many {thing} does {person} have now?",
    ),
    Phrasing(
        name="passive",
        seen=True,
        opening="The number {n}",
        steps=_suffixes(" is increased by {n},", " is decreased by {n},", " is multiplied by {n},"),
        frame="{so_far} what is the answer?",
    ),
)

_UNSEEN = (
    Phrasing(
        name="think",
        seen=False,
        opening="Think of {n}",
        steps=_suffixes(". Now add {n}", ". Now subtract {n}", ". Now multiply by {n}"),
        frame="{so_far}. What do you have?",
    ),
    Phrasing(
        name="please",
        seen=False,
        opening="{n}",
        first=_suffixes(" plus {n}", " minus {n}", " times {n}"),
        steps=_suffixes(" and then plus {n}", " and then minus {n}", " and then times {n}"),
        frame="Please work out {so_far} for me.",
    ),
    Phrasing(
        name="symbols",
        seen=False,
        opening="{n}",
        first=_suffixes(" + {n}", " - {n}", " * {n}"),
        steps=_suffixes(", then + {n}", ", then - {n}", ", then * {n}"),
        frame="Compute {so_far}, please.",
    ),
    Phrasing(
        name="shop",
        seen=False,
        opening="A shop has {n} {thing}",
        steps=_suffixes(", gets {n} more", ", loses {n}", ", multiplies them by {n}"),
        frame="{so_far}. How many {thing} does it have?",
    ),
    Phrasing(
        name="keys",
        seen=False,
        opening="I enter {n}",
        steps=_suffixes(", press + {n}", ", press - {n}", ", press * {n}"),
        frame="{so_far}. What does the display show?",
    ),
    Phrasing(
        name="if",
        seen=False,
        opening="If the number {n}",
        steps=_suffixes(" is increased by {n},", " is decreased by {n},", " is multiplied by {n},"),
        frame="{so_far} what does it become?",
    ),
)

PHRASINGS = _SEEN + _UNSEEN
SEEN = [phrasing for phrasing in PHRASINGS if phrasing.seen]
UNSEEN = [phrasing for phrasing in PHRASINGS if not phrasing.seen]
