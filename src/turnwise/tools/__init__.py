"""Tools: what the model may call, and how it is called safely."""

from turnwise.tools.tool import AnyTool, Tool, ToolFunction, Toolset, ToolsetFactory

__all__ = ["AnyTool", "Tool", "ToolFunction", "Toolset", "ToolsetFactory"]
