"""A pydantic-ai agent as a command, with the settings that the framework has by default.

    rollout.agent: .venv-agents/bin/python -m examples.agents.pydantic_agent text

`typed` asks for a number: a tool's call is then required, with a strict schema.
"""

import json
import os
import sys
from typing import Any

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.calculator.tool import calculate


def solve(question: str, way: str) -> None:
    provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    settings: Any = {"temperature": 0.9, "parallel_tool_calls": False}
    agent: Any = Agent(
        OpenAIChatModel("any", provider=provider),
        output_type=int if way == "typed" else str,
        tools=[calculate],
        model_settings=settings,
    )
    try:
        agent.run_sync(question, usage_limits=UsageLimits(request_limit=5))
    except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
        print(type(error).__name__)  # the model's mistake: its turns are trained all the same


if __name__ == "__main__":
    solve(json.load(sys.stdin)["question"], sys.argv[1])
