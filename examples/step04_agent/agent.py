"""An agent that knows OpenAI's client and a problem, and nothing of turnwise.

The server at the base URL records its calls: exact token ids, log-probs and weight versions.
"""

import json
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from examples.calculator.tool import TOOL_SCHEMA, calculate

CERTIFICATES = ssl.create_default_context()
"""Read once, because reading it takes longer than all other work of making a client."""


async def solve(base_url: str, problem: dict[str, Any], **sampling: Any) -> str:
    """Ask, calculate, ask again; give up after five turns."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key="none", http_client=http) as client:
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
                assert call.type == "function"
                try:
                    result = str(calculate(**json.loads(call.function.arguments)))
                except Exception as error:  # the model's mistake, for the model to read
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
