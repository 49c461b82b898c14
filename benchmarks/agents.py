"""Agents behind `turnwise serve` against verifiers: `python -m benchmarks.agents [--quick]`.

One server (`turnwise serve` with the demo's model, in processes of its own) and two clients that
take turns, 64 rollouts at a time each: an agent that uses OpenAI's client and has only a base
URL, and verifiers 0.4.0 in its fastest supported way, its agent in one process
(`benchmarks/peers/`). Same model, same tool, problems from the same file. A rollout is two
requests: in the first the model answers a question with a call of the tool, in the second it
answers the tool's result (without a call there is only one request). Turnwise's server keeps every
session's trajectory for both; the trajectories of the OpenAI agent are fetched and audited
afterwards, and each must be exact.

The limits of the machine are measured as well: a bare engine (vLLM's AsyncLLM in this process,
without a server) replays the ids of those trajectories, 64 at a time; and the processor time of a
rollout is summed over all processes, which limits the rollouts per second on all cores.

vLLM's own server, with an engine of the same arguments, also answers the same agent, streamed and
not, with the same problems in the same order.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.models import as_in_a_worker, cpu_seconds, demo_files
from benchmarks.report import Claim, digits, parser, quotients, report
from benchmarks.servers import both_servers
from examples.calculator.tool import TOOL_SCHEMA
from turnwise.config import EngineConfig, ModelConfig, SamplingConfig
from turnwise.engine import Request, generate
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.trajectory import Prompt, Trajectory, audit
from turnwise.weights import WORKER_EXTENSION

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-bench" / "bin" / "python"
REQUESTS = 2
CONCURRENCY = 64


@dataclass
class Measured:
    """Rollouts/s by round, and the audit of the agent's rollouts."""

    ours: list[float]
    theirs: list[float]
    trajectories: list[list[Trajectory]]
    cpu: list[dict[str, float]]
    """Processor time of a rollout of Turnwise by process, in milliseconds."""
    note: str
    walls: dict[bool, tuple[list[float], list[float]]]
    """Seconds of the same rollouts through Turnwise's server and vLLM's, by whether streamed."""


def ask(command: list[Any]) -> dict[str, Any]:
    """Run a client; returns the JSON that it printed."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[1]} failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


async def check(base_url: str, sessions: list[str], turns: int) -> list[Trajectory]:
    """Fetch and audit all trajectories: they hold every turn of the agent, and are exact."""
    root, trajectories = base_url.removesuffix("/v1"), list[Trajectory]()
    async with aiohttp.ClientSession() as http:
        for name in sessions:
            async with http.get(f"{root}/sessions/{name}") as response:
                reply = await response.json()
            trajectory = Trajectory.from_json(json.dumps(reply["trajectory"]))
            found = audit(trajectory)
            assert found.violations == 0, found.first_violation
            assert not found.forked, found.forked
            trajectories.append(trajectory)
    seen = sum(len(trajectory.turns) for trajectory in trajectories)
    assert seen == turns, f"{seen} of {turns} turns are in the sessions"
    return trajectories


async def replay(
    model: Path, rounds: Sequence[Sequence[Trajectory]]
) -> tuple[list[float], list[float]]:
    """Replay each round's ids on a bare engine. Return its trajectories/s, and the milliseconds of
    processor time of a trajectory, engine and caller together; the first round warms up."""
    config = ModelConfig(path=str(model), max_length=512)
    engine = VllmEngine(
        config,
        EngineConfig(max_num_seqs=128),
        worker_extension=WORKER_EXTENSION,
    )
    names, rates, spent = itertools.count(), list[float](), list[float]()

    async def lane(waiting: Iterator[Trajectory]) -> None:
        for trajectory in waiting:
            for index, turn in enumerate(trajectory.turns):
                tokens = len(turn.completion_token_ids)
                sampling = SamplingConfig(max_tokens=tokens, ignore_eos=True)
                prompt = trajectory.prompt_token_ids(index)
                await generate(engine, Request(Prompt(prompt), sampling, f"r{next(names)}"))

    for trajectories in (rounds[0], *rounds):
        await engine.reset_prefix_cache()
        waiting, started = iter(trajectories), time.perf_counter()
        before = sum(cpu_seconds(os.getpid()).values())
        await asyncio.gather(*(lane(waiting) for _ in range(CONCURRENCY)))
        rates.append(len(trajectories) / (time.perf_counter() - started))
        cpu = sum(cpu_seconds(os.getpid()).values()) - before
        spent.append(cpu / len(trajectories) * 1e3)
    await engine.shutdown()
    return rates[1:], spent[1:]


def run(
    server: tuple[str, int], vllm_url: str, build: Path, folder: Path, options: argparse.Namespace
) -> Measured:
    base_url, pid = server
    problems, tools = build / "train.jsonl", folder / "tools.json"
    tools.write_text(json.dumps([TOOL_SCHEMA]))
    rollouts, warm, rounds = (16, 8, 1) if options.quick else (96, 32, 3)
    common = ["--model", build / "model", "--problems", problems]
    common += ["--rollouts", rollouts, "--warmup", warm, "--max-turns", REQUESTS]
    agent = [sys.executable, "-m", "benchmarks.peers.openai_agent", *common, "--base-url"]
    ours, theirs, turns, kept, cpu, failures = [], [], [], [], [], list[str]()
    walls: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    for seed in range(rounds):
        before = cpu_seconds(pid)
        mine = ask([*agent, base_url, "--seed", seed])
        after, each = cpu_seconds(pid), 1e3 / (rollouts + warm)
        spent = {kind: (after[kind] - before[kind]) * each for kind in after}
        client = mine["cpu_seconds"] * each
        cpu.append({"engine": spent["engine"], "server": spent["others"], "client": client})
        kept.append(asyncio.run(check(base_url, mine["sessions"], mine["turns"])))
        peer = ROOT / "benchmarks" / "peers" / "verifiers_rollouts.py"
        other = ask([options.peers, peer, *common, "--base-url", base_url, "--tools", tools])
        failures += other["failures"]  # not counted
        ours.append(mine["rollouts_per_s"])
        theirs.append(other["rollouts_per_s"])
        turns.append(f"{mine['turns'] / rollouts:.2f} and {other['turns'] / rollouts:.2f}")
        for stream, (here, there) in walls.items():
            streamed = ["--seed", seed, *(["--stream"] if stream else [])]
            there.append(ask([*agent, vllm_url, "--plain", *streamed])["seconds"])
            here.append((ask([*agent, base_url, *streamed]) if stream else mine)["seconds"])
    note = f"requests a rollout, ours and theirs, round by round: {', '.join(turns)}"
    if failures:
        note += f"; {len(failures)} of theirs failed, the first with {failures[0][:300]}"
    return Measured(ours, theirs, kept, cpu, note, walls)


def claims_of(measured: Measured, replayed: list[float], bare: list[float]) -> list[Claim]:
    ours, theirs = measured.ours, measured.theirs
    split = {kind: statistics.median(c[kind] for c in measured.cpu) for kind in measured.cpu[0]}
    each, cores = sum(split.values()), len(os.sched_getaffinity(0))
    parts = ", ".join(f"{kind} {digits(spent)}" for kind, spent in split.items())
    server, engine = ([round_[kind] for round_ in measured.cpu] for kind in ("server", "engine"))
    both = [one + other for one, other in zip(server, engine, strict=True)]
    return [
        Claim(
            f"rollouts of an OpenAI-client agent, {CONCURRENCY} at a time",
            "1/s",
            ours,
            "verifiers 0.4.0",
            theirs,
            quotients(ours, theirs),
            at_least=2.5,
            note=measured.note,
        ),
        Claim(
            "rollouts of that agent",
            "1/s",
            ours,
            "bare engine's replay",
            replayed,
            quotients(ours, replayed),
            at_least=0.85,
        ),
        Claim(
            "the server's processor time of such a rollout",
            "ms",
            server,
            "the engine's",
            engine,
            quotients(server, engine),
            at_most=1.0,
            note=f"{parts}; {cores} cores have time for {digits(cores * 1e3 / each)} rollouts/s",
        ),
        Claim(
            "processor time of engine and server of such a rollout",
            "ms",
            both,
            "bare engine's replay",
            bare,
            quotients(both, bare),
            at_most=1.1,
        ),
        *(
            Claim(
                f"wall time of that agent's rollouts{', streamed' if stream else ''}",
                "s",
                here,
                "vLLM's own server",
                there,
                quotients(here, there),
                at_most=0.9,
            )
            for stream, (here, there) in measured.walls.items()
        ),
    ]


def main() -> None:
    """Run the benchmark and print its claims."""
    made = parser("agents", __doc__)
    made.add_argument("--peers", type=Path, default=PEERS, help="Python with verifiers")
    options = made.parse_args()
    if not options.peers.exists():
        sys.exit(f"{options.peers} is not there; `make bench` installs it")
    as_in_a_worker()
    build = demo_files()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build / "model"
        with both_servers(model, folder) as (server, (vllm_url, _)):
            measured = run(server, vllm_url, build, folder, options)
    replayed = asyncio.run(replay(build / "model", measured.trajectories))
    report(claims_of(measured, *replayed), options)


if __name__ == "__main__":
    main()
