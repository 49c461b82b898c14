"""Tools as users write them: functions, `Tool` objects, and toolsets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from turnwise.core.json_types import JsonObject
from turnwise.errors import TurnwiseError

ToolFunction = Callable[..., object]
"""A function with type hints, sync or async, that the model may call. It returns a text, a value
that JSON can hold, a PIL image, or a list of images, texts and parts of a message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with its own JSON schema, for arguments that type hints cannot describe.

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
    """Function, sync or async, that gets the arguments. It may return the same values as a
    `ToolFunction`."""
    in_order: bool = False
    """Run the tool's calls one after another, in the order in which the model wrote them, instead
    of concurrently. All tools of a trajectory that have this option share one order."""
    hidden: bool = False
    """Leave the tool out of the descriptions that the chat template shows, because the environment
    describes it to the model later."""


class McpError(TurnwiseError):
    """Failure of an MCP server, or an error that its tool returned."""


class Toolset(Protocol):
    """Tools that are opened with an environment and closed with it, such as an MCP server's."""

    async def open(self) -> Sequence[Tool]:
        """Start the tools' connections or processes, and return the tools."""
        ...

    async def close(self) -> None:
        """Stop everything that `open` started; called once, even if `open` failed."""
        ...


class ToolsetFactory(Protocol):
    """An object, shared by trajectories, that makes a toolset for each of them."""

    def toolset(self) -> Toolset:
        """Return a toolset that is not open yet."""
        ...


class ForeignTool(Protocol):
    """A tool of openai-agents, pydantic-ai, LangChain or smolagents; it needs no changes."""

    @property
    def name(self) -> str: ...


AnyTool = ToolFunction | Tool | Toolset | ToolsetFactory | ForeignTool | Mapping[str, Any]
"""A tool in any form. A mapping describes a tool in OpenAI's format, whose calls the environment's
`call_tool` answers."""


def is_toolset(tool: object) -> TypeGuard[Toolset]:
    """Return whether an object is a toolset, or a class whose instances are toolsets."""
    return all(callable(getattr(tool, name, None)) for name in ("open", "close"))


def is_toolset_factory(tool: object) -> TypeGuard[ToolsetFactory]:
    """Return whether an object is a toolset factory, or a class whose instances are factories."""
    return callable(getattr(tool, "toolset", None))
