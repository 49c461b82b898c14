"""openai-agents as an agent's command, over Chat Completions or Responses.

    rollout.agent: .venv-agents/bin/python -m examples.agents.openai_agents responses

`stored` continues each response by `previous_response_id`; `stream` streams Chat Completions.
"""

import asyncio
import json
import sys
from typing import Any

import agents
from openai import AsyncOpenAI

from examples.calculator.tool import calculate


async def solve(question: str, way: str) -> None:
    agents.set_tracing_disabled(True)
    async with AsyncOpenAI() as client:  # OPENAI_BASE_URL is in the environment
        kinds: dict[bool, Any] = {
            True: agents.OpenAIChatCompletionsModel,
            False: agents.OpenAIResponsesModel,
        }
        model = kinds[way in ("chat", "stream")](model="any", openai_client=client)
        tool = agents.function_tool(calculate)
        agent = agents.Agent(name="calculator", tools=[tool], model=model)
        options: Any = {"max_turns": 5, "auto_previous_response_id": way == "stored"}
        try:
            if way == "stream":
                result = agents.Runner.run_streamed(agent, question, **options)
                async for _ in result.stream_events():
                    pass
            else:
                await agents.Runner.run(agent, question, **options)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError) as error:
            print(type(error).__name__)  # the model's mistake: its turns are trained all the same


if __name__ == "__main__":
    asyncio.run(solve(json.load(sys.stdin)["question"], sys.argv[1]))
