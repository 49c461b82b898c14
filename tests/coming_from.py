"""Rows of docs/coming-from.md without what they promise: `python -m tests.coming_from`.

`tests/coming_from.csv` names each row's tests and its owner: the function that does what the row
says, or the field of a class that holds the row's key. In a copy of the project the owner is taken
away: a function raises, a field keeps its default whatever is given. The row's tests, which passed
before, must then fail. A seeded sample of the rows is tried, two at a time; rows whose tests cannot
run on this machine do not count. If the tests of a row still pass, the command ends with status 1.
`make test-all` runs it.
"""

import argparse
import ast
import csv
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "coming_from.csv"
SECONDS = 600.0
"""Time of a row's tests. Tests that do not end without the owner have noticed, too."""

FIXED = """

class _Fixed:
    # a key that was taken away: nobody reads what is given
    def __init__(self, value): self.value = value
    def __get__(self, instance, owner=None): return self.value
    def __set__(self, instance, value): pass

def _default_of(fields, name):
    field = fields[name]
    made = getattr(field, "default_factory", None)
    return made() if callable(made) else field.default

{owner}.{name} = _Fixed(_default_of(
    getattr({owner}, "__dataclass_fields__", None) or {owner}.model_fields, "{name}"
))
"""


def without(path: Path, qualified: str) -> str:
    """Return the text of a file without one of its functions or fields.

    Raises:
        LookupError: The file has no such function or field.
    """
    text = path.read_text()
    *within, name = qualified.split(".")
    body = ast.parse(text).body
    for each in within:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == each)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            lines = text.splitlines(keepends=True)
            first = node.body[0]
            indent = " " * (node.col_offset + 4)
            if first.lineno == node.lineno:  # def name(): ...
                kept = [*lines[: node.lineno - 1], lines[node.lineno - 1][: first.col_offset], "\n"]
            else:
                kept = lines[: first.lineno - 1]
            raised = f'{indent}raise NotImplementedError("{qualified} was taken away")\n'
            return "".join([*kept, raised, *lines[node.end_lineno :]])
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
            return text + FIXED.format(owner=".".join(within), name=name)
    raise LookupError(f"{path.name} has no {qualified}")


def file_of(module: str, root: Path = ROOT) -> Path:
    """Return the file of a module of the package, such as `training.rank`."""
    place = root / "src" / "turnwise" / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def copy(folder: Path) -> Path:
    """Make a copy of the project."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns(
        *("__pycache__", ".venv*", "build", "outputs", ".git", ".*_cache", ".hypothesis")
    )
    shutil.copytree(ROOT, folder, ignore=ignored)
    for environment in ROOT.glob(".venv*"):
        (folder / environment.name).symlink_to(environment)
    return folder


def ends(place: Path, tests: list[str]) -> str:
    """Run tests in a copy, and return how they ended."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", ""]
    environment = {**os.environ, "PYTHONPATH": f"{place / 'src'}:{place}", "OMP_NUM_THREADS": "1"}
    with (place / "pytest.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return "did not end"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = (place / "pytest.log").read_text().strip().splitlines()[-1]
    if status == 0:
        return "skipped" if re.search(r"^\d+ skipped", last) else "passed"
    return "failed" if status == 1 else f"pytest ended with status {status}"


def tried(place: Path, row: dict[str, str]) -> str:
    """Return how a row's tests ended without its owner; "cannot run" if they do not even pass with
    it, such as tests of a package that is not installed."""
    tests = row["tests"].split()
    if ends(place, tests) != "passed":
        return "cannot run"
    module, _, qualified = row["owner"].partition(":")
    path = file_of(module, place)
    whole = path.read_text()
    path.write_text(without(path, qualified))
    try:
        return ends(place, tests)
    finally:
        path.write_text(whole)


def main() -> int:
    """Run the command line; return how many rows' tests did not notice."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="rows to try; 0: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coming_from")
    options = parser.parse_args()
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["owner"]]
    rows = [row for row in rows if options.only in row["row"]]
    random.Random(options.seed).shuffle(rows)
    left, lock, endings = iter(rows), threading.Lock(), Counter[str]()
    wanted = options.count or len(rows)

    def rows_in(number: int) -> None:
        place = copy(options.folder.absolute() / str(number))
        while True:
            with lock:
                done = endings.total() - endings["cannot run"] >= wanted
                row = None if done else next(left, None)
            if row is None:
                return
            began = time.monotonic()
            ended = tried(place, row)
            took = time.monotonic() - began
            with lock:
                endings[ended] += 1
                print(f"| {row['row']} | `{row['owner']}` | {ended} | {took:.0f} s |", flush=True)

    print("| row | taken away | its tests | |\n|---|---|---|---|")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rows_in, range(2)))
    noticed = endings["failed"] + endings["did not end"]
    unnoticed = endings.total() - endings["cannot run"] - noticed
    print(
        f"{noticed} of {noticed + unnoticed} rows have a test that fails without what they "
        f"promise; the tests of {endings['cannot run']} more cannot run here"
    )
    return unnoticed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
