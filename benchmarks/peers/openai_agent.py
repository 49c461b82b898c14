"""An ordinary agent with OpenAI's client, run many times in parallel; prints JSON.

    python -m benchmarks.peers.openai_agent --base-url URL/v1 --problems FILE --rollouts N ...

It only has a base URL; each rollout uses that of its own session, unless `--plain` says that the
server has none.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from benchmarks.agentic import Answer
from examples.calculator.tool import TOOL_SCHEMA, calculate


async def answer(
    client: AsyncOpenAI, messages: list[Any], options: argparse.Namespace
) -> ChatCompletionMessage:
    """Ask for one answer, streamed or not."""
    request: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "tools": [TOOL_SCHEMA],
        "max_tokens": options.max_tokens,
        "temperature": 1.0,
    }
    if not options.stream:
        response = await client.chat.completions.create(**request)
        message: ChatCompletionMessage = response.choices[0].message
        return message
    pieces = Answer()
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            pieces.add(choice.delta.model_dump(exclude_none=True))
    return ChatCompletionMessage.model_validate(pieces.message())


async def solve(client: AsyncOpenAI, question: str, options: argparse.Namespace) -> int:
    """Run one rollout; returns its turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    turns = 0
    while turns < options.max_turns:
        turns += 1
        message = await answer(client, messages, options)
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            try:
                result = str(calculate(**json.loads(call.function.arguments)))
            except Exception as error:  # the model's mistake, for the model to read
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return turns


async def run_all(
    client: AsyncOpenAI, questions: Iterable[str], options: argparse.Namespace
) -> dict[str, int]:
    """Run all rollouts; returns the turns of each, by session."""
    left, numbers, tag = iter(questions), itertools.count(), f"{random.getrandbits(60):x}"
    root = options.base_url.removesuffix("/v1")
    turns: dict[str, int] = {}

    async def work() -> None:
        for question in left:
            name = f"{tag}-{next(numbers)}"
            own = f"{root}/sessions/{name}/v1"
            turns[name] = await solve(
                client if options.plain else client.with_options(base_url=own), question, options
            )

    await asyncio.gather(*(work() for _ in range(options.concurrency)))
    return turns


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = [json.loads(line) for line in options.problems.read_text().splitlines()]
    random.Random(options.seed).shuffle(rows)
    questions = itertools.cycle(row["question"] for row in rows)
    cpu = -time.process_time()
    async with AsyncOpenAI(base_url=options.base_url, api_key="none") as client:
        await run_all(client, itertools.islice(questions, options.warmup), options)
        some = list(itertools.islice(questions, options.rollouts))
        started = time.perf_counter()
        turns = await run_all(client, some, options)
        seconds = time.perf_counter() - started
    cpu += time.process_time()
    return {
        "rollouts_per_s": len(turns) / seconds,
        "seconds": seconds,
        "turns": sum(turns.values()),
        "cpu_seconds": cpu,
        "sessions": sorted(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--problems", required=True, type=Path)
    parser.add_argument("--rollouts", required=True, type=int)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=128)
    parser.add_argument("--seed", type=int, help="of the problems' order; default: any")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--plain", action="store_true", help="a server without sessions")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
