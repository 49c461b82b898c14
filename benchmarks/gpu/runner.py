"""Runs lines, each in a process of its own with a deadline; a line that fails stops no other."""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Line, Row

_PRELOAD = "TURNWISE_GPU_KIT_PRELOAD"
"""Variable with the names of modules that `preload` imports."""
_TAIL = 12000
_END_SECONDS = 10.0
"""Time for a process to end by itself once its check has."""
_NVIDIA = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"))
_CONTEXT: Any = multiprocessing.get_context(
    "spawn" if any(path.exists() for path in _NVIDIA) else "forkserver"
)
"""Forks save each line the seconds of its imports; but an import that asks for the number of GPUs
would make them unusable in every fork."""


def preload(lines: Iterable[Line]) -> None:
    """Import the lines' modules once, in the process that all others are forked from."""
    if _CONTEXT.get_start_method() != "forkserver":
        return
    modules = {full_name(line.check.partition(":")[0]) for line in lines if not line.missing()}
    os.environ[_PRELOAD] = ",".join(sorted(modules))
    _CONTEXT.set_forkserver_preload(["benchmarks.gpu.preload"])


def run_lines(
    lines: Iterable[Line], folder: Path, *, tiny: bool, at_once: int, show: Callable[[Row], None]
) -> list[Row]:
    """Run lines; return their rows in the lines' order."""
    with ThreadPoolExecutor(at_once) as pool:
        rows = []
        for made in pool.map(lambda line: run_line(line, folder, tiny), lines):
            for row in made:
                show(row)
            rows += made
    return rows


def run_line(line: Line, folder: Path, tiny: bool) -> list[Row]:
    """Run one line; return a row for each of its figures, made or not."""
    if package := line.missing():
        return rows_of(line, [], 0.0, "not run", f"{package} is not installed")
    log = folder / f"{line.name}.log"
    figures: list[tuple[str, float]] = []
    ours, theirs = _CONTEXT.Pipe(duplex=False)
    started = time.monotonic()
    process = _CONTEXT.Process(target=_work, args=(line, folder, tiny, theirs, log))
    process.start()
    theirs.close()
    try:
        kind, text = _follow(ours, figures, started, line.seconds)
    finally:
        process.join(_END_SECONDS if figures else 0.1)
        with suppress(ProcessLookupError):  # nothing that it started remains
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if kind == "fail":
        said = log.read_text(errors="replace")[-_TAIL:] if log.exists() else ""
        text = text or f"its process ended with exit code {process.exitcode}"
        print(f"--- {line.name}: {text}\n{said.rstrip()}\n---", file=sys.stderr, flush=True)
    return rows_of(line, figures, time.monotonic() - started, kind, text)


def full_name(module: str) -> str:
    return module if "." in module else f"benchmarks.gpu.{module}"


def rows_of(
    line: Line, figures: list[tuple[str, float]], seconds: float, kind: str, text: str
) -> list[Row]:
    """Return a line's rows: those with figures passed, the next one has the line's end."""
    rows = [
        Row(line.name, shows, "pass", figure, round(each, 1))
        for shows, (figure, each) in zip(line.rows, figures, strict=False)
    ]
    left = line.rows[len(rows) :]
    rest = round(seconds - sum(row.seconds for row in rows), 1)
    for index, shows in enumerate(left):
        if kind == "fail" and index:
            rows.append(Row(line.name, shows, "not run", "the line above failed", 0.0))
        elif kind == "not run":
            rows.append(Row(line.name, shows, "not run", text, 0.0))
        else:
            rows.append(Row(line.name, shows, "fail", text or "it gave no figure", rest))
    return rows


def _follow(
    ours: Connection, figures: list[tuple[str, float]], started: float, seconds: float
) -> tuple[str, str]:
    """Collect figures until the line ends; return how it ended, and why."""
    last = started
    while True:
        left = started + seconds - time.monotonic()
        if not ours.poll(max(0.0, left)):
            return "fail", f"not done within {seconds:g} s"
        try:
            kind, text = ours.recv()
        except EOFError:
            return "fail", ""
        if kind != "figure":
            return kind, text
        figures.append((text, time.monotonic() - last))
        last = time.monotonic()


def _work(line: Line, folder: Path, tiny: bool, results: Connection, log: Path) -> None:
    """Run a check in its own process; what it prints goes to a file."""
    os.setsid()
    os.environ.update(line.environment, HF_HUB_OFFLINE="1")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(file, output)
    try:
        from benchmarks.gpu.device import NotRun, Place

        module, _, name = line.check.partition(":")
        check = getattr(importlib.import_module(full_name(module)), name)
        try:
            for figure in check(Place.here(tiny, folder, line.name)):
                results.send(("figure", figure))
            results.send(("end", ""))
        except NotRun as reason:
            results.send(("not run", str(reason)))
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        results.send(("fail", f"{type(error).__name__}: {text}"[:300]))
    finally:
        results.close()
        sys.stdout.flush()
        sys.stderr.flush()
