"""The claims of the soak test, from what its programs left and what was sampled."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Claim
from benchmarks.soak.memory import PARTS, Memory

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
            f"growth in each half: memory {grown:.3f}, open files {descriptors:.3f}"
        )
    if not found:
        return []
    goal = 1.025 if judged else None
    return [
        Claim(
            "memory of the process that grew most, in each half",
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
) -> list[Claim]:
    """Return what the metrics of a run's steps claim; without rates where no step is in the test.

    Args:
        violations: Those that its audit found; NaN, which meets no goal, of a run without any.
        prompts: Problems of each step.
        samples: Trajectories of each problem.
        seconds: Length of the test, which ended with the last row.
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
    rates = [trajectories / took for _, trajectories, took in steps_within(rows, seconds)]
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
    ]


def counts_by_time(events: Sequence[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Return the sum of what happened in each of `PARTS` parts of the time, of pairs of a time and
    a number."""
    counts = [0.0] * PARTS
    for at, number in events:
        if begin <= at < end:
            counts[int((at - begin) / (end - begin) * PARTS)] += number
    return counts


def steps_within(rows: Sequence[Row], seconds: float) -> list[tuple[float, float, float]]:
    """Return the end, the trajectories and the seconds of each step of the last `seconds`, from
    whose beginning ends are counted."""
    found, end = list[tuple[float, float, float]](), seconds
    for row in reversed(rows):
        if end < row["step_seconds"]:
            break
        found.append((end, row["trajectories"], row["step_seconds"]))
        end -= row["step_seconds"]
    return found[::-1]


def change_of_cost(
    what: str, counts: Sequence[float], spent: Sequence[float], machine: float, judged: bool
) -> Claim:
    """Return the claim of the processor time that a program spends for each of what it counts, the
    last sixth's median by the first's. The rate itself says nothing: all programs share two cores,
    and the features beside them need more or less.

    Args:
        what: One of these, such as "request".
        counts: Their number in each part of the time.
        spent: Processor time in each part.
        machine: Change of the machine's own speed, last by first sixth.
        judged: Whether it has a goal.
    """
    part, both = len(counts) // 6, [*zip(counts, spent, strict=True)]
    first, last = (  # a part of a short test may have no sample
        statistics.median([cost / count for count, cost in of if count and cost] or [0.0])
        for of in (both[:part], both[-part:])
    )
    return Claim(
        f"processor time of a {what}, last by first sixth, by the machine's speed",
        "ratio",
        [last / first * machine if first else 0.0],
        at_most=1.05 if judged else None,
        note=f"{first * 1000:.1f} ms and {last * 1000:.1f} ms",
    )
