"""Claims, the results of every benchmark: the values of each round, and a goal.

A goal is met if the median of the rounds meets it, and missed only if no round reaches it. The
range of n independent rounds is an interval for the true median: it contains the median with a
probability of 1 - 2 ** (1 - n), whatever their distribution (0.75 for 3 rounds, 0.98 for 7). If the
range reaches the goal and the median does not, the rounds do not decide.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass
class Claim:
    """One line of the table: Turnwise and its counterpart, measured in the same rounds."""

    name: str
    unit: str
    ours: list[float]
    """Turnwise's value of each round, in `unit`."""
    against: str = ""
    """Name of the counterpart."""
    theirs: list[float] = field(default_factory=list)
    """The counterpart's value of each round, in `unit`."""
    ratios: list[float] = field(default_factory=list)
    ratio_of: str = ""
    """Meaning of the ratios, if they are not `ours` divided by `theirs`."""
    at_least: float | None = None
    """Goal for the median of the ratios, or of `ours` if there are no ratios."""
    at_most: float | None = None
    note: str = ""

    @property
    def judged(self) -> float:
        return statistics.median(self.ratios or self.ours)

    @property
    def met(self) -> bool:
        """Whether the median reaches the goal; true if there is no goal."""
        return self._reached_by(self.judged, self.judged)

    @property
    def missed(self) -> bool:
        """Whether the whole range of the rounds misses the goal; see the module's docstring."""
        values = self.ratios or self.ours
        return not self.met and not self._reached_by(min(values), max(values))

    def _reached_by(self, low: float, high: float) -> bool:
        enough = self.at_least is None or high >= self.at_least
        return enough and (self.at_most is None or low <= self.at_most)

    @property
    def goal(self) -> str:
        goals = [
            f"{sign} {value:,g}"
            for sign, value in (("≥", self.at_least), ("≤", self.at_most))
            if value is not None
        ]
        return " and ".join(goals)

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        verdict = "met" if self.met else "missed" if self.missed else "undecided"
        return [
            self.name,
            self.unit,
            spread(self.ours),
            self.against,
            spread(self.theirs),
            " ".join(filter(None, (spread(self.ratios), self.ratio_of))),
            self.goal,
            verdict if self.goal else "",
        ]


COLUMNS = ("claim", "unit", "turnwise", "against", "measured", "ratio", "goal", "")


def spread(values: Sequence[float]) -> str:
    """Return median and range, to three digits."""
    if not values:
        return ""
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return digits(middle)
    return f"{digits(middle)} ({digits(low)}–{digits(high)})"


def digits(value: float) -> str:
    """Format a number to three digits, without an exponent."""
    if value == 0:
        return "0"
    places = 0
    while places < 6 and abs(value) * 10**places < 100:
        places += 1
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratios, round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark takes."""
    made = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=doc, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="only to see that it runs")
    made.add_argument("--json", type=Path, help="write the claims there, too")
    return made


def report(claims: Sequence[Claim], options: argparse.Namespace) -> None:
    """Print the claims, and write them to the file of `--json`."""
    show(claims)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(claim) for claim in claims]))


def show(claims: Sequence[Claim]) -> None:
    table = Table(*COLUMNS)
    for claim in claims:
        table.add_row(*claim.cells())
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    for claim in claims:
        if claim.note:
            console.print(f"{claim.name}: {claim.note}", highlight=False)


def verdict(claims: Sequence[Claim], failed: Sequence[str], quick: bool) -> tuple[int, list[str]]:
    """Return the exit status of a run and the lines that explain it.

    The status is 1 if a script failed or, in a full run, a goal was missed; a quick run measures
    nothing. Claims without a goal, and undecided claims, are listed, so that they do not count as
    met.
    """
    judged = [] if quick else claims
    missed = [claim.name for claim in judged if claim.missed]
    undecided = [claim.name for claim in judged if not (claim.met or claim.missed)]
    open_ended = [claim.name for claim in judged if not claim.goal]
    kinds = (
        ("failed", failed),
        ("missed", missed),
        ("undecided", undecided),
        ("without a goal", open_ended),
    )
    lines = [f"{kind}: {'; '.join(names)}" for kind, names in kinds if names]
    return int(bool(failed or missed)), lines


def load(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return the claims of a results file."""
    return [Claim(**row) for row in rows]


def markdown(claims: Sequence[Claim]) -> str:
    """Return the table as the README shows it."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(claim.cells() for claim in claims)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
