"""The tools of `rollout.tools`: each entry becomes a `ToolSource`, a function that returns the tool
or toolset for one trajectory."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import cast, get_type_hints

import turnwise.tools
from turnwise.config import ToolConfig
from turnwise.core.optional import Foreign, load_object
from turnwise.errors import InputError
from turnwise.rollouts.episode import ToolSource
from turnwise.tools import Tool, Toolset
from turnwise.tools.foreign import adopted
from turnwise.tools.tool import is_toolset, is_toolset_factory


def load_tools(entries: Sequence[ToolConfig]) -> list[ToolSource]:
    """Return a source for each entry of `rollout.tools`; an entry is loaded once, when a run
    starts."""
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
    used: Foreign = adopted(load_object(path, "rollout.tools.use"))
    kind = used if isinstance(used, type) else type(used)
    makes, is_set, routine = is_toolset_factory(kind), is_toolset(kind), inspect.isroutine(used)

    def source() -> Toolset:
        made = used if makes and not isinstance(used, type) else used()
        if not isinstance(made, type) and is_toolset_factory(made):
            made = made.toolset()
        if isinstance(made, type) or not is_toolset(made):
            raise InputError(f"rollout.tools.use: {path} made {made!r:.80}, which is no toolset")
        return made

    returned = None
    if routine:
        with suppress(Exception):  # a tool's description reports it
            returned = get_type_hints(used).get("return")
    if isinstance(returned, type) and (is_toolset(returned) or is_toolset_factory(returned)):
        return source
    if makes or (is_set and isinstance(used, type)):
        return source
    if is_set or routine or isinstance(used, Tool):
        return lambda: used
    raise InputError(
        f"rollout.tools.use: {path} must be a function, a turnwise.Tool, a toolset, or a class or "
        f"function that makes a toolset, not {used!r:.80}"
    )
