"""Parsed JSON, in files, requests and tool calls: its types, and the name of a torch type in it."""

from typing import Any

JsonObject = dict[str, Any]  # a parsed JSON object; its values are checked where they are used


def dtype_name(dtype: object) -> str:
    """Return the name of a torch type, such as "bfloat16"; of a name, the same."""
    return str(dtype).removeprefix("torch.")
