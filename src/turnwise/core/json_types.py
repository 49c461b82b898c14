"""Types of parsed JSON: the contents of files, requests and tool calls."""

from typing import Any

JsonObject = dict[str, Any]  # a parsed JSON object; its values are checked where they are used
