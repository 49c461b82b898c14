"""Agents against a running server, and the audit of the trajectories that they made there.

    turnwise serve examples/calculator/config.yaml
    python -m tests.served http://127.0.0.1:8000

Each kind of client has conversations about held-out problems: OpenAI's client, asynchronous,
synchronous and streaming, and openai-agents over Chat Completions and Responses. Every trajectory
that the server then returns must audit as exact, in one branch.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agents
import httpx
from openai import AsyncOpenAI, OpenAI

from examples.calculator.tool import TOOL_SCHEMA, calculate
from tests.plain_agents import calculator
from turnwise.trajectory import Trajectory, audit

HELDOUT = Path("examples/calculator/build/heldout.jsonl")
PROBLEMS = 16


def with_results(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message and the results of its tool calls."""
    messages = [message]
    for call in message.get("tool_calls") or []:
        try:
            result = str(calculate(**json.loads(call["function"]["arguments"])))
        except Exception as error:  # the model's mistake, for the model to read
            result = f"error: {error}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


async def asynchronous(base_url: str, row: dict[str, Any]) -> str:
    return await calculator(base_url, row, temperature=0)


async def synchronous(base_url: str, row: dict[str, Any]) -> str:
    def use() -> str:
        with OpenAI(base_url=base_url, api_key="none") as client:
            messages: list[Any] = [{"role": "user", "content": row["question"]}]
            model = client.models.list().data[0].id
            for _ in range(5):
                made = client.chat.completions.create(
                    model=model, messages=messages, tools=[TOOL_SCHEMA], temperature=0
                )
                message = made.choices[0].message
                messages += with_results(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return message.content or ""
        return ""

    return await asyncio.to_thread(use)


async def streaming(base_url: str, row: dict[str, Any]) -> str:
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": row["question"]}]
        model = (await client.models.list()).data[0].id
        for _ in range(5):
            content, calls = "", dict[int, dict[str, Any]]()
            stream = await client.chat.completions.create(
                model=model, messages=messages, tools=[TOOL_SCHEMA], temperature=0, stream=True
            )
            async for chunk in stream:
                delta = chunk.choices[0].delta if chunk.choices else None
                content += (delta.content or "") if delta else ""
                for part in (delta.tool_calls or []) if delta else []:
                    new = {"type": "function", "function": {"name": "", "arguments": ""}}
                    call = calls.setdefault(part.index, {"id": part.id, **new})
                    call["function"]["name"] += (part.function and part.function.name) or ""
                    text = (part.function and part.function.arguments) or ""
                    call["function"]["arguments"] += text
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                message["tool_calls"] = list(calls.values())
            messages += with_results(message)
            if not calls:
                return content
    return ""


def by_agents(kind: Any) -> Callable[[str, dict[str, Any]], Awaitable[str]]:
    """Hold a conversation with openai-agents, by one of its models."""

    async def run(base_url: str, row: dict[str, Any]) -> str:
        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            model = (await client.models.list()).data[0].id
            agent = agents.Agent(
                name="calculator",
                tools=[agents.function_tool(calculate)],
                model=kind(model=model, openai_client=client),
                model_settings=agents.ModelSettings(temperature=0),
            )
            try:
                result = await agents.Runner.run(agent, row["question"], max_turns=5)
            except (agents.MaxTurnsExceeded, agents.ModelBehaviorError) as error:
                return type(error).__name__
            return str(result.final_output)

    return run


async def main(root: str, rows: list[dict[str, Any]]) -> int:
    kinds = {
        "openai, async": asynchronous,
        "openai, sync": synchronous,
        "openai, streaming": streaming,
        "openai-agents, chat": by_agents(agents.OpenAIChatCompletionsModel),
        "openai-agents, responses": by_agents(agents.OpenAIResponsesModel),
    }
    bad = 0
    async with httpx.AsyncClient(base_url=root, timeout=60) as http:
        for kind, ask in kinds.items():
            names = [f"served-{kind.replace(', ', '-')}-{index}" for index in range(len(rows))]
            answers = await asyncio.gather(
                *(
                    ask(f"{root}/sessions/{name}/v1", row)
                    for name, row in zip(names, rows, strict=True)
                )
            )
            replies = [(await http.delete(f"/sessions/{name}")).json() for name in names]
            made = [Trajectory.from_json(json.dumps(t["trajectory"])) for t in replies]
            right = sum(str(row["answer"]) in said for row, said in zip(rows, answers, strict=True))
            wrong = [t for t in made if audit(t).first_violation or len(t.branches()) != 1]
            bad += len(wrong)
            sys.stdout.write(
                f"{kind}: {len(made)} conversations, {sum(len(t.turns) for t in made)} turns, "
                f"{right} right, {len(made) - len(wrong)} exact in one branch\n"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    problems = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:PROBLEMS]]
    sys.exit(asyncio.run(main(sys.argv[1].rstrip("/").removesuffix("/v1"), problems)))
