"""Two results of `make bench` side by side: `python -m benchmarks.compare BEFORE AFTER`.

Rows are matched by claim, unit and counterpart. A row is judged by its ratio, or by its own value
if it has no ratio; and only if it has a goal, which gives the better direction. It is worse if it
moved in the other direction and the ranges of its rounds do not overlap. Exits with 1 if any row is
worse.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Claim, load, spread

MACHINE = ("host", "cpu", "cores", "memory_gib", "python")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    table = Table("claim", "against", "goal", str(before["commit"]), str(after["commit"]), "")
    known = {_key(claim): claim for claim in load(before["claims"])}
    worse = 0
    for claim in load(after["claims"]):
        if (earlier := known.pop(_key(claim), None)) is None:
            table.add_row(claim.name, claim.against, claim.goal, "", spread(_judged(claim)), "new")
            continue
        verdict = change(earlier, claim)
        worse += verdict == "worse"
        values = spread(_judged(earlier)), spread(_judged(claim))
        table.add_row(claim.name, claim.against, claim.goal, *values, verdict)
    for claim in known.values():
        table.add_row(claim.name, claim.against, claim.goal, spread(_judged(claim)), "", "gone")
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    if (one := _machine(before)) != (other := _machine(after)):
        console.print(f"The machines differ: {one}; {other}", highlight=False)
    console.print(f"{worse} worse beyond the range of their rounds", highlight=False)
    return int(worse > 0)


def change(before: Claim, after: Claim) -> str:
    """Return worse, better, or "" if the ranges overlap or the better direction is unknown."""
    old, new = _judged(before), _judged(after)
    higher, lower = min(new) > max(old), max(new) < min(old)
    if not (higher or lower) or (after.at_least is None) == (after.at_most is None):
        return ""
    return "better" if higher == (after.at_least is not None) else "worse"


def _judged(claim: Claim) -> list[float]:
    return claim.ratios or claim.ours


def _key(claim: Claim) -> tuple[str, str, str]:
    return claim.name, claim.unit, claim.against


def _machine(results: dict[str, Any]) -> str:
    return ", ".join(str(results.get(key)) for key in MACHINE)


if __name__ == "__main__":
    sys.exit(main())
