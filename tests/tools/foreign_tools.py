"""Calls tools of openai-agents, pydantic-ai, LangChain and smolagents, and prints what came of it.

Run in an environment that has these packages (`make agents`).
"""

import asyncio
import enum
import json
import sys
from typing import Any, ClassVar

import agents
import pydantic_ai
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as langchain_tool
from pydantic import BaseModel
from smolagents import Tool as SmolTool
from smolagents import tool as smol_tool

from turnwise.tools.foreign import adopted
from turnwise.tools.toolbox import Toolbox


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Item(BaseModel):
    name: str
    color: Color = Color.RED


class Shop:
    """The environment, which tools find as their context."""

    owner = "Ada"


@agents.function_tool
def openai_order(ctx: agents.RunContextWrapper[Shop], items: list[Item], note: str) -> str:
    """Order something.

    Args:
        items: What to order.
        note: For the driver.
    """
    return f"{ctx.context.owner} sends {items!r}, {note}"


@agents.function_tool
async def openai_wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


def pydantic_order(ctx: pydantic_ai.RunContext[Shop], items: list[Item], note: str = "soon") -> str:
    """Order something.

    Args:
        items: What to order.
    """
    return f"{ctx.deps.owner} sends {items!r}, {note}"


async def pydantic_first(items: list[Item]) -> Item:
    """Return the first."""
    return items[0]


def pydantic_retry(number: int) -> int:
    """Refuse any number."""
    raise pydantic_ai.ModelRetry("another number, please")


@langchain_tool
def langchain_order(items: list[Item], note: str = "soon") -> str:
    """Order something."""
    return f"{items!r}, {note}"


@langchain_tool(parse_docstring=True)
async def langchain_count(items: list[Item]) -> int:
    """Count them.

    Args:
        items: What to count.
    """
    return len(items)


class Adder(BaseTool):
    name: str = "langchain_add"
    description: str = "Add two numbers."

    def _run(self, a: int, b: int = 2) -> int:
        return a + b


@smol_tool
def smol_weather(city: str, days: int = 2) -> str:
    """Tell the weather.

    Args:
        city: Where.
        days: For how long.
    """
    return f"{city}: rain for {days} days"


class Shout(SmolTool):
    name = "smol_shout"
    description = "Say it loudly."
    inputs: ClassVar[Any] = {"text": {"type": "string", "description": "What to say."}}
    output_type = "string"

    def setup(self) -> None:
        self.mark = "!"
        super().setup()

    def forward(self, text: str) -> str:
        return text.upper() + self.mark


TOOLS: list[Any] = [
    openai_order,
    openai_wait,
    pydantic_order,
    pydantic_ai.Tool(pydantic_first),
    pydantic_ai.Tool(pydantic_retry, sequential=True),
    langchain_order,
    langchain_count,
    Adder(),
    smol_weather,
    Shout(),
]
ITEMS = {"items": [{"name": "tea", "color": "green"}]}
CALLS: list[tuple[str, dict[str, object]]] = [
    ("openai_order", {**ITEMS, "note": "now"}),
    ("openai_order", {"items": [{"name": 3, "color": "red"}], "note": "now"}),
    ("openai_wait", {"seconds": 60}),
    ("pydantic_order", ITEMS),
    ("pydantic_order", {"items": [{"name": 3}]}),
    ("pydantic_first", ITEMS),
    ("pydantic_retry", {"number": 1}),
    ("langchain_order", ITEMS),
    ("langchain_order", {"items": 3}),
    ("langchain_count", ITEMS),
    ("langchain_add", {"a": 3}),
    ("smol_weather", {"city": "Oslo"}),
    ("smol_weather", {"city": 3}),
    ("smol_shout", {"text": "hi"}),
]


async def main() -> None:
    shop = Shop()
    box = Toolbox([adopted(tool, shop) for tool in TOOLS], timeout=5.0, max_chars=500)
    results = [await box.call(name, json.dumps(arguments)) for name, arguments in CALLS]
    said = [(result.outcome, result.text) for result in results]
    sys.stdout.write(json.dumps({"schemas": box.schemas, "results": said}) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
