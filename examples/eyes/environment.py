"""Four cards, seen from afar: which digit is on the blue one?

From afar a card shows its colour and the dots of its number, and no digit. The tool `zoom` shows
the card with a given number from near. So the model has to find the card of a colour by sight, zoom
in, and read the digit. Without sight it is right in one of ten games; if it sees only from near, in
one of three.
"""

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

import turnwise

COLOURS = {
    "red": (210, 50, 40),
    "green": (40, 170, 70),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 40),
}
SIDE = 28  # width and height of a card in pixels; the model reads a card as one token
ACROSS = 2  # cards in a row
_LINES = {
    **{"a": (0, 0, 8, 0), "b": (8, 0, 8, 7), "c": (8, 7, 8, 14), "d": (0, 14, 8, 14)},
    **{"e": (0, 7, 0, 14), "f": (0, 0, 0, 7), "g": (0, 7, 8, 7)},
}
"""The lines of a seven-segment display, each from (x, y) to (x, y)."""
_DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgecd", "abc", "abcdefg", "abcdfg")


class Eyes(turnwise.Environment):
    """One game; the row has the cards, the colour that is asked for, and the picture's seed.

    The game ends with the first turn that does not call `zoom`: the answer.
    """

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row
        self.problem = [question(row)]
        self.tools = [self.zoom]
        self.zoomed: list[int] = []

    @classmethod
    def rows(cls, split: str) -> Sequence[dict[str, Any]]:
        """Return 4,000 rows to train on, or 128 other rows for another split."""
        rng = random.Random(f"cards to {split}")
        return [make_row(rng) for _ in range(4000 if split == "train" else 128)]

    def zoom(self, card: int) -> Image.Image:
        """Look at one card from near.

        Args:
            card: The number of its dots.
        """
        if not 0 < card <= len(COLOURS):
            raise ValueError("there is no such card")
        self.zoomed.append(card)
        return from_near(self._row, card)

    def reward(self, trajectory: Any) -> float:
        return float(trajectory.final_text.strip() == str(digit_of(self._row)))

    def metrics(self, trajectory: Any) -> dict[str, float]:
        found = self.zoomed[:1] == [card_of(self._row)]
        return {"looked": float(bool(self.zoomed)), "found": float(found)}


def make_row(rng: random.Random) -> dict[str, Any]:
    """Return a row of random cards, one of each colour."""
    colours = rng.sample(list(COLOURS), len(COLOURS))
    cards = [[colour, rng.randrange(10)] for colour in colours]
    return {"cards": cards, "asked": rng.choice(colours), "seed": rng.randrange(2**32)}


def question(row: dict[str, Any]) -> dict[str, Any]:
    """Return the message that asks for a digit, with the cards from afar.

    The question comes first, so that the model's reading of each card can depend on the question.
    """
    text = f"Which digit is on the {row['asked']} card?"
    content = [{"type": "text", "text": text}, {"type": "image", "image": table(row, digits=False)}]
    return {"role": "user", "content": content}


def card_of(row: dict[str, Any]) -> int:
    """Return the number of the card that is asked for, from 1."""
    return 1 + next(i for i, (colour, _) in enumerate(row["cards"]) if colour == row["asked"])


def digit_of(row: dict[str, Any]) -> int:
    """Return the digit that is asked for."""
    return int(row["cards"][card_of(row) - 1][1])


def from_near(row: dict[str, Any], card: int) -> Image.Image:
    """Return one card, cut out of the picture of all."""
    x, y = _corner(card - 1)
    return table(row).crop((x, y, x + SIDE, y + SIDE))


def table(row: dict[str, Any], *, digits: bool = True) -> Image.Image:
    """Return the picture of all cards, each in its light, with its dots below its digit."""
    rng = random.Random(row["seed"])
    picture = Image.new("RGB", (ACROSS * SIDE, ACROSS * SIDE))
    draw = ImageDraw.Draw(picture)
    for place, (colour, digit) in enumerate(row["cards"]):
        (x, y), light = _corner(place), rng.uniform(0.6, 1.0)
        if colour not in COLOURS:
            continue  # no card lies there
        red, green, blue = (round(light * part) for part in COLOURS[colour])
        draw.rectangle((x, y, x + SIDE - 1, y + SIDE - 1), fill=(red, green, blue))
        for dot in range(place + 1):
            left, top = x + 2 + 6 * dot, y + 22
            draw.rectangle((left, top, left + 3, top + 3), fill=(0, 0, 0))
        x, y = x + rng.randint(8, 11), y + rng.randint(2, 4)
        for line in _DIGITS[digit] if digits else "":
            x1, y1, x2, y2 = _LINES[line]
            draw.line((x + x1, y + y1, x + x2, y + y2), fill=(255, 255, 255), width=3)
    return picture


def _corner(place: int) -> tuple[int, int]:
    return SIDE * (place % ACROSS), SIDE * (place // ACROSS)
