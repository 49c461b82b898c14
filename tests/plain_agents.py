"""Ordinary agents: they use OpenAI's client and a problem, and nothing of turnwise.

This file is also an agent that runs as a command.
"""

import asyncio
import json
import os
import sys
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError, OpenAI

from examples.step04_agent.agent import solve as calculator
from tests.blocking import gate


async def once(base_url: str, problem: dict[str, Any]) -> None:
    """Ask the question, and end."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        asked: Any = [{"role": "user", "content": problem["question"]}]
        await client.chat.completions.create(model="any", messages=asked)


async def moody(base_url: str, problem: dict[str, Any]) -> None:
    """Ask each question with other parameters, some of which cannot be trained exactly."""
    messages: list[Any] = [{"role": "user", "content": problem["question"]}]
    asked: list[dict[str, Any]] = [
        {"temperature": 0.3},
        {},
        {"temperature": 1.7, "top_p": 0.9},
        {"extra_body": {"top_k": 7, "min_p": 0.02}},
        {"temperature": 0.0, "response_format": {"type": "json_object"}},
        {"temperature": 0.6, "presence_penalty": 1.0},
    ]
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for own in asked:
            made = await client.chat.completions.create(model="any", messages=messages, **own)
            said = made.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]


async def team(base_url: str, problem: dict[str, Any]) -> None:
    """Let two sub-agents ask the same at once, each in its own session; then ask about it."""
    question = [{"role": "user", "content": problem["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:

        async def member(name: str) -> str:
            sub_agent = client.with_options(default_headers={"X-Session-ID": name})
            messages: list[Any] = list(question)
            for _ in range(2):
                made = await sub_agent.chat.completions.create(model="any", messages=messages)
                said = made.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": said})
                messages.append({"role": "user", "content": "Are you sure?"})
            return said

        answers = await asyncio.gather(member("first"), member("second"))
        asked: Any = [*question, {"role": "user", "content": f"Which? {answers}"}]
        await client.chat.completions.create(model="any", messages=asked)


async def endless(base_url: str, problem: dict[str, Any]) -> None:
    """Ask again and again; `problem["gives_up"]` says to end without an error when refused."""
    messages: list[Any] = [{"role": "user", "content": problem["question"]}]
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for _ in range(40):
            try:
                made = await client.chat.completions.create(model="any", messages=messages)
            except BadRequestError:
                if problem.get("gives_up"):
                    return
                raise
            said = made.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, messages[0]]


SUMMARY = "Summary: we spoke of numbers."
APOLOGY = "I am sorry, an internal error occurred."


async def storyteller(base_url: str, problem: dict[str, Any]) -> None:
    """Put words into the model's mouth: an apology after its turn, then a summary in its place."""
    question = {"role": "user", "content": problem["question"]}
    apology = {"role": "assistant", "content": APOLOGY}
    again = {"role": "user", "content": "Again?"}
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:

        async def ask(*messages: Any) -> Any:
            made = await client.chat.completions.create(model="any", messages=list(messages))
            return {"role": "assistant", "content": made.choices[0].message.content or ""}

        said = await ask(question)
        said_again = await ask(question, said, apology, again)
        await ask(question, apology, again, said_again, again)
        await ask({"role": "assistant", "content": SUMMARY}, again)


async def silent(base_url: str, problem: dict[str, Any]) -> None:
    """Answer without asking the model."""


def synchronous(base_url: str, problem: dict[str, Any]) -> None:
    """Ask once, and change the problem that was passed in."""
    with OpenAI(base_url=base_url, api_key="none") as client:
        ask_once(client, problem["question"])
    problem.clear()


async def blocking(base_url: str, problem: dict[str, Any]) -> None:
    """Block the event loop that it runs on."""
    gate().wait()


ANSWERED: list[tuple[str, int]] = []
"""Replies to `greedy` agents."""


async def greedy(base_url: str, problem: dict[str, Any]) -> None:
    """Ask once, then try to reach rewards and the sessions of others."""
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
        ask_once(OpenAI(), row["question"][:100])  # configured by the environment
    else:
        asyncio.run(calculator(os.environ["OPENAI_BASE_URL"], row))
