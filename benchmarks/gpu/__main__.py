"""The table of the GPU kit: `make gpu-check`, or `python -m benchmarks.gpu`.

    python -m benchmarks.gpu [--only LINE ...] [--tiny] [--save] [--page]

Every line runs in a process of its own, with a deadline; a line that fails stops no other. Exits
with 1 if one failed. A machine without a GPU runs the logic of each line on its CPU, with a tiny
model and gloo in place of NCCL. `--save` keeps the results of a GPU in
`benchmarks/results/gpu-DEVICE-DATE.json`, each as it comes, beside results of other lines at the
same commit; `--page` prints the table of the documentation.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import FACTS, LINES, Row
from benchmarks.gpu.pack import commit
from benchmarks.gpu.page import RESULTS, columns, page
from benchmarks.gpu.runner import preload, run_line, run_lines

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the lines; returns the exit code."""
    names = [line.name for line in LINES]
    made = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINE")
    made.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU, too")
    made.add_argument("--save", action="store_true", help="keep a GPU's results as a file")
    made.add_argument("--page", action="store_true", help="print the table of the documentation")
    options = made.parse_args()
    if options.page:
        print(page())
        return 0
    began = time.monotonic()
    lines = [line for line in LINES if line.name in options.only]
    preload(lines)
    with tempfile.TemporaryDirectory(prefix="turnwise-gpu-") as name:
        folder = Path(name)
        (found,) = run_line(FACTS, folder, options.tiny)
        if found.status != "pass":
            print(f"nothing can run: {found.figure}")
            return 1
        facts = json.loads(found.figure)
        print(describe(facts), flush=True)
        kept = options.save and facts["gpus"] and not options.tiny

        def note(row: Row) -> None:
            show(row)
            if kept:
                save(facts, row)

        rows = run_lines(
            lines, folder, tiny=options.tiny, at_once=1 if facts["gpus"] else 2, show=note
        )
    seconds = time.monotonic() - began
    counts = {kind: sum(row.status == kind for row in rows) for kind in ("pass", "fail", "not run")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"in {seconds:.0f} s")
    print(describe(facts))
    if kept:
        path = results_of(facts).relative_to(ROOT)
        print(f"wrote {path}; `python -m benchmarks.gpu --page` prints its table")
    elif options.save:
        print("not saved: only results of a GPU, at full size, are kept")
    return int(counts["fail"] > 0)


def describe(facts: dict[str, Any]) -> str:
    """Return the sentence that says what the lines run on."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    if not facts["gpus"]:
        return (
            "NO GPU: every line ran its logic on the CPU, with a tiny model and gloo; this shows "
            f"nothing about GPUs ({versions})"
        )
    return f"{facts['gpus']} x {facts['device']}, {facts['memory_gib']} GiB ({versions})"


def show(row: Row) -> None:
    print("  ".join(f"{cell:{width}}" for cell, width in columns(row)).rstrip(), flush=True)


def results_of(facts: dict[str, Any]) -> Path:
    device = "-".join(facts["device"].lower().split())
    return RESULTS / f"gpu-{device}-{datetime.date.today().isoformat()}.json"


def save(facts: dict[str, Any], row: Row) -> None:
    """Write a row of a GPU's results; rows of other commits give way."""
    path = results_of(facts)
    tree = {"date": datetime.date.today().isoformat(), "commit": commit(), **facts, "rows": []}
    with suppress(FileNotFoundError):
        before = json.loads(path.read_text())
        if before["commit"] == tree["commit"]:
            tree = before
    same = row.line, row.shows
    rows = [each for each in tree["rows"] if (each["line"], each["shows"]) != same]
    tree["rows"] = [*rows, asdict(row)]
    path.write_text(json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
