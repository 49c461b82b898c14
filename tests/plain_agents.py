"""Agents as anybody writes them: they know OpenAI's client and a problem, nothing of turnwise.

Run as a command, this file is one too.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

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


def synchronous(base_url: str, problem: dict[str, Any]) -> None:
    """Asks once, and spoils what it was given."""
    with OpenAI(base_url=base_url, api_key="none") as client:
        ask_once(client, problem["question"])
    problem.clear()


async def blocking(base_url: str, problem: dict[str, Any]) -> None:
    """Blocks the event loop that it runs on."""
    time.sleep(4)  # noqa: ASYNC251


ANSWERED: list[tuple[str, int]] = []
"""What `greedy` agents were answered."""


async def greedy(base_url: str, problem: dict[str, Any]) -> None:
    """Asks once, then reaches for rewards and for the sessions of others."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": problem["question"]}]
        )
    own = base_url.removesuffix("/v1")
    root = own.partition("/sessions/")[0]
    async with httpx.AsyncClient(base_url=root) as http:
        for method, url, body in (
            ("POST", f"{own}/reward", {"reward": 0.5}),
            ("POST", f"{own}/v1/reward", {"reward": 0.5}),
            ("GET", own, None),
            ("POST", "/sessions", {"id": "rollout-train.jsonl:1-0"}),
        ):
            answer = await http.request(method, url, json=body)
            ANSWERED.append((f"{method} {url.replace(own, 'OWN')}", answer.status_code))
        for listed in (await http.get("/sessions")).json()["sessions"]:
            ANSWERED.append((f"DELETE {listed['id']}", 0))
            await http.delete(f"/sessions/{listed['id']}")


def ask_once(client: OpenAI, question: str) -> None:
    model = os.environ.get("OPENAI_MODEL", "any")
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=4
    )


if __name__ == "__main__":
    row = json.loads(sys.stdin.read())
    if len(json.dumps(row)) > 65_536:
        assert "TURNWISE_PROBLEM" not in os.environ
    else:
        assert row == json.loads(os.environ["TURNWISE_PROBLEM"])
    if "fail" in sys.argv:
        sys.exit("the agent's own trouble")
    if "clean" in sys.argv:
        assert not {"TURNWISE_API_KEY", "WANDB_API_KEY", "MY_SECRET"} & os.environ.keys()
        assert os.environ["WANTED"] == "yes"
        assert os.environ["OPENAI_MODEL"] == "model"
        ask_once(OpenAI(), row["question"][:100])  # all that it needs is in the environment
    else:
        asyncio.run(calculator(os.environ["OPENAI_BASE_URL"], row))
