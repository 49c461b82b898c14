"""The table of the documentation, made of the newest results of a GPU."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import LINES, Row

RESULTS = Path(__file__).parents[1] / "results"


def columns(row: Row) -> list[tuple[str, int]]:
    """Return the cells of a row, each with its width on a terminal."""
    return [
        (row.line, 13),
        (row.shows, 52),
        (row.status, 7),
        (f"{row.seconds:5.1f} s", 7),
        (row.figure, 0),
    ]


def newest() -> dict[str, Any] | None:
    """Return the newest results of a GPU; None if there are none."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("gpu-*.json")]
    tree: dict[str, Any] | None = max(found, key=lambda each: each["date"], default=None)
    return tree


def page(results: dict[str, Any] | None = None) -> str:
    """Return the sentence and the table that docs/how-to/gpus.md shows."""
    results = results or newest()
    lines = ["| line | shows | result | figure |", "| --- | --- | --- | --- |"]
    if results is None:
        head, rows = "Never run on a GPU.", []
    else:
        rows = [Row(**row) for row in results["rows"]]
        head = (
            f"Run on {results['date']} on {results['gpus']} x {results['device']} with torch "
            f"{results['versions']['torch']}, at commit {results['commit']}, in "
            f"{sum(row.seconds for row in rows):.0f} s."
        )
    made = {(row.line, row.shows): row for row in rows}
    never = Row("", "", "never run", "", 0.0)
    for line in LINES:
        for shows in line.rows:
            row = made.get((line.name, shows), never)
            lines.append(f"| `{line.name}` | {shows} | {row.status} | {row.figure} |")
    return "\n".join([head, "", *lines])
