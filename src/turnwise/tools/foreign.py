"""Conversion of tools of openai-agents, pydantic-ai, LangChain and smolagents.

Tools are recognised by their attributes, and described by their own packages, so that the prompt is
the same as in these frameworks. A package is imported only if a tool comes from it.
"""

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import get_origin, get_type_hints
from uuid import uuid4

from pydantic import ValidationError

from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.tools.schema import ArgumentsError, describe_mistakes
from turnwise.tools.tool import Tool


def adopted(tool: Foreign, context: object = None) -> Foreign:
    """Convert a tool of one of these frameworks to a `Tool`; return any other object unchanged.

    Args:
        context: Object that the tool finds as `context` in the run context of openai-agents, or as
            `deps` in the run context of pydantic-ai.
    """
    if isinstance(tool, type | Tool):
        return tool
    if inspect.isroutine(tool):
        hint: Foreign = None
        if "pydantic_ai" in sys.modules:
            with suppress(Exception):  # without readable hints it is an ordinary function
                first = next(iter(inspect.signature(tool).parameters))
                hint = get_type_hints(tool)[first]
        # A function whose first argument is pydantic-ai's `RunContext` is a tool of pydantic-ai.
        if hint is None:
            return tool
        package = import_module("pydantic_ai")
        if hint is not package.RunContext and get_origin(hint) is not package.RunContext:
            return tool
        tool = package.Tool(tool)
    for attributes, adopt in _FRAMEWORKS.items():
        if all(hasattr(tool, name) for name in attributes):
            return adopt(tool, context)
    return tool


def _from_openai_agents(tool: Foreign, context: object) -> Tool:
    def call(arguments: JsonObject) -> object:
        text = json.dumps(arguments)
        kind = import_module("agents.tool_context").ToolContext
        given = kind(
            context=context,
            tool_name=tool.name,
            tool_call_id=f"call_{uuid4().hex}",
            tool_arguments=text,
        )
        return tool.on_invoke_tool(given, text)

    return Tool(tool.name, tool.description, tool.params_json_schema, call)


def _from_pydantic_ai(tool: Foreign, context: object) -> Tool:
    schema = tool.function_schema

    def call(arguments: JsonObject) -> object:
        text = json.dumps(arguments)
        try:
            values = schema.validator.validate_json(text)
        except ValidationError as error:
            raise ArgumentsError(describe_mistakes(error, text)) from None
        package = import_module("pydantic_ai")
        given = package.RunContext(
            deps=context,
            model=None,  # there is no agent
            usage=package.RunUsage(),
            tool_name=tool.name,
            tool_call_id=f"call_{uuid4().hex}",
        )
        return schema.call(values, given)

    description = tool.description or ""
    return Tool(tool.name, description, schema.json_schema, call, in_order=tool.sequential)


def _from_langchain(tool: Foreign, _: object) -> Tool:
    calling = import_module("langchain_core.utils.function_calling")
    function = calling.convert_to_openai_tool(tool)["function"]
    plain = getattr(tool, "func", None) is not None and getattr(tool, "coroutine", None) is None
    call = tool.invoke if plain else tool.ainvoke
    return Tool(tool.name, tool.description, function["parameters"], call)


def _from_smolagents(tool: Foreign, _: object) -> Tool:
    function = import_module("smolagents.models").get_tool_json_schema(tool)["function"]
    return Tool(tool.name, tool.description, function["parameters"], lambda given: tool(**given))


_FRAMEWORKS: dict[tuple[str, ...], Callable[[Foreign, object], Tool]] = {
    ("name", "params_json_schema", "on_invoke_tool"): _from_openai_agents,
    ("name", "function_schema", "takes_ctx"): _from_pydantic_ai,
    ("name", "args_schema", "ainvoke"): _from_langchain,
    ("name", "inputs", "output_type", "forward"): _from_smolagents,
}
"""The attributes by which each framework's tools are recognised, and the function that converts
these tools."""
