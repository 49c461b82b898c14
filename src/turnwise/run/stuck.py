"""Reports of what a run waits for, and of what its processes are doing: `turnwise stuck`.

The watchdog writes the report to stuck.txt in the run folder when there is no progress, and when
another process asks for it by a file, which works wherever the run folder can be written.
"""

import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from turnwise.core import stacks
from turnwise.errors import InputError

REPORT = "stuck.txt"
_ANSWER_SECONDS = 15.0
_PAUSE_SECONDS = 0.1


def write_report(run: Path, line: str) -> Path | None:
    """Write a report; return its path, or None if it cannot be written.

    Args:
        line: The sentence of the watchdog.

    Example:
        write_report(Path("runs/demo"), "no progress for 60 s; waiting for: the trainer to train")
    """
    parts = [process.text() for process in stacks.collect(run)]
    text = "\n\n".join([f"{datetime.now().isoformat(' ', 'seconds')}  {line}", *parts])
    path = run / REPORT
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError:
        return None
    return path


class ReportRequest:
    """The file by which another process asks a run for a report.

    Example:
        async with Watchdog(60.0, report, ReportRequest(run).made):
            await train()
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._file = stacks.stacks_folder(run) / "report-wanted"

    def made(self) -> bool:
        """Return whether a report is wanted."""
        return self._file.exists()

    def answer(self, line: str) -> None:
        """Write the report, and mark the request as answered."""
        write_report(self._run, line)
        self._file.unlink(missing_ok=True)

    def make(self, seconds: float) -> bool:
        """Ask for a report; return whether it was written in time."""
        try:
            self._file.touch()
        except OSError:
            return False
        due = time.monotonic() + seconds
        try:
            while time.monotonic() < due:
                if not self._file.exists():
                    return True
                time.sleep(_PAUSE_SECONDS)
        finally:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
        return False


def ask(run: Path, seconds: float = _ANSWER_SECONDS) -> str:
    """Return what a run waits for and does; for a run that has ended, its last report.

    A run that does not answer, because its event loop is not yet or no longer watched, still shows
    the stacks of its processes on this machine.

    Args:
        run: The run folder.
        seconds: Time for the run to answer.

    Raises:
        InputError: when there is nothing to show.

    Example:
        print(ask(Path("runs/demo")))
    """
    if not (run / "logs").is_dir():
        raise InputError(f"there is no run in {run} (a folder with logs)")
    report = run / REPORT
    if stacks.running(run):
        if ReportRequest(run).make(seconds):
            return report.read_text(encoding="utf-8")
        if found := stacks.collect(run):
            said = (
                f"the run did not answer within {seconds:g} s: it is not training, or its main "
                "process is stuck"
            )
            return "\n\n".join([said, *(process.text() for process in found)]) + "\n"
    if report.is_file():
        return f"no process of {run} is running; its last report:\n{report.read_text('utf-8')}"
    raise InputError(f"no process of {run} is running here, and it has no {REPORT}")
