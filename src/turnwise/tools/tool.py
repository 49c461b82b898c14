"""Tools as users write them: functions, `Tool` objects, and toolsets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from turnwise.core.json_types import JsonObject
from turnwise.errors import TurnwiseError

ToolFunction = Callable[..., object]
"""A function that the model may call, sync or async, with type hints. It returns a text, a value
that JSON holds, or images: a PIL image, or a list of images, texts and parts of a message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with its own JSON schema, where a function's type hints cannot describe it.

    Example:
        Tool(
            name="search",
            description="Search the catalogue.",
            parameters={
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
            call=lambda arguments: catalogue.search(arguments["query"]),
        )
    """

    name: str
    description: str
    parameters: JsonObject
    """JSON schema of the arguments, of type object."""
    call: Callable[[JsonObject], object]
    """Function of the arguments, sync or async, which returns what a `ToolFunction` does."""
    in_order: bool = False
    """Run its calls one after another, as the model wrote them, instead of together; also those of
    a trajectory's other tools with this."""
    hidden: bool = False
    """Leave it out of the descriptions that the chat template shows: the environment tells the
    model of it later."""


class McpError(TurnwiseError):
    """An MCP server that failed, or the error that its tool returned."""


class Toolset(Protocol):
    """Tools that are opened with an environment and closed with it, such as an MCP server's."""

    async def open(self) -> Sequence[Tool]:
        """Start what the tools need, and return them."""
        ...

    async def close(self) -> None:
        """Stop it; called once, also after a failed `open`."""
        ...


class ToolsetFactory(Protocol):
    """An object, shared by trajectories, that makes a toolset for each of them."""

    def toolset(self) -> Toolset:
        """Return a toolset that is not open yet."""
        ...


class ForeignTool(Protocol):
    """A tool of openai-agents, pydantic-ai, LangChain or smolagents, which is taken as it is."""

    @property
    def name(self) -> str: ...


AnyTool = ToolFunction | Tool | Toolset | ToolsetFactory | ForeignTool | Mapping[str, Any]
"""A tool in any form; a mapping is a description in OpenAI's format, answered by
the environment's `call_tool`."""


def is_toolset(tool: object) -> TypeGuard[Toolset]:
    """Return whether an object, or the instances of a class, are toolsets."""
    return all(callable(getattr(tool, name, None)) for name in ("open", "close"))


def is_toolset_factory(tool: object) -> TypeGuard[ToolsetFactory]:
    """Return whether an object, or the instances of a class, make toolsets."""
    return callable(getattr(tool, "toolset", None))
