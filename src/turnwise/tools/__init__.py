"""Tools that the model may call, and the code that calls them safely."""

import importlib
from typing import TYPE_CHECKING

from turnwise.tools.tool import AnyTool, Tool, ToolFunction, Toolset, ToolsetFactory

if TYPE_CHECKING:
    from turnwise.tools.code import python, shell

__all__ = ["AnyTool", "Tool", "ToolFunction", "Toolset", "ToolsetFactory", "python", "shell"]


def __getattr__(name: str) -> object:
    """Import a ready-made tool on first use."""
    if name in ("python", "shell"):
        return getattr(importlib.import_module("turnwise.tools.code"), name)
    raise AttributeError(f"module 'turnwise.tools' has no attribute {name!r}")
