"""Tool-calling rollouts of verifiers 0.4.0 against an OpenAI server; run in its own environment.

    .venv-bench/bin/python benchmarks/peers/verifiers_rollouts.py --base-url URL --problems FILE ...

Its fastest supported way: the agent's loop in this very process (`Harness.launch` allows that, as
long as every call of the model goes through the given endpoint), one interception server and one
runtime for all rollouts. The rest is verifiers' own: Agent, Rollout, Trace and its message graph,
the interception server, the client, limits, scoring. Its evaluation client keeps messages and no
token ids; its training client needs a route that an OpenAI server does not have.

Prints one line of JSON.
"""

import argparse
import asyncio
import itertools
import json
import logging
import operator
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf

__all__ = ["CalculatorTaskset", "InProcessHarness"]  # where verifiers' loaders look

PLUGIN = "verifiers_rollouts"
"""This file as verifiers' plugin id; it is imported by that name."""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TOOLS: list[dict[str, Any]] = []
ANSWER = re.compile(r"\banswer is (-?\d+)(?![.,]?\d)")


def call_tool(arguments_json: str) -> str:
    """Return the text that the model reads."""
    try:
        arguments = json.loads(arguments_json)
        operate = OPERATIONS[arguments["operation"]]
        return str(operate(int(arguments["a"]), int(arguments["b"])))
    except Exception as error:  # the model's mistake, for the model to read
        return f"error: {error}"


class ProblemData(vf.TaskData):
    answer: int


class Problem(vf.Task[ProblemData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the final message says "The answer is N." with the right N, else 0.0."""
        stated = ANSWER.findall(trace.last_reply)
        return float(len(stated) == 1 and int(stated[0]) == self.data.answer)


class CalculatorTasksetConfig(vf.TasksetConfig):
    problems: Path = Path("problems.jsonl")


class CalculatorTaskset(vf.Taskset[Problem, CalculatorTasksetConfig]):
    def load(self) -> Iterable[Problem]:
        for line in self.config.problems.read_text().splitlines():
            row = json.loads(line)
            data = ProblemData(prompt=row["question"], answer=int(row["answer"]))
            yield Problem(data, self.config.task)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop without a process of its own: tools are called directly."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: aiohttp.ClientSession
    max_turns = 0

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        url = f"{endpoint}/chat/completions"
        headers = {"Authorization": f"Bearer {secret}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        for turn in range(1, self.max_turns + 1):
            body = {"model": ctx.model, "messages": messages, "tools": TOOLS}
            async with self.http.post(url, json=body, headers=headers) as response:
                raw = await response.read()
            if response.status != 200:
                if trace.stop_condition is not None:  # a limit: the turn is refused
                    break
                raise RuntimeError(f"HTTP {response.status}: {raw[:500].decode(errors='replace')}")
            message = json.loads(raw)["choices"][0]["message"]
            if not (calls := message.get("tool_calls")) or turn == self.max_turns:
                break
            said = {"role": "assistant", "content": message["content"], "tool_calls": calls}
            messages.append(said)
            for call in calls:
                result = call_tool(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def run_all(
    agent: Any, box: Any, tasks: Iterable[vf.Task], concurrency: int
) -> list[vf.Trace]:
    """Keep `concurrency` rollouts in flight until the tasks are used up."""
    left, traces = iter(tasks), []

    async def work() -> None:
        for task in left:
            traces.append(await agent.run(task, runtime=box))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return traces


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    TOOLS.extend(json.loads(options.tools.read_text()))
    agent = vf.make_agent(
        vf.AgentConfig(
            harness={"id": PLUGIN},
            runtime=vf.SubprocessConfig(),
            model=options.model,
            client=vf.EvalClientConfig(base_url=options.base_url, api_key_var="NO_KEY"),
            sampling=vf.SamplingConfig(max_tokens=options.max_tokens, temperature=1.0),
            max_turns=options.max_turns,
        )
    )
    taskset = vf.load_taskset(CalculatorTasksetConfig(id=PLUGIN, problems=options.problems))
    tasks = itertools.cycle(list(taskset))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        InProcessHarness.http, InProcessHarness.max_turns = http, options.max_turns
        async with agent, agent.provision() as box:
            warm = itertools.islice(tasks, options.warmup)
            await run_all(agent, box, warm, options.concurrency)
            some = list(itertools.islice(tasks, options.rollouts))
            started = time.perf_counter()
            traces = await run_all(agent, box, some, options.concurrency)
            seconds = time.perf_counter() - started
    errors = [trace.last_error for trace in traces if not trace.ok]
    failures = [f"{e.type}: {e.message}" if e else "no reason given" for e in errors]
    return {
        "rollouts_per_s": (len(traces) - len(failures)) / seconds,
        "turns": sum(trace.num_turns for trace in traces),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--problems", required=True, type=Path)
    parser.add_argument("--tools", required=True, type=Path, help="JSON: their schemas")
    parser.add_argument("--rollouts", required=True, type=int)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=128)
    logging.basicConfig(level=logging.ERROR)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    # verifiers imports this file by its plugin id: be that module rather than a second copy.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from verifiers_rollouts import main as main_of_plugin  # type: ignore[import-not-found]

    main_of_plugin()
