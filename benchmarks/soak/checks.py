"""The claims of the soak test, from what its programs left and what was sampled."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Claim
from benchmarks.soak.memory import Memory

Row = dict[str, Any]


def memory_claims(memory: Memory, begin: float, end: float, judged: bool) -> list[Claim]:
    """Print the growth of each process that lived through the test; return the largest.

    Args:
        judged: Whether growth has a goal.
    """
    found = memory.long_lived(begin, end)
    for watched, grown, descriptors in found:
        values = [value for _, value in watched.memory]
        print(
            f"{watched.name:40} {values[0]:6.0f} to {values[-1]:6.0f} MiB, "
            f"last quarter by first: memory {grown:.3f}, open files {descriptors:.3f}"
        )
    if not found:
        return []
    goal = 1.05 if judged else None
    return [
        Claim(
            "memory of the process that grew most, last by first quarter",
            "ratio",
            [found[0][1]],
            at_most=goal,
            note=f"{found[0][0].name}; {len(found)} processes",
        ),
        Claim(
            "the same of open files",
            "ratio",
            [max(descriptors for _, _, descriptors in found)],
            at_most=goal,
        ),
    ]


def training_claims(
    rows: Sequence[Row],
    violations: float,
    prompts: int,
    samples: int,
    seconds: float,
    machine: float,
    judged: bool,
) -> list[Claim]:
    """Return what the metrics of a run's steps claim; without rates where no step is in the test.

    Args:
        violations: Those that its audit found; NaN, which meets no goal, of a run without any.
        prompts: Problems of each step.
        samples: Trajectories of each problem.
        seconds: Length of the test, which ended with the last row.
        machine: Change of the machine's own speed, last by first sixth.
        judged: Whether the rate has a goal.
    """
    dropped, retried, discarded = (
        sum((Counter(row[key] or {}) for row in rows), Counter[str]())
        for key in ("dropped", "retried", "groups_discarded")
    )
    # A group that failed was replaced by another; it was asked for, too.
    asked = (len(rows) * prompts + discarded["failed"]) * samples
    finished = sum(row["trajectories"] + (row.get("trajectories_discarded") or 0) for row in rows)
    missing = set(range(1, len(rows) + 1)) ^ {row["step"] for row in rows}
    exact = min((row["exact_percent"] for row in rows), default=0.0)
    rates = rates_of(rows, seconds)
    note = f"dropped {dict(dropped)}; retried {dict(retried)}; groups {dict(discarded)}"
    return [
        Claim("steps missing", "count", [len(missing)], at_most=0),
        Claim("trajectories asked for", "count", [asked], note=note),
        Claim(
            "trajectories neither finished nor counted by reason",
            "count",
            [asked - finished - dropped.total()],
            at_most=0,
            at_least=0,
        ),
        Claim("exact tokens, worst step", "%", [exact], at_least=100),
        Claim("violations of the audit", "count", [violations], at_most=0),
        *([Claim("trajectories trained", "1/s", rates)] if rates else []),
        *([change_of(rates, machine, judged)] if rates else []),
    ]


def counts_by_time(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Return events per second in each of 60 parts of the time."""
    seconds = (end - begin) / 60
    counts = Counter(int((at - begin) / seconds) for at in times)
    return [counts[part] / seconds for part in range(60)]


def rates_of(rows: Sequence[dict[str, Any]], seconds: float) -> list[float]:
    """Return each step's trajectories per second, of the steps of the last `seconds`."""
    rates = list[float]()
    for row in reversed(rows):
        seconds -= row["step_seconds"]
        if seconds < 0:
            break
        rates.append(row["trajectories"] / row["step_seconds"])
    return rates[::-1]


def change_of(rates: Sequence[float], machine: float, judged: bool) -> Claim:
    """Return the claim of the last sixth's median rate by the first's, by the machine's own."""
    part = max(1, len(rates) // 6)
    last, first = statistics.median(rates[-part:]), statistics.median(rates[:part])
    ratio = last / first if first else 0.0
    return Claim(
        "the same, last by first sixth, by the machine's speed",
        "ratio",
        [ratio / machine],
        at_least=0.97 if judged else None,
        note=f"the rates' own ratio is {ratio:.3f}",
    )
