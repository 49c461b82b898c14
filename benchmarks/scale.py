"""The scheduler over many engines: `python -m benchmarks.scale [--quick]`.

Simulated engines on a virtual clock (`tests.simulated`): no model, but the real
scheduler, the same sessions, the same queues. Sessions of 1 to 4 turns come in groups of 8 with one
prompt; between two turns a tool takes 10 ms or 200 ms. 16 sessions
for each engine are in flight.

A perfect balancer is one engine with the speed and the cache of all engines: no queue is ever
longer than another, and no turn ever misses a prefix that some engine has cached. Its makespan in
virtual time is the reference for the fleet's makespan. The cost of a turn is real time, of
scheduler and simulation together, and of the scheduler's choice alone; the garbage collector is
off, because it would mostly work on the simulation's heap. Round robin shows the part of the growth
that the scheduler does not cause.

In two more runs, of twice as many sessions, 5 % of the engines take twice the time, or 2 % of them
die one after the other and are not replaced. The perfect balancer loses the speed that the slow
engines lose, but keeps the speed of the engines that die.

Four engines, three of which join after a second, are compared with four from the beginning, by
their turns in the third second.

With `rollout.processes`, each of 16 schedulers gives its sessions to a sixteenth of the engines.
The counterpart lets each scheduler use all engines, without knowledge of the others' loads.
"""

import asyncio
import gc
import itertools
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.report import Claim, parser, quotients, report, spread
from tests.simulated import Latency, SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.config import SamplingConfig, ServingConfig
from turnwise.engine import Chunk, Generator, Request, Route, generate
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory import Prompt

SAMPLING = SamplingConfig(max_tokens=32)
PER_ENGINE = 16
GROUP = 8
TOOLS = ((0.8, 0.01), (0.2, 0.2))
"""Shares of the tools' calls, and their seconds."""


@dataclass
class Outcome:
    """One run of all sessions."""

    makespan: float
    """Virtual seconds."""
    seconds: float
    """Real seconds."""
    turns: int
    hit_rate: float
    """Fraction of all prompt tokens that were cached."""


class RoundRobin:
    """Sends each turn to the next engine, whatever its session."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = itertools.cycle(engines)

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        return next(self._engines).stream(request)


class Processes:
    """Several schedulers over the same engines, as rollout processes have them.

    A group runs in the process with the fewest requests, much as the driver sends a group to the
    process with the fewest groups.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], count: int, *, divided: bool) -> None:
        self.schedulers = [schedule(engines) for _ in range(count)]
        if divided:
            for place, scheduler in enumerate(self.schedulers):
                scheduler.prefer(engine.name for engine in engines[place::count])
        self._busy = [0] * count
        self._places: dict[str, int] = {}

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        group = request.route.group
        if (place := self._places.get(group)) is None:
            place = self._places[group] = self._busy.index(min(self._busy))
        self._busy[place] += 1
        try:
            async with aclosing(self.schedulers[place].stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._busy[place] -= 1


def make_engines(
    count: int, faster: int = 1, kind: type[SimulatedEngine] = SimulatedEngine
) -> list[SimulatedEngine]:
    """Make `count` engines, each as fast as `faster` usual engines."""
    usual = Latency()
    latency = Latency(usual.prefill_token / faster, usual.step, usual.step_request / faster)
    return [
        kind(
            name=f"worker-{index}",
            latency=latency,
            max_num_seqs=256 * faster,
            cache_blocks=4096 * faster,
        )
        for index in range(count)
    ]


def schedule(engines: Sequence[SimulatedEngine]) -> Scheduler:
    scheduler = Scheduler(ServingConfig(), 3600.0)
    for engine in engines:
        scheduler.add(engine.name, engine)
    return scheduler


def hurt(
    engines: Sequence[SimulatedEngine], schedulers: Sequence[Scheduler], slow: float, dying: float
) -> None:
    """Slow a share of the engines down by half, and let another share die within three seconds.

    Dead engines are not replaced: their turns continue on other engines.
    """
    count, loop = len(engines), asyncio.get_running_loop()
    for engine in engines[: round(slow * count)]:
        engine.slowdown = 2.0
    last = engines[count - round(dying * count) :]

    def die(engine: SimulatedEngine) -> None:
        engine.die()
        for scheduler in schedulers:
            scheduler.remove(engine.name)

    for number, engine in enumerate(last):
        loop.call_later(0.5 + 2.5 * number / len(last), die, engine)


async def run_sessions(
    generator: Generator, engines: Sequence[SimulatedEngine], sessions: int, lanes: int, seed: int
) -> Outcome:
    """Run all sessions, `lanes` at a time."""
    chance = random.Random(seed)
    shares, seconds = zip(*TOOLS, strict=True)
    plans = [chance.choices(seconds, shares, k=chance.randint(0, 3)) for _ in range(sessions)]
    waiting = iter(enumerate(plans))
    turns = 0

    async def lane() -> None:
        nonlocal turns
        for index, tools in waiting:
            group = index // GROUP
            prompt = [(group * 31 + i * 7 + seed) % 997 + 1 for i in range(100)]
            route = Route(f"s{index}", f"g{group}")
            for turn, pause in enumerate((*tools, None)):
                name = f"{index}-{turn}"
                completion = await generate(
                    generator, Request(Prompt(prompt), SAMPLING, name, route=route)
                )
                turns += 1
                if pause is not None:
                    prompt = [*prompt, *completion.token_ids, *[5] * 16]
                    await asyncio.sleep(pause)

    started, clock = time.perf_counter(), asyncio.get_running_loop().time
    begun = clock()
    await asyncio.gather(*(lane() for _ in range(lanes)))
    hits = sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines)
    return Outcome(clock() - begun, time.perf_counter() - started, turns, hits)


def fleet_of(count: int, sessions: int, seed: int, *, sticky: bool = True) -> Outcome:
    async def work() -> Outcome:
        engines = make_engines(count)
        generator: Generator = schedule(engines) if sticky else RoundRobin(engines)
        return await run_sessions(generator, engines, sessions, PER_ENGINE * count, seed)

    return run_virtually(work())


def fleet_of_processes(
    count: int,
    processes: int,
    sessions: int,
    seed: int,
    *,
    divided: bool = True,
    slow: float = 0.0,
    dying: float = 0.0,
) -> Outcome:
    async def work() -> Outcome:
        engines = make_engines(count)
        random.Random(seed).shuffle(engines)
        generator = Processes(engines, processes, divided=divided)
        hurt(engines, generator.schedulers, slow, dying)
        return await run_sessions(generator, engines, sessions, PER_ENGINE * count, seed)

    return run_virtually(work())


def perfect(count: int, sessions: int, seed: int, lost: float = 0.0) -> Outcome:
    """Run all sessions on one engine as fast as `count` engines, less the share `lost`."""

    async def work() -> Outcome:
        (engine,) = engines = make_engines(1, faster=round(count * (1 - lost)))
        return await run_sessions(engine, engines, sessions, PER_ENGINE * count, seed)

    return run_virtually(work())


async def choice_microseconds(workers: int, count: int) -> float:
    """Time the scheduler's choice alone: sessions of eight turns in groups of eight."""
    scheduler = schedule(make_engines(workers))
    routes = [Route(f"s{index // 8}", f"g{index // 64}") for index in range(count)]
    requests = [Request(Prompt(), SAMPLING, "r", route=route) for route in routes]
    started = time.perf_counter()
    for request in requests:
        await scheduler._schedule(request)
    return (time.perf_counter() - started) / count * 1e6


def rate_with_joined(count: int, joining: int, sessions: int, seed: int) -> float:
    """Return the turns of `count` engines in the third virtual second; the last `joining` engines
    join after one second."""

    async def work() -> float:
        engines, loop = make_engines(count), asyncio.get_running_loop()
        first = count - joining
        scheduler = schedule(engines[:first])
        turns: list[int] = []
        for engine in engines[first:]:
            loop.call_later(1.0, scheduler.add, engine.name, engine)
        for at in (2.0, 3.0):
            loop.call_later(at, lambda: turns.append(scheduler.events["turns"]))
        await run_sessions(scheduler, engines, sessions, PER_ENGINE * count, seed)
        begin, end = turns
        return float(end - begin)

    return run_virtually(work())


def makespan(
    what: str,
    run: Outcome,
    other: Outcome,
    against: str = "a perfect balancer",
    at_most: float = 1.05,
) -> Claim:
    """Return the claim about the virtual time that a run takes, compared with another run."""
    ratio = run.makespan / other.makespan
    return Claim(
        what, "virtual s", [run.makespan], against, [other.makespan], [ratio], at_most=at_most
    )


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("scale", __doc__).parse_args()
    seed = time.time_ns() % 1_000_000
    many, sessions = (64, 4_000) if options.quick else (1024, 16_384)
    few = max(1_000, sessions // 16)
    rounds = 1 if options.quick else 3
    gc.disable()

    one, all_ = fleet_of(many, sessions, seed), perfect(many, sessions, seed)
    processes = 4 if options.quick else 16
    divided, undivided = (
        fleet_of_processes(many, processes, sessions, seed, divided=each) for each in (True, False)
    )
    slow = fleet_of_processes(many, processes, 2 * sessions, seed, slow=0.05)
    dying = fleet_of_processes(many, processes, 2 * sessions, seed, dying=0.02)
    without_slow, with_all = (
        perfect(many, 2 * sessions, seed, lost=lost) for lost in (0.05 / 2, 0.0)
    )
    small = [fleet_of(8, few, seed + i) for i in range(rounds)]
    robin = [fleet_of(8, few, seed + i, sticky=False) for i in range(rounds)]
    grown, whole = (
        [rate_with_joined(4, joining, few, seed + i) for i in range(rounds)] for joining in (3, 0)
    )
    robin_of_many = fleet_of(many, sessions // 6, seed, sticky=False)
    choices = {
        count: [
            asyncio.run(choice_microseconds(count, 20_000 if options.quick else 100_000))
            for _ in range(rounds)
        ]
        for count in (8, many)
    }
    large_cost, small_cost, large_robin, small_robin = (
        [run.seconds / run.turns * 1e6 for run in runs]
        for runs in ([one] * rounds, small, [robin_of_many] * rounds, robin)
    )
    report(
        [
            makespan(f"makespan of {sessions:,} sessions on {many:,} simulated engines", one, all_),
            makespan(f"the same, {processes} rollout processes", divided, all_),
            makespan(
                f"the same, {processes} rollout processes",
                divided,
                undivided,
                "each uses all engines",
                at_most=1.0,
            ),
            makespan(
                f"makespan of {2 * sessions:,} sessions, 5 % slow engines", slow, without_slow
            ),
            makespan(
                f"makespan of {2 * sessions:,} sessions, 2 % of the engines die", dying, with_all
            ),
            Claim(
                "turns of 4 simulated engines, 3 of which joined a second before",
                "1/virtual s",
                grown,
                "4 from the beginning",
                whole,
                quotients(grown, whole),
                at_least=0.9,
            ),
            Claim(
                f"a turn among {many:,} engines, simulation included",
                "us",
                large_cost[:1],
                "among 8",
                small_cost,
                quotients(large_cost, small_cost),
                at_most=1.5,
                note="round robin and no scheduler: " + spread(quotients(large_robin, small_robin)),
            ),
            Claim(
                f"the scheduler's choice among {many:,}",
                "us",
                choices[many],
                "among 8",
                choices[8],
                quotients(choices[many], choices[8]),
                at_most=3.0,
            ),
            Claim(
                "scheduler's choices, 8 engines",
                "1/s",
                [1e6 / microseconds for microseconds in choices[8]],
                at_least=50_000,
            ),
            Claim(
                "prefix-cache hit rate, sticky, 8 engines",
                "share",
                [run.hit_rate for run in small],
                "round robin",
                [run.hit_rate for run in robin],
                quotients([run.hit_rate for run in small], [run.hit_rate for run in robin]),
                at_least=1.5,
            ),
        ],
        options,
    )


if __name__ == "__main__":
    main()
