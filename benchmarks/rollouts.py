"""Multi-turn rollouts against the bare engine: `python -m benchmarks.rollouts [--quick]`.

Trajectories of 3 turns of 24 tokens, in groups of 8, each of the first two turns followed by a
tool's result of 16 tokens; a random model of 3.3 M parameters in float32. Turnwise runs them as
in training: runner, environment, tool, chat template, tool parser, scheduler, a worker in a Ray
actor. The trajectories are audited afterwards, and each must be exact.

1. Tools that answer at once. Against: the bare engine (vLLM's AsyncLLM in the caller's process,
   the same arguments, log-probs and no text) replaying the same trace: the same first prompts, its
   own completions, the same ids after each turn. 64 trajectories at a time for both. Processor
   time explains the difference: an engine computes on one core, and at the end of a turn, which
   64 trajectories reach at once, it waits for the other work (template, parser, tool, reward,
   scheduler, calls between processes).
2. Tools with a long tail (80 % take 10 ms, 15 % 200 ms, 5 % 2 s), in the steady state: steps of 128
   trajectories, the next step's rollouts running ahead (training.max_staleness 1), no training.
   Each turn counts by the part of it that falls into the measured time. Counting whole steps would
   be wrong: the first two begin together, so long and short steps alternate. Of three steps in a
   row, two are long (with tools that take no time their rate is 0.75 of the ideal), or two are
   short (1.5). Against: a batch-synchronous loop (vLLM's LLM.generate on the 128, all tools at
   once, next turn, next step), and against the ideal, in which tools cost no time: the bare
   engine's replay with as many trajectories at a time.

Every round has new prompts, and every engine begins it with an empty prefix cache.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
import vllm
from transformers import AutoTokenizer
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from benchmarks.models import as_in_a_worker, cpu_seconds, make_model, pause
from benchmarks.report import Claim, digits, parser, quotients, report
from turnwise.config import Config, parse_config
from turnwise.core.aio import run as run_loop
from turnwise.core.aio import task_group
from turnwise.core.ray import start_ray
from turnwise.engine.vllm_engine import VllmEngine
from turnwise.engine.vllm_start import engine_arguments
from turnwise.rollouts import Group, Problem, ProblemStream, RolloutContext, Runner
from turnwise.rollouts.environment import Environment
from turnwise.rollouts.producer import GroupProducer
from turnwise.run.fleet import make_manager
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.trajectory import Trajectory
from turnwise.trajectory.audit import audit
from turnwise.weights import WORKER_EXTENSION

_Result = TypeVar("_Result")
TURNS, NEW_TOKENS, GROUP = 3, 24, 8
CONCURRENCY = 64
WARM_UP = 2
RESULT = "357"
"""A tool's result: about 16 tokens with the template around it."""


class LookUp:
    """An environment whose only tool always returns the same result, after a pause."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools = [self.look_up]
        self._kind = row["tools"]

    async def look_up(self, name: str) -> str:
        """Look a name up.

        Args:
            name: What to look up.
        """
        if seconds := pause(self._kind):
            await asyncio.sleep(seconds)
        return RESULT

    def reward(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.turns) == TURNS)


class FixedTurns:
    """The tool-calling loop for a random model: it calls the tool whatever the model's text is.

    The text is decoded and parsed as for any other model.
    """

    async def run(self, environment: Environment, context: RolloutContext) -> None:
        trajectory, tools = context.trajectory, context.toolbox.schemas
        trajectory.messages = [dict(message) for message in context.problem]
        prompt = await context.first_prompt(trajectory.messages, tools=tools)
        for turn in itertools.count(1):
            completion = await context.sample(prompt)
            assert completion is not None
            text = context.template.decode(completion.token_ids)
            context.tool_parser.parse(text, tools)
            trajectory.messages.append({"role": "assistant", "content": text})
            if turn == TURNS:
                break
            result = await context.toolbox.call("look_up", json.dumps({"name": "x"}))
            message = {"role": "tool", "tool_call_id": f"call{turn:05d}", "content": result.text}
            trajectory.messages.append(message)
            prompt = await context.next_prompt(prompt, completion.token_ids, [message], tools=tools)
        trajectory.status = "completed"


def make_problems(count: int, tools: str) -> list[Problem]:
    """Return problems with questions that no earlier round had."""
    words = ["apples", "pears", "boxes", "coins", "trains", "books"]

    def question() -> str:
        asked = (f"{random.randrange(10_000)} {random.choice(words)}" for _ in range(4))
        return f"How many are {', '.join(asked)} together? Please use the tool."

    return [
        Problem(f"p{random.getrandbits(60):x}", {"question": question(), "tools": tools})
        for _ in range(count)
    ]


def configuration(path: Path, prompts_per_step: int) -> Config:
    return parse_config(
        {
            "environment": "benchmarks.rollouts:LookUp",
            "model": {"path": str(path), "max_length": 512},
            "data": {"path": "none"},
            "rollout": {
                "loop": "benchmarks.rollouts:FixedTurns",
                "concurrency": CONCURRENCY,
                "prompts_per_step": prompts_per_step,
            },
            "sampling": {
                "n": GROUP,
                "max_tokens": NEW_TOKENS,
                "ignore_eos": True,
            },
            "training": {"steps": 10_000, "max_staleness": 1},
            "engine": {"max_num_seqs": 256},
        }
    )


@dataclass
class Run:
    """Trajectories/s, and the processor time of one trajectory in milliseconds, by process."""

    rate: float
    cpu: dict[str, float]


async def metered(work: Awaitable[_Result], trajectories: int) -> tuple[_Result, Run]:
    before, started = cpu_seconds(os.getpid()), time.perf_counter()
    result = await work
    seconds, after = time.perf_counter() - started, cpu_seconds(os.getpid())
    each = 1e3 / trajectories
    return result, Run(
        trajectories / seconds, {kind: (after[kind] - before[kind]) * each for kind in after}
    )


@dataclass
class Trace:
    """Ids of a trajectory: its first prompt, and the ids that follow each completion."""

    prompt: list[int]
    added: list[list[int]]


def trace_of(trajectory: Trajectory) -> Trace:
    prompts = [trajectory.prompt_token_ids(index) for index in range(TURNS)]
    held = [
        len(prompt) + len(turn.completion_token_ids)
        for prompt, turn in zip(prompts, trajectory.turns, strict=True)
    ]
    return Trace(prompts[0], [prompt[n:] for n, prompt in zip(held, prompts[1:], strict=False)])


def parameters() -> vllm.SamplingParams:
    return vllm.SamplingParams(
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def replay(llm: Any, traces: Sequence[Trace], at_a_time: int) -> float:
    """Replay the traces on the bare engine; returns the seconds."""
    names, waiting, params = itertools.count(), iter(traces), parameters()
    tag = random.getrandbits(60)

    async def lane() -> None:
        for trace in waiting:
            prompt = trace.prompt
            for added in (*trace.added, []):
                name = f"{tag:x}-{next(names)}"
                async for output in llm.generate(tokens_input(prompt), params, name):
                    completion = output.outputs[0].token_ids
                prompt = [*prompt, *completion, *added]

    started = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(at_a_time)))
    return time.perf_counter() - started


def in_batches(llm: vllm.LLM, traces: Sequence[Trace]) -> float:
    """Run one step of the batch-synchronous loop, all tools of a turn at once."""
    started = time.perf_counter()
    prompts = [trace.prompt for trace in traces]
    params = parameters()
    for turn in range(TURNS):
        outputs = llm.generate([tokens_input(p) for p in prompts], params, use_tqdm=False)
        if turn < TURNS - 1:
            time.sleep(max(pause("long-tailed") for _ in traces))
            prompts = [
                [*prompt, *output.outputs[0].token_ids, *trace.added[turn]]
                for prompt, output, trace in zip(prompts, outputs, traces, strict=True)
            ]
    return time.perf_counter() - started


class Bench:
    """Turnwise's runtime, a bare AsyncLLM and a bare LLM, measured alternately."""

    def __init__(
        self, config: Config, manager: AsyncLLMServerManager, bare: Any, blocking: vllm.LLM
    ) -> None:
        self.config, self.manager, self.bare, self.blocking = config, manager, bare, blocking
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path)

    def runner(self, at_a_time: int) -> Runner:
        rollout = self.config.rollout.model_copy(update={"concurrency": at_a_time})
        made = Runner(self.config.model_copy(update={"rollout": rollout}), self.tokenizer)
        _ = made.tool_parser
        return made

    async def clear(self) -> None:
        for engine in self.manager.engines:
            await engine.reset_prefix_cache()

    async def instant(self, trajectories: int) -> tuple[Run, Run]:
        """Measure Turnwise and the bare engine's replay."""
        problems, runner = make_problems(trajectories // GROUP, "instant"), self.runner(CONCURRENCY)
        await self.clear()
        work = asyncio.gather(*(self.group(runner, problem, "i") for problem in problems))
        groups, ours = await metered(work, trajectories)
        traces = audited(groups, trajectories)
        await self.bare.reset_prefix_cache()
        _, bare = await metered(replay(self.bare, traces, CONCURRENCY), trajectories)
        return ours, bare

    async def group(self, runner: Runner, problem: Problem, tag: str) -> Group:
        scheduler, sampling = self.manager.scheduler, self.config.sampling
        return await runner.run_group(scheduler, problem, sampling, tag)

    async def long_tailed(
        self, warm_up: int, steps: int, sync_steps: int
    ) -> tuple[float, float, float]:
        """Measure trajectories/s of Turnwise, of the loop in batches, and of the ideal."""
        prompts = self.config.rollout.prompts_per_step
        per_step, ahead = GROUP * prompts, 2 * GROUP * prompts
        runner = self.runner(ahead)
        last = warm_up + steps + 1  # its groups are in flight when the measured time ends
        training = self.config.training.model_copy(update={"steps": last})
        config = self.config.model_copy(update={"training": training})
        stream = ProblemStream(make_problems(last * prompts, "long-tailed"), 0)
        producer = GroupProducer(config, lambda p, tag: self.group(runner, p, tag), stream, trains)
        groups: list[Group] = []
        await self.clear()
        times = [time.time()]  # times at which steps have all their groups
        async with task_group() as tasks:
            producing = tasks.create_task(producer.run())
            for step in range(1, last + 1):
                groups += (await producer.next_batch()).groups
                times.append(time.time())
                await producer.advance(step)
            producing.cancel()
        traces = audited(groups, last * per_step)
        ours = rate_between(times[warm_up], times[last - 1], groups)
        self.blocking.reset_prefix_cache()
        batches = [traces[i * per_step : (i + 1) * per_step] for i in range(sync_steps)]
        sync = sum([await asyncio.to_thread(in_batches, self.blocking, b) for b in batches])
        some = traces[: sync_steps * per_step * 2]
        await self.bare.reset_prefix_cache()
        ideal = await replay(self.bare, some, ahead)
        return ours, sync_steps * per_step / sync, len(some) / ideal


def rate_between(began: float, ended: float, groups: Iterable[Group]) -> float:
    """Return trajectories/s between two times; turns count by the part that falls between them."""
    turns = 0.0
    for turn in (turn for group in groups for calls in group.calls.values() for turn in calls):
        within = min(turn.ended, ended) - max(turn.asked, began)
        turns += max(0.0, within) / (turn.ended - turn.asked)
    return turns / TURNS / (ended - began)


async def trains(group: Group) -> bool:
    """Return True: every group here can train something."""
    return True


def audited(groups: Iterable[Group], expected: int) -> list[Trace]:
    """Return the ids that the trajectories added; all must be present and exact."""
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(trajectories) == expected, [group.causes for group in groups if group.causes]
    for trajectory in trajectories:
        found = audit(trajectory)
        assert found.violations == 0, found.first_violation
        assert found.tokens_sampled == TURNS * NEW_TOKENS, found
    return [trace_of(trajectory) for trajectory in trajectories]


async def run(config: Config, quick: bool) -> list[Claim]:
    arguments = engine_arguments(config.model, config.engine, False)
    start_ray(None)
    bare = VllmEngine(config.model, config.engine, worker_extension=WORKER_EXTENSION)._llm
    arguments.pop("enable_log_requests")  # only known to the asynchronous engine
    blocking = vllm.LLM(**arguments)
    instant: list[tuple[Run, Run]] = []
    tailed: list[tuple[float, float, float]] = []
    async with make_manager(config, 0).running() as manager:
        bench = Bench(config, manager, bare, blocking)
        await bench.instant(GROUP if quick else CONCURRENCY)  # warms up
        for _ in range(1 if quick else 7):
            instant.append(await bench.instant(2 * GROUP if quick else 96))
            print("instant", *(digits(run.rate) for run in instant[-1]), flush=True)
        for _ in range(1 if quick else 2):
            tailed.append(await bench.long_tailed(*((0, 1, 1) if quick else (WARM_UP, 3, 1))))
            print("long-tailed", *map(digits, tailed[-1]), flush=True)
    bare.shutdown()
    ray.shutdown()
    ours, bares = zip(*instant, strict=True)
    ahead, sync, ideal = map(list, zip(*tailed, strict=True))
    unit, tail = "trajectories/s", "rollouts, long-tailed tools"
    bound = statistics.median(quotients(ideal, sync))
    return [
        against_bare(
            f"rollouts, instant tools, {CONCURRENCY} at a time",
            unit,
            [run.rate for run in ours],
            [run.rate for run in bares],
            at_least=0.95,
        ),
        against_bare(
            "processor time of such a trajectory",
            "ms",
            [sum(run.cpu.values()) for run in ours],
            [sum(run.cpu.values()) for run in bares],
            at_most=1.1,
            note=f"turnwise: {split(ours)}; bare: {split(bares)}",
        ),
        Claim(
            tail,
            unit,
            ahead,
            "batch-synchronous",
            sync,
            quotients(ahead, sync),
            at_least=round(0.92 * bound, 2),
            note=f"the goal is 0.92 of {digits(bound)}, which tools at no cost would give",
        ),
        Claim(
            tail, unit, ahead, "the ideal", ideal, quotients(ahead, ideal), at_least=0.92
        ),
    ]  # fmt: skip


def against_bare(
    name: str, unit: str, ours: list[float], bare: list[float], **others: Any
) -> Claim:
    return Claim(name, unit, ours, "bare engine's replay", bare, quotients(ours, bare), **others)


def split(runs: Sequence[Run]) -> str:
    """Return the median processor time of each kind of process, as text."""
    parts = {kind: statistics.median(run.cpu[kind] for run in runs) for kind in runs[0].cpu}
    return " + ".join(f"{kind} {digits(spent)}" for kind, spent in parts.items())


def main() -> None:
    """Run the benchmark and print its claims."""
    options = parser("rollouts", __doc__).parse_args()
    as_in_a_worker()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(make_model("3.3 M", Path(folder)), 2 if options.quick else 16)
        report(run_loop(run(config, options.quick)), options)


if __name__ == "__main__":
    main()
