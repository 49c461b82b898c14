"""Agents as anybody writes them: they know OpenAI's client and a problem, nothing of turnwise.

Run as a command, this file is one too.
"""

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

from examples.calculator.conversations import TOOL_SCHEMA
from examples.calculator.tool import calculate


async def calculator(base_url: str, problem: dict[str, Any], **sampling: Any) -> str:
    """Asks, calculates, asks again; gives up after five turns."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = [{"role": "user", "content": problem["question"]}]
        for _ in range(5):
            response = await client.chat.completions.create(
                model=model, messages=messages, tools=[TOOL_SCHEMA], **sampling
            )
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                try:
                    result = str(calculate(**json.loads(call.function.arguments)))
                except Exception as error:  # the model's mistake, for the model to read
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def cold(base_url: str, problem: dict[str, Any]) -> str:
    """Samples in its own way."""
    return await calculator(base_url, problem, temperature=0.1)


async def silent(base_url: str, problem: dict[str, Any]) -> None:
    """Answers by itself."""


if __name__ == "__main__":
    row = json.loads(os.environ["TURNWISE_PROBLEM"])
    assert row == json.loads(sys.stdin.read())
    if "fail" in sys.argv:
        sys.exit("the agent's own trouble")
    asyncio.run(calculator(os.environ["OPENAI_BASE_URL"], row))
