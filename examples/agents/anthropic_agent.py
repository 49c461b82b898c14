"""An agent on Anthropic's SDK as a command.

    rollout.agent: .venv-agents/bin/python -m examples.agents.anthropic_agent whole

`stream` streams the messages.
"""

import json
import os
import sys
from typing import Any

from anthropic import Anthropic

from examples.calculator.tool import calculate

NUMBER = {"type": "integer"}
TOOL: Any = {
    "name": "calculate",
    "description": "Calculates a + b, a - b or a * b.",
    "input_schema": {
        "type": "object",
        "properties": {
            "a": NUMBER,
            "operation": {"type": "string", "enum": ["+", "-", "*"]},
            "b": NUMBER,
        },
        "required": ["a", "operation", "b"],
    },
}


def solve(question: str, stream: bool) -> None:
    base_url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")  # the client adds it
    messages: list[Any] = [{"role": "user", "content": question}]
    with Anthropic(base_url=base_url, api_key="none") as client:
        for _ in range(5):
            asked: Any = {"model": "any", "max_tokens": 64, "messages": messages, "tools": [TOOL]}
            try:
                if stream:
                    with client.messages.stream(**asked) as events:
                        answer = events.get_final_message()
                else:
                    answer = client.messages.create(**asked)
            except ValueError as error:  # a call whose arguments are not JSON
                print(error)
                return
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return
            messages.append({"role": "user", "content": [result(call) for call in calls]})


def result(call: Any) -> dict[str, Any]:
    """Return the block that answers a call."""
    try:
        text, failed = str(calculate(**call.input)), False
    except Exception as error:  # the model's mistake, for the model to read
        text, failed = f"error: {error}", True
    return {"type": "tool_result", "tool_use_id": call.id, "content": text, "is_error": failed}


if __name__ == "__main__":
    solve(json.load(sys.stdin)["question"], sys.argv[1] == "stream")
