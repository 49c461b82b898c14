"""Cost of a thread for each environment: `python -m benchmarks.threads [--quick]`.

256 environments are live at once, and each calls plain functions that take 5 or 50 microseconds:
all in its own thread (`UserThread`), or each in any idle thread. The figures are the processor time
per call, including the function itself, and the memory of a live environment's thread.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import psutil

from benchmarks.report import Claim, parser, quotients, report
from turnwise.core.user_code import UserThread, call_user_code

LIVE = 256


def spin(seconds: float) -> None:
    """Keep the processor busy for some seconds, as a tool does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def measure(seconds: float, calls: int, own: bool) -> tuple[float, float]:
    """Return the microseconds of processor time a call, and the KiB of memory for each of the
    live environments."""
    before, process = psutil.Process().memory_info().rss, psutil.Process()
    threads = [UserThread() if own else None for _ in range(LIVE)]
    call: Callable[[], None] = partial(spin, seconds)

    async def play(thread: UserThread | None) -> None:
        for _ in range(calls):
            await call_user_code(call, name="a tool", seconds=60, thread=thread)

    started = time.process_time()
    await asyncio.gather(*map(play, threads))
    spent = time.process_time() - started
    kept = (process.memory_info().rss - before) / LIVE / 1024
    for thread in threads:
        if thread is not None:
            thread.release()
    return spent / (LIVE * calls) * 1e6, kept


async def main() -> None:
    """Run the benchmark and print the table."""
    options = parser("threads", __doc__).parse_args()
    calls, rounds = (4, 1) if options.quick else (40, 5)
    _, memory = await measure(0.0, 1, own=True)  # this starts all threads
    claims = [Claim(f"memory of a thread of each of {LIVE} environments", "KiB", [memory])]
    for microseconds in (5, 50):
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for own in found:
                found[own].append((await measure(microseconds / 1e6, calls, own))[0])
        claims.append(
            Claim(
                f"a call of {microseconds} us in its environment's own thread",
                "us",
                found[True],
                "in any idle thread",
                found[False],
                quotients(found[True], found[False]),
                at_most=1.5,
            )
        )
    report(claims, options)


if __name__ == "__main__":
    asyncio.run(main())
