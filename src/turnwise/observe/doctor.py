"""`turnwise doctor`: is everything ready? One line for each check, with the command that mends it.

Checks run one after another, each in a thread with a deadline, so that none can hold up the
others. `machine_checks` has those that need no configuration, `config_checks` the others.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.text import Text

from turnwise.errors import TurnwiseError, describe_error, visible

State = Literal["ok", "warning", "broken"]
_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "broken": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Example:
        Finding("disk", "broken", "runs: 0.2 GiB free", mend="turnwise train ... output_dir=/big")
    """

    name: str
    state: State
    detail: str
    """The facts, in a clause."""
    mend: str = ""
    """A command, or an instruction that names a key; "" if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the time that it may take.

    Example:
        Check("python", check_python, seconds=1.0)
    """

    name: str
    call: Callable[[], "Finding | Sequence[Finding]"]
    """Returns its findings; may raise, which is a finding too."""
    seconds: float = 30.0
    late: str = field(default="run it again when the machine is less busy")
    """Advice if it takes longer."""


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Run checks in their order; yield each finding as soon as it is known.

    Example:
        broken = [f for f in examine(machine_checks()) if f.state == "broken"]
    """
    for check in checks:
        yield from _run(check)


def _run(check: Check) -> Sequence[Finding]:
    found: list[Finding] = []
    ended = threading.Event()

    def call() -> None:
        try:
            result = check.call()
            found.extend([result] if isinstance(result, Finding) else result)
        except TurnwiseError as error:
            found.append(Finding(check.name, "broken", str(error)))
        except BaseException as error:  # a library's exit too: a check never ends the command
            found.append(Finding(check.name, "broken", describe_error(error)))
        finally:
            ended.set()

    threading.Thread(target=call, daemon=True, name=f"turnwise-doctor-{check.name}").start()
    if not ended.wait(check.seconds):
        late = f"no answer within {check.seconds:g} s"
        return [Finding(check.name, "broken", late, check.late)]
    return found


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding as a line of the table, and what mends it below."""
    line = Text(f"{finding.state:<8}", style=_STYLES[finding.state])
    line.append(visible(f" {finding.name:<14} {finding.detail}"), style="default")
    console.print(line, soft_wrap=True)
    if finding.mend:
        console.print(Text(visible(f"{'':<23} → {finding.mend}"), style="bold"), soft_wrap=True)


def size(count: int) -> str:
    """Return a number of bytes for people: "512 MiB", "23.5 GiB".

    Example:
        >>> size(2**29)
        '512 MiB'
    """
    return f"{count / 2**20:.3g} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the report."""
    broken = sum(finding.state == "broken" for finding in findings)
    warnings = sum(finding.state == "warning" for finding in findings)
    if broken:
        return f"{broken} broken, {warnings} to look at"
    return f"nothing is broken, {warnings} to look at" if warnings else "everything is ready"
