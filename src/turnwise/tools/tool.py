"""Tools as users write them: functions, `Tool` objects, and toolsets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from turnwise.core.json_types import JsonObject
from turnwise.errors import TurnwiseError

ToolFunction = Callable[..., object]
"""A function that the model may call, sync or async, with type hints. It returns a text, a value
that JSON can hold, or images: a PIL image, or a list of images, texts and parts of a message."""


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
    """Function of the arguments, sync or async. It may return the same values as a
    `ToolFunction`."""
    in_order: bool = False
    """Run its calls one after another, in the order in which the model wrote them, instead of
    together. All tools of a trajectory with this option share one order."""
    hidden: bool = False
    """Leave it out of the descriptions that the chat template shows, because the environment
    describes it to the model later."""


class McpError(TurnwiseError):
    """Failure of an MCP server, or an error that its tool returned."""


class Toolset(Protocol):
    """Tools that are opened with an environment and closed with it, such as an MCP server's."""

    async def open(self) -> Sequence[Tool]:
        """Start the tools' connections or processes, and return the tools."""
        ...

    async def close(self) -> None:
        """Stop everything that `open` started; called once, also after a failed `open`."""
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
"""A tool in any form. A mapping is a description in OpenAI's format; the environment's `call_tool`
answers its calls."""


def is_toolset(tool: object) -> TypeGuard[Toolset]:
    """Return whether an object, or the instances of a class, are toolsets."""
    return all(callable(getattr(tool, name, None)) for name in ("open", "close"))


def is_toolset_factory(tool: object) -> TypeGuard[ToolsetFactory]:
    """Return whether an object, or the instances of a class, make toolsets."""
    return callable(getattr(tool, "toolset", None))
