"""A fleet beyond any machine here: `python -m benchmarks.fleet [--quick]`.

200,000 sessions on 4,096 simulated engines, from 64 rollout processes, 16 sessions for each engine
at a time. A session has 5 to 99 turns of 32 tokens each; half of the sessions have up to 29 turns,
as recorded from coding agents (`TURNS`). The prompt grows with each turn, and between two turns a
tool takes 10 ms or 200 ms. Groups have 8 sessions.

Real parts: the driver's loop over groups, its choice of a process, the processes' reports to it,
and the processes' slots and schedulers. Ray is left out. The engines of `benchmarks.scale` are
simulated without tokens, on a virtual clock. The fleet is divided into `--parts` parts, which are
simulated side by side in processes of this machine. Each part has its share of engines, rollout
processes and sessions: only the driver's choice of a process would connect them. A perfect
balancer is one engine with the speed and the cache of all engines of a part.

Then the driver alone, in real time: it receives groups with whole trajectories, pickled as Ray
would send them, and writes them to the file of `turnwise rollout`; it also receives the reports of
processes, four a second from each. The driver's processor time per turn, and the share of a core
that reports take, give the turns per second that one driver can take, and so the shortest turn on
such a fleet. `benchmarks.processes` measures the time of Ray.
"""

import argparse
import asyncio
import gc
import itertools
import multiprocessing
import pickle
import random
import resource
import tempfile
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.report import Claim, digits, parser, quotients, report
from benchmarks.scale import GROUP, PER_ENGINE, TOOLS, make_engines, schedule
from tests.simulated import BLOCK, Asked, SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.config import Config, SamplingConfig, parse_config
from turnwise.core.actor import ActorHandle
from turnwise.core.admission import Admission, Limits, Priority
from turnwise.core.aio import together
from turnwise.engine import Generator, Request, Route, generate
from turnwise.errors import StepError
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.evaluation import GroupLog, groups_at_once, run_groups
from turnwise.rollouts.problems import Lazy, Problems
from turnwise.rollouts.processes import RolloutProcesses
from turnwise.serving.front_process import REPORT_SECONDS, FrontProcess, GroupRunner, Report
from turnwise.serving.front_processes import Process
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.seats import limits_of
from turnwise.trajectory import Outcome as Judged
from turnwise.trajectory import Prompt, Trajectory

TURNS = ((0.0, 5), (0.5, 29), (0.9, 56), (0.99, 85), (1.0, 99))
"""Quantiles of a session's number of turns; between two quantiles the numbers are uniform."""
PROMPT, ANSWER, RESULT = 100, 32, 16
"""Tokens of a first prompt, an answer, and a tool's result."""
SAMPLING = SamplingConfig(max_tokens=ANSWER)
LONGEST_TURN = 10.0
"""Goal for the shortest turn, tool included, in seconds: turns of a few hundred tokens on a GPU
take about this long."""
_IDS, _LOGPROBS = [1] * ANSWER, [-1.0] * ANSWER
_PROMPTS = [Prompt(range(PROMPT + turn * (ANSWER + RESULT))) for turn in range(TURNS[-1][1])]
"""The prompt of each turn, the same for all sessions."""


class TokenlessEngine(SimulatedEngine):
    """A simulated engine whose tokens are all alike, and that caches prompts by session and group,
    so that the ids of millions of turns are neither made nor read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: OrderedDict[str, int] = OrderedDict()
        """Cached tokens of each session and group, the most recently used last."""
        self._room = self._cache_blocks * BLOCK

    def _ids(self, request: Request) -> Sequence[int]:
        return range(len(request.prompt))

    def _sample(
        self, prompt_token_ids: Sequence[int], max_tokens: int
    ) -> tuple[list[int], list[float]]:
        return _IDS, _LOGPROBS

    def _look_up(self, request: Asked) -> int:
        session, group, length = request.route.session, request.route.group, len(request.prompt)
        cached = self._known.get(session) or min(self._known.get(group, 0), length - 1)
        self._keep(session, length + ANSWER)
        if group not in self._known:
            self._keep(group, length)
        return cached

    def _keep(self, name: str, tokens: int) -> None:
        self._room -= tokens - self._known.pop(name, 0)
        self._known[name] = tokens
        while self._room < 0:
            self._room += self._known.popitem(last=False)[1]


@dataclass
class Part:
    """Part number `part` of the `of` parts of a fleet; the other numbers are the whole fleet's."""

    engines: int
    processes: int
    sessions: int
    seed: int
    part: int = 0
    of: int = 1

    @property
    def groups(self) -> range:
        return range(self.part, self.sessions // GROUP, self.of)

    @property
    def lanes(self) -> int:
        return PER_ENGINE * self.engines // self.of


@dataclass
class Outcome:
    makespan: float
    """Virtual seconds."""
    turns: int
    processor: float
    """Real seconds of processor time."""
    memory: int
    """Peak bytes of the process so far."""
    events: Counter[str]
    """Events of all schedulers, as the driver counts them."""


def turns_of(quantile: float) -> int:
    """Return the turns of a session at a quantile, from 0 to 1."""
    place = min(bisect_right(TURNS, quantile, key=lambda known: known[0]), len(TURNS) - 1)
    (low, fewest), (high, most) = TURNS[place - 1 : place + 1]
    return round(fewest + (most - fewest) * (quantile - low) / (high - low))


async def play_session(generator: Generator, admission: Admission, seed: int, number: int) -> int:
    """Play one session once it is admitted; returns its turns."""
    chance = random.Random(f"{seed}-{number}")
    shares, seconds = zip(*TOOLS, strict=True)
    turns = turns_of(chance.random())
    route = Route(f"s{number}", f"g{number // GROUP}")
    async with admission.admitted() as place:
        for turn in range(turns):
            if turn:
                with place.idle():
                    await asyncio.sleep(chance.choices(seconds, shares)[0])
            request = Request(_PROMPTS[turn], SAMPLING, f"{number}-{turn}", route=route)
            await generate(generator, request)
    return turns


async def play_group(generator: Generator, admission: Admission, seed: int, number: int) -> int:
    sessions = range(number * GROUP, (number + 1) * GROUP)
    return sum(await together(play_session(generator, admission, seed, each) for each in sessions))


@asynccontextmanager
async def open_sessions(
    seed: int, config: Config, scheduler: Scheduler
) -> AsyncIterator[GroupRunner]:
    """Yield a rollout process's runner of groups; it plays sessions in place of trajectories."""
    admission = Admission(limits_of(config))

    async def run_group(
        problem: Problem, sampling: SamplingConfig, tag: str, priority: Priority
    ) -> Group:
        await play_group(scheduler, admission, seed, problem.row["group"])
        return Group.of(problem)

    yield GroupRunner(run_group, {"engines": admission})


class FleetProcess(FrontProcess):
    """A rollout process that lives in this one."""

    engines: dict[str, SimulatedEngine]

    async def start(self, port: int, lost: Sequence[str]) -> tuple[str, str]:
        assert self._open_runner is not None
        await self.open_runner(self._open_runner)
        return "", ""

    def _attach(self, name: str, worker: object) -> Any:
        return self.engines[name]


class Here:
    """Ray's handle of an object of this process."""

    def __init__(self, process: object) -> None:
        self._process = process

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self._process, name)
        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(method(*given)))


class HereHandle(ActorHandle):
    """Handle of an object of this process, which Ray cannot kill."""

    def kill(self) -> None:
        pass


class LocalProcesses(RolloutProcesses):
    """The driver's side of rollout processes that `make` makes here."""

    def __init__(
        self, config: Config, scheduler: Scheduler, make: Callable[[Config], object]
    ) -> None:
        super().__init__(config, scheduler)
        self._make = make

    def create(self, process: Process) -> ActorHandle:
        actor: Any = Here(self._make(self.config))
        return HereHandle(actor, process.name, StepError)


def configuration(processes: int, lanes: int, folder: str = "runs") -> Config:
    return parse_config(
        {
            "environment": "package:Class",
            "output_dir": folder,
            "model": {"path": "model"},
            "data": {"path": "rows"},
            "sampling": {"n": GROUP},
            "rollout": {"processes": processes, "concurrency": lanes},
        }
    )


def problems_of(groups: range) -> Problems:
    return Problems("rows", Lazy(len(groups), lambda index: {"group": groups[index]}))


def outcome(makespan: float, turns: int, began: float, events: Counter[str]) -> Outcome:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(makespan, turns, time.process_time() - began, memory, events)


def simulate(part: Part) -> Outcome:
    """Play a part's sessions through the driver, its rollout processes and their schedulers."""
    began = time.process_time()

    async def work() -> Outcome:
        config = configuration(part.processes // part.of, part.lanes)
        clock = asyncio.get_running_loop().time
        engines = make_engines(part.engines // part.of, kind=TokenlessEngine)
        scheduler = schedule(engines)
        made: list[FleetProcess] = []

        def make(config: Config) -> FleetProcess:
            made.append(FleetProcess(config, partial(open_sessions, part.seed)))
            made[-1].engines = {engine.name: engine for engine in engines}
            return made[-1]

        processes = LocalProcesses(config, scheduler, make)
        await processes.start()
        await asyncio.sleep(4 * REPORT_SECONDS)  # the processes know all engines

        async def run_group(problem: Problem, tag: str) -> Group:
            return await processes.run_group(problem, SAMPLING, f"{tag}-{problem.id}")

        started, at_once = clock(), groups_at_once(config, GROUP)
        await run_groups(run_group, problems_of(part.groups), "fleet", at_once=at_once)
        makespan = clock() - started
        turns = sum(process.scheduler.events["turns"] for process in made)
        await asyncio.sleep(4 * REPORT_SECONDS)  # the last reports
        await processes.stop()
        return outcome(makespan, turns, began, scheduler.events)

    return run_virtually(work())


def balance_perfectly(part: Part) -> Outcome:
    """Play a part's sessions on one engine that is as fast as all engines of the part."""
    began = time.process_time()

    async def work() -> Outcome:
        (engine,) = make_engines(1, part.engines // part.of, TokenlessEngine)
        admission, groups = Admission(Limits(part.lanes, part.lanes)), part.groups
        turns = await together(play_group(engine, admission, part.seed, each) for each in groups)
        return outcome(asyncio.get_running_loop().time(), sum(turns), began, Counter())

    return run_virtually(work())


def play_part(part: Part) -> tuple[Outcome, Outcome]:
    gc.disable()  # it would mostly walk through the simulation's own objects
    return simulate(part), balance_perfectly(part)


class Answering:
    """A rollout process as its driver sees it: groups are there at once, reports as usual."""

    def __init__(self, groups: Sequence[bytes], news: bytes) -> None:
        self._groups = itertools.cycle(groups)
        self._news = news

    async def start(self, port: int, lost: Sequence[str]) -> tuple[str, str]:
        return "", ""

    async def wake(self) -> None:
        pass

    async def stop(self) -> bool:
        return True

    async def report(self, orders: Sequence[object]) -> Report:
        await asyncio.sleep(REPORT_SECONDS)
        news: Report = pickle.loads(self._news)
        return news

    async def run_group(self, *given: object) -> Group:
        group: Group = pickle.loads(next(self._groups))
        return group


def recorded_group(seed: int) -> tuple[bytes, int]:
    """Return a group with whole trajectories, as its process sends it, and its turns."""
    chance, group = random.Random(seed), Group("rows:1")
    for index in range(GROUP):
        trajectory, ids = Trajectory("rows:1", index, outcome=Judged(1.0)), list(range(PROMPT))
        for _ in range(turns_of(chance.random())):
            answer = [chance.randrange(150_000) for _ in range(ANSWER)]
            logprobs = [-chance.random() for _ in range(ANSWER)]
            trajectory.add_turn(ids, answer, logprobs, [0] * ANSWER, "stop")
            ids = [*ids, *answer, *range(RESULT)]
        group.trajectories.append(trajectory)
    return pickle.dumps(group), sum(len(each.turns) for each in group.trajectories)


async def measure_driver(
    engines: int, processes: int, groups: int, seconds: float, folder: Path
) -> tuple[float, float]:
    """Return the driver's processor time of a turn without reports, in seconds, and the share of a
    core that the reports take."""
    config = configuration(processes, PER_ENGINE * engines, str(folder))
    scheduler = schedule(make_engines(engines))
    known = [recorded_group(seed) for seed in range(16)]
    numbers = itertools.count()

    def make(config: Config) -> Answering:
        own = [f"worker-{index}" for index in range(next(numbers), engines, processes)]
        counts = {name: Counter(turns=40, tokens=1280) for name in own}
        loads = {name: PER_ENGINE + random.random() for name in own}
        news = Report(True, loads, Counter(turns=40 * len(own)), counts=counts)
        return Answering([pickled for pickled, _ in known], pickle.dumps(news))

    driver = LocalProcesses(config, scheduler, make)
    await driver.start()
    await asyncio.sleep(2 * REPORT_SECONDS)
    started, spent = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - spent) / (time.perf_counter() - started)

    async def run_group(problem: Problem, tag: str) -> Group:
        return await driver.run_group(problem, SAMPLING, f"{tag}-{problem.id}")

    log = GroupLog(folder / "rollouts.jsonl")
    started, spent = time.perf_counter(), time.process_time()
    await run_groups(run_group, problems_of(range(groups)), "driver", log.keep, at_once=64)
    passed, spent = time.perf_counter() - started, time.process_time() - spent
    await driver.stop()
    turns = groups * sum(turns for _, turns in known) / len(known)
    return max(0.0, spent - share * passed) / turns, share


def fleet_claims(part: Part, runs: Sequence[tuple[Outcome, Outcome]]) -> list[Claim]:
    ours, perfect = ([run[place].makespan for run in runs] for place in (0, 1))
    assert all(run.turns == other.turns for run, other in runs)
    turns = sum(run.turns for run, _ in runs)
    cost = sum(run.processor for run, _ in runs) / turns * 1e6
    memory = sum(run.memory for run, _ in runs) / 2**30
    events = sum((run.events for run, _ in runs), Counter[str]())
    where = f"{part.engines:,} simulated engines, {part.processes} rollout processes"
    moved = sum(count for name, count in events.items() if name.startswith("moved"))
    note = f"{turns:,} turns in {len(runs)} parts; {moved / turns:.2%} of them moved"
    return [
        Claim(
            f"makespan of {part.sessions:,} sessions, {where}",
            "virtual s",
            ours,
            "a perfect balancer",
            perfect,
            quotients(ours, perfect),
            at_most=1.05,
            note=note,
        ),
        Claim(
            "a turn there, simulation included",
            "us",
            [cost],
            note=f"{digits(memory)} GiB in all, {part.lanes * part.of:,} sessions in flight",
        ),
    ]


def driver_claims(part: Part, measured: Sequence[tuple[float, float]]) -> list[Claim]:
    each, shares = [turn for turn, _ in measured], [share for _, share in measured]
    rates = [max(0.0, 1 - share) / turn for turn, share in measured]
    in_flight = PER_ENGINE * part.engines
    return [
        Claim("the driver's processor time of a turn", "us", [turn * 1e6 for turn in each]),
        Claim(
            f"reports of {part.processes} rollout processes on {part.engines:,} engines",
            "share of the driver's core",
            shares,
            at_most=0.1,
        ),
        Claim(
            f"shortest turn, tool included, that one driver takes from {in_flight:,} sessions",
            "s",
            [in_flight / rate for rate in rates],
            at_most=LONGEST_TURN,
            note=f"{digits(rates[0])} turns/s, with their trajectories written to a file",
        ),
    ]


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("fleet", __doc__)
    made.add_argument("--parts", type=int, default=2, help="processes that simulate")
    made.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options: argparse.Namespace = made.parse_args()
    many = (64, 4, 1_600) if options.quick else (4_096, 64, 200_000)
    whole, of = Part(*many, options.seed), options.parts
    rounds, groups, seconds = (1, 20, 1.0) if options.quick else (3, 200, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        measured = [
            asyncio.run(measure_driver(*many[:2], groups, seconds, Path(folder)))
            for _ in range(rounds)
        ]
    parts = [Part(*many, options.seed, part, of) for part in range(of)]
    with ProcessPoolExecutor(of, multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(play_part, parts))
    report(fleet_claims(whole, runs) + driver_claims(whole, measured), options)


if __name__ == "__main__":
    main()
