"""The tools of `rollout.tools`, which are offered besides an environment's own.

Each entry is loaded once, when a run starts, as a source: a function that is called for each
trajectory and returns a tool, or a toolset that the trajectory opens and closes.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast, get_type_hints

import turnwise.tools
from turnwise.config import ToolConfig
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.environment import load_object
from turnwise.tools import Tool, ToolFunction, Toolset
from turnwise.tools.foreign import adopted
from turnwise.tools.tool import is_toolset, is_toolset_factory

ToolSource = Callable[[], ToolFunction | Tool | Toolset]
"""Returns a trajectory's tool or toolset; may be user code. A toolset may stay unopened."""


def load_tools(entries: Sequence[ToolConfig]) -> list[ToolSource]:
    """Return a source for each entry of `rollout.tools`.

    Raises:
        InputError: naming the entry's key, when it cannot be loaded or is no tool, or for a sandbox
            that does not work.
    """
    sources: list[ToolSource] = []
    for entry in entries:
        if entry.use is not None:
            sources.append(_used(entry.use))
        elif entry.mcp is not None:
            from turnwise.tools.mcp import McpToolset

            sources.append(partial(McpToolset, entry.mcp))
        else:
            name = "shell" if entry.python is None else "python"
            tool = getattr(turnwise.tools, name)(**getattr(entry, name).model_dump())
            try:
                tool.choose()
            except InputError as error:
                raise InputError(f"rollout.tools.{name}: {error}") from None
            sources.append(cast(ToolSource, tool.toolset))
    return sources


def _used(path: str) -> ToolSource:
    """Return the source of an object that users name."""
    used: Foreign = adopted(load_object(path, "rollout.tools.use"))
    kind = used if isinstance(used, type) else type(used)
    makes, is_set = is_toolset_factory(kind), is_toolset(kind)

    def source() -> Toolset:
        made = used if makes and not isinstance(used, type) else used()
        if not isinstance(made, type) and is_toolset_factory(made):
            made = made.toolset()
        if isinstance(made, type) or not is_toolset(made):
            raise InputError(f"rollout.tools.use: {path} made {made!r:.80}, which is no toolset")
        return made

    if isinstance(used, type):
        if is_set or makes:
            return source
    elif makes:
        return source
    elif isinstance(used, Tool) or is_set:
        return lambda: used
    elif inspect.isroutine(used):
        try:
            returned = get_type_hints(used).get("return")
        except Exception:  # a tool's description reports it
            returned = None
        makes_toolsets = is_toolset(returned) or is_toolset_factory(returned)
        return source if isinstance(returned, type) and makes_toolsets else lambda: used
    raise InputError(
        f"rollout.tools.use: {path} must be a function, a turnwise.Tool, a toolset, or a class or "
        f"function that makes a toolset, not {used!r:.80}"
    )
