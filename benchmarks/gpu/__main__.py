"""The table of the GPU kit: `make gpu-check`, or `python -m benchmarks.gpu`.

    python -m benchmarks.gpu [--only LINE ...] [--tiny] [--save] [--page]

Every line runs in a process of its own, with a deadline; a line that fails stops no other. Exits
with 1 if one failed. A machine without a GPU runs the logic of each line on its CPU, with a tiny
model and gloo in place of NCCL. `--save` keeps the results of a GPU in
`benchmarks/results/gpu-DEVICE-DATE.json`; `--page` prints the table of the documentation.
"""

import argparse
import datetime
import json
import sys
import tempfile
import time
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
        rows = run_lines(
            lines, folder, tiny=options.tiny, at_once=1 if facts["gpus"] else 2, show=show
        )
    seconds = time.monotonic() - began
    counts = {kind: sum(row.status == kind for row in rows) for kind in ("pass", "fail", "not run")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"in {seconds:.0f} s")
    print(describe(facts))
    if options.save:
        print(save(facts, rows, seconds, options.tiny))
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


def save(facts: dict[str, Any], rows: list[Row], seconds: float, tiny: bool) -> str:
    """Write the results of a GPU; returns a sentence about it."""
    if not facts["gpus"] or tiny:
        return "not saved: only results of a GPU, at full size, are kept"
    today = datetime.date.today().isoformat()
    device = "-".join(facts["device"].lower().split())
    path = RESULTS / f"gpu-{device}-{today}.json"
    tree = {"date": today, "commit": commit(), "seconds": round(seconds), **facts}
    tree["rows"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(tree, indent=1) + "\n")
    return f"wrote {path.relative_to(ROOT)}; `python -m benchmarks.gpu --page` prints its table"


if __name__ == "__main__":
    sys.exit(main())
