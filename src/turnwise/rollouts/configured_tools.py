"""The tools of `rollout.tools`, which are offered beside an environment's own.

Each entry is loaded once, when a run starts, as a source: a function that is called for each
trajectory and returns a tool, or a toolset that the trajectory opens and closes.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_type_hints

import turnwise.tools
from turnwise.config import ToolConfig
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
        InputError: naming the entry's key, when it cannot be loaded or is no tool.
    """
    return [_load(entry) for entry in entries]


def _load(entry: ToolConfig) -> ToolSource:
    if entry.use is not None:
        return _used(entry.use)
    if entry.mcp is not None:
        from turnwise.tools.mcp import MCPServer

        return MCPServer.configured(entry.mcp).toolset
    return _code(entry)


def _code(entry: ToolConfig) -> ToolSource:
    """Return the source of a sandboxed tool; no run starts without a sandbox that works."""
    name: Literal["python", "shell"] = "shell" if entry.python is None else "python"
    limits = entry.shell if entry.python is None else entry.python
    assert limits is not None
    tool = getattr(turnwise.tools, name)(**limits.model_dump())
    try:
        tool.choose()
    except InputError as error:
        raise InputError(f"rollout.tools.{name}: {error}") from None
    return cast(ToolSource, tool.toolset)


def _used(path: str) -> ToolSource:
    """Return the source of an object that users name."""
    used: Any = adopted(load_object(path, "rollout.tools.use"))
    kind = used if isinstance(used, type) else type(used)
    makes, is_set = is_toolset_factory(kind), is_toolset(kind)
    if isinstance(used, type):
        if is_set or makes:
            return _maker(used, path)
    elif makes:
        return _maker(lambda: used, path)
    elif isinstance(used, Tool) or is_set:
        return lambda: used
    elif inspect.isroutine(used):
        return _maker(used, path) if _makes_toolsets(used) else lambda: used
    raise InputError(
        f"rollout.tools.use: {path} must be a function, a turnwise.Tool, a toolset, or a class or "
        f"function that makes a toolset, not {used!r:.80}"
    )


def _maker(make: Callable[[], object], path: str) -> ToolSource:
    """Return the source of toolsets that a class or function makes."""

    def source() -> Toolset:
        made = make()
        if not isinstance(made, type) and is_toolset_factory(made):
            made = made.toolset()
        if isinstance(made, type) or not is_toolset(made):
            raise InputError(f"rollout.tools.use: {path} made {made!r:.80}, which is no toolset")
        return made

    return source


def _makes_toolsets(function: Callable[..., object]) -> bool:
    """Return whether a function's return type is a toolset's, or that of an object making one."""
    try:
        kind = get_type_hints(function).get("return")
    except Exception:  # a tool's description reports it
        return False
    return isinstance(kind, type) and (is_toolset(kind) or is_toolset_factory(kind))
