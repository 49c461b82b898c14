"""Rollouts and sessions in two processes against one: `python -m benchmarks.processes [--quick]`.

The trajectories of `benchmarks.rollouts` (3 turns of 24 tokens, in groups of 8, tools that answer
at once), on engines that cost nothing: a turn's tokens are there at once. Only the work of Turnwise
itself remains: prompts, templates, parser, tools, scheduler, trajectories. One process is the
driver (`rollout.processes: 1`). With two, the driver receives the finished groups from them.

Then sessions of clients over HTTP (`serving.session_processes`): conversations of three requests,
64 at a time. Their client runs in the driver and shares the two cores, so two processes cannot
answer twice as much on this machine. The processor time of a request in the processes shows whether
they would elsewhere.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import ray
from ray.actor import ActorHandle

from benchmarks.models import make_model
from benchmarks.report import Claim, parser, quotients, report
from benchmarks.rollouts import TURNS, configuration, make_problems
from turnwise.chat.template import load_tokenizer
from turnwise.config import Config
from turnwise.core.aio import run as run_loop
from turnwise.core.ray import start_ray
from turnwise.engine.protocol import Chunk, Engine, Request
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.processes import RolloutProcesses
from turnwise.rollouts.producer import RunGroup
from turnwise.serving.front_process import FrontProcess
from turnwise.serving.front_processes import FrontProcesses
from turnwise.serving.openai.opening import make_server
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory.audit import audit

ENGINES = 8
CLIENTS = 64
"""Number of conversations at a time."""
IN_FLIGHT = 32
"""Number of groups in flight."""


class FreeEngine:
    """An engine that returns random token ids at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        count = request.sampling.max_tokens
        assert count is not None
        await asyncio.sleep(0)
        tokens = [random.randrange(10, 200) for _ in range(count)]
        yield Chunk(tokens, [-1.0] * count, [0] * count, "length")


class FreeProcess(FrontProcess):
    """A front process with `FreeEngine`s."""

    def _attach(self, name: str, worker: ActorHandle | None) -> Engine:
        return engine_of(name)


def engine_of(name: str) -> Engine:
    engine: Any = FreeEngine(name)
    found: Engine = engine
    return found


def scheduler_of(config: Config) -> Scheduler:
    """Return a scheduler of `FreeEngine`s."""
    scheduler = Scheduler(config.serving, 60.0)
    for index in range(ENGINES):
        scheduler.add(f"worker-{index}", engine_of(f"worker-{index}"))
    return scheduler


async def measure_turns(run_group: RunGroup, seconds: float) -> tuple[float, float]:
    """Run groups for some seconds, and audit every trajectory. Return turns per second, and this
    process's processor time of a turn in microseconds."""
    groups: list[Group] = []
    until = time.perf_counter() + seconds

    async def lane(number: int) -> None:
        while time.perf_counter() < until:
            (problem,) = make_problems(1, "instant")
            groups.append(await run_group(problem, f"{number}-{len(groups)}"))

    started, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(lane(number) for number in range(IN_FLIGHT)))
    took, spent = time.perf_counter() - started, time.process_time() - spent
    trajectories = [each for group in groups for each in group.trajectories]
    assert all(len(each.turns) == TURNS for each in trajectories)
    assert not any(group.dropped for group in groups)
    for each in trajectories:
        found = audit(each)
        assert found.violations == 0, found.first_violation
    turns = sum(len(each.turns) for each in trajectories)
    return turns / took, spent / turns * 1e6


Rounds = list[tuple[float, float]]


async def measure(path: Path, rounds: int, seconds: float) -> tuple[Rounds, Rounds]:
    """Return the results of `measure_turns` in one process and in two, round by round."""
    config = configuration(path, IN_FLIGHT)
    rollout = {"concurrency": IN_FLIGHT * config.sampling.n, "processes": 2}
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update=rollout), "output_dir": str(path)}
    )
    scheduler = scheduler_of(config)
    runner = Runner(config, load_tokenizer(config.model))
    _ = runner.tool_parser
    processes = RolloutProcesses(config, scheduler, process_class=FreeProcess)
    await processes.start()

    def alone(problem: Problem, tag: str) -> Awaitable[Group]:
        return runner.run_group(scheduler, problem, config.sampling, tag)

    def together(problem: Problem, tag: str) -> Awaitable[Group]:
        return processes.run_group(problem, config.sampling, tag)

    one, two = [], []
    try:
        for number in range(rounds + 1):  # the first warms up
            one.append(await measure_turns(alone, seconds if number else 1.0))
            two.append(await measure_turns(together, seconds if number else 1.0))
    finally:
        await processes.stop()
    return one[1:], two[1:]


def processor_seconds() -> float:
    """Return the processor time so far of all processes with `FreeEngine`s."""
    total = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if FreeProcess.__name__ in " ".join(process.cmdline()):
                times = process.cpu_times()
                total += times.user + times.system
    return total


async def milliseconds(base_url: str, seconds: float) -> float:
    """Return the processor time of a request in milliseconds; each conversation has a session."""
    until, before = time.perf_counter() + seconds, processor_seconds()
    answered = 0

    async def lane(http: aiohttp.ClientSession) -> None:
        nonlocal answered
        while time.perf_counter() < until:
            async with http.post(f"{base_url}/sessions", json={}) as response:
                session = await response.json()
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"What is {answered} plus {turn}?"})
                body = {"model": "any", "messages": messages, "max_tokens": 24}
                url = f"{session['base_url']}/chat/completions"
                async with http.post(url, json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                text = answer["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                answered += 1
            root = session["base_url"].removesuffix("/v1")
            async with http.delete(root) as response:
                turns = (await response.json())["trajectory"]["turns"]
                assert len(turns) == TURNS, turns

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(lane(http) for _ in range(CLIENTS)))
    return (processor_seconds() - before) / answered * 1e3


async def measure_sessions(
    path: Path, rounds: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the results of `milliseconds` with one session process and with two, by round."""
    config = configuration(path, IN_FLIGHT)
    scheduler = scheduler_of(config)
    async with AsyncExitStack() as stack:
        urls = []
        for count in (1, 2):
            serving = config.serving.model_copy(update={"session_processes": count})
            own = config.model_copy(update={"serving": serving, "output_dir": str(path)})
            processes = FrontProcesses(own, scheduler, FreeProcess, make_server=make_server)
            server = OpenAIServer(own, scheduler, 0, processes)
            urls.append((await server.start()).removesuffix("/v1"))
            stack.push_async_callback(server.stop)
        one, two = [], []
        for number in range(rounds + 1):  # the first warms up
            one.append(await milliseconds(urls[0], seconds if number else 1.0))
            two.append(await milliseconds(urls[1], seconds if number else 1.0))
    return one[1:], two[1:]


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("processes", __doc__).parse_args()
    start_ray(None)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = make_model("0.7 M", Path(folder))
            rounds, seconds = (1, 2.0) if options.quick else (5, 3.0)
            (one, alone), (two, driver) = (
                [list(values) for values in zip(*rounds_, strict=True)]
                for rounds_ in run_loop(measure(path, rounds, seconds))
            )
            single, double = run_loop(measure_sessions(path, rounds, seconds))
    finally:
        ray.shutdown()
    claim = Claim(
        "turns in two rollout processes, engines that cost nothing",
        "1/s",
        two,
        "one process",
        one,
        quotients(two, one),
        at_least=1.8,
    )
    driving = Claim(
        "the driver's processor time of a turn, two rollout processes",
        "us",
        driver,
        "one process, which does everything",
        alone,
        quotients(driver, alone),
        note="Ray included; `benchmarks.fleet` has the driver without Ray",
    )
    sessions = Claim(
        "processor time of a session's request, two processes, engines that cost nothing",
        "ms",
        double,
        "one process",
        single,
        quotients(double, single),
        at_most=1.1,
    )
    report([claim, driving, sessions], options)


if __name__ == "__main__":
    main()
