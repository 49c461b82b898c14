"""Requests of agents and frameworks, with the keys that their clients send unasked.

Each is what one of them sends with a small task, without its ids, times and long texts.
"""

from typing import Any

from examples.calculator.tool import TOOL_SCHEMA

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARAMETERS = TOOL_SCHEMA["function"]["parameters"]
QUESTION = "What is 12 plus 30?"
USER = {"role": "user", "content": QUESTION}
STRICT: dict[str, Any] = {**TOOL_SCHEMA, "function": {**TOOL_SCHEMA["function"], "strict": True}}
FLAT: dict[str, Any] = {"type": "function", **TOOL_SCHEMA["function"]}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
CACHED = {"type": "ephemeral"}

SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Claude Code": (
        MESSAGES,
        {
            "model": "claude-sonnet-5",
            "max_tokens": 32_000,
            "temperature": 1,
            "stream": True,
            "metadata": {"user_id": "user_0_account__session_0"},
            "system": [
                {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
                {"type": "text", "text": "Use the tools.", "cache_control": CACHED},
            ],
            "thinking": {"type": "enabled", "budget_tokens": 31_999},
            "tools": [
                {"name": "calculate", "description": "Compute.", "input_schema": PARAMETERS},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>Today</system-reminder>"},
                        {"type": "text", "text": QUESTION, "cache_control": CACHED},
                    ],
                }
            ],
        },
        {"override_thinking_token_budget": 1, "own_sampling": 1},
    ),
    "Codex": (
        RESPONSES,
        {
            "model": "gpt-5-codex",
            "instructions": "You are a coding agent.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": QUESTION}],
                }
            ],
            "tools": [{**FLAT, "strict": True}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0",
        },
        {"own_grammar": 1, "override_parallel_tool_calls": 1},
    ),
    "openai-agents": (
        RESPONSES,
        {
            "model": "gpt-5",
            "instructions": "Use the tool.",
            "input": [USER],
            "include": [],
            "temperature": 0.7,
            "top_p": 0.95,
            "tools": [{**FLAT, "strict": True}],
            "tool_choice": "required",
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "final_output",
                    "schema": ANSWER,
                    "strict": True,
                }
            },
        },
        {
            "own_grammar": 1,
            "own_sampling": 1,
        },
    ),
    "pydantic-ai": (
        CHAT,
        {
            "model": "gpt-5",
            "stream": False,
            "messages": [{"role": "system", "content": "Use the tools."}, USER],
            "temperature": 0.2,
            "parallel_tool_calls": False,
            "tool_choice": "required",
            "tools": [
                STRICT,
                {
                    "type": "function",
                    "function": {
                        "name": "final_result",
                        "description": "The final response which ends this conversation",
                        "parameters": ANSWER,
                        "strict": True,
                    },
                },
            ],
        },
        {
            "own_grammar": 1,
            "override_parallel_tool_calls": 1,
            "own_sampling": 1,
        },
    ),
    "dspy": (
        CHAT,
        {
            "model": "any",
            "messages": [{"role": "system", "content": "Your input fields are: ..."}, USER],
            "temperature": 0.0,
            "max_tokens": 32,
            "n": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Outputs", "schema": ANSWER, "strict": True},
            },
        },
        {"override_temperature": 1, "own_grammar": 1},
    ),
    "inspect-ai": (
        CHAT,
        {
            "model": "any",
            "messages": [{"role": "system", "content": "Submit an answer."}, USER],
            "tools": [TOOL_SCHEMA],
            "tool_choice": {"type": "function", "function": {"name": "calculate"}},
            "parallel_tool_calls": False,
            "temperature": 0.9,
            "top_p": 0.9,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "logit_bias": {"5": -1},
            "seed": 7,
            "stop": ["STOP"],
            "max_tokens": 32,
        },
        {
            "own_grammar": 1,
            "override_parallel_tool_calls": 1,
            "override_frequency_penalty": 1,
            "override_presence_penalty": 1,
            "override_logit_bias": 1,
            "own_sampling": 1,
        },
    ),
    "a sampler of its own": (
        CHAT,
        {"model": "any", "messages": [USER], "top_k": 5, "min_p": 0.05, "ignore_eos": True},
        {"own_sampling": 1},
    ),
}
"""Path, body, and the events that a training session counts where `sampling` has temperature
0.8."""
