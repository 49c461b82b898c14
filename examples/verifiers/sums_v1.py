"""A taskset and a harness of verifiers 0.4: sums, and a chat loop with a calculator."""

import json
import random
import re
from collections.abc import Iterable

import aiohttp
import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]  # where verifiers' loaders look

NUMBER = {"type": "integer"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculates a + b, a - b or a * b.",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "operation": {"type": "string"}, "b": NUMBER},
            "required": ["a", "operation", "b"],
        },
    },
}


class SumData(vf.TaskData):
    answer: int


class Sum(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last number of the last answer is the sum."""
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    count: int = 16
    seed: int = 0


class SumsTaskset(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterable[Sum]:
        draw = random.Random(self.config.seed)
        for _ in range(self.config.count):
            a, b, c = (draw.randrange(10, 1000) for _ in range(3))
            prompt = f"Start with {a}, add {b}, add {c}. What is the result?"
            data = SumData(prompt=prompt, answer=a + b + c)
            yield Sum(data, self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, runs its calls, and asks again, until it calls nothing."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

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
        messages: list[dict[str, object]] = [{"role": "user", "content": data.prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": [TOOL]}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200 and trace.stop_condition is not None:
                        break  # a limit of the agent, such as max_turns
                    response.raise_for_status()
                    message = (await response.json())["choices"][0]["message"]
                calls = message.get("tool_calls")
                if not calls:
                    break
                messages.append(message)
                for call in calls:
                    result = calculate(call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def calculate(arguments_json: str) -> str:
    """Return a call's result, or its mistake, for the model to read."""
    try:
        given = json.loads(arguments_json)
        a, b = int(given["a"]), int(given["b"])
        return str({"+": a + b, "-": a - b, "*": a * b}[given["operation"]])
    except Exception as error:
        return f"error: {error}"
