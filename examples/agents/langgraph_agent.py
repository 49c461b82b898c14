"""A LangGraph agent (langchain-openai) as a command, over Chat Completions or Responses.

    rollout.agent: .venv-agents/bin/python -m examples.agents.langgraph_agent chat

`stored` continues each response by `previous_response_id`; `stream` streams Chat Completions.
"""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

from examples.calculator.tool import calculate


def solve(question: str, way: str) -> None:
    responses = way in ("responses", "stored")
    model = ChatOpenAI(
        model="any",
        base_url=os.environ["OPENAI_BASE_URL"],
        use_responses_api=responses,
        use_previous_response_id=way == "stored",
        streaming=way == "stream",
    )
    calculator = tool(calculate, parse_docstring=True)
    calculator.handle_tool_error = calculator.handle_validation_error = True
    agent = create_react_agent(model, [calculator])
    asked = {"messages": [{"role": "user", "content": question}]}
    try:
        for _ in agent.stream(asked, {"recursion_limit": 10}, stream_mode="messages"):
            pass
    except GraphRecursionError as error:
        print(type(error).__name__)


if __name__ == "__main__":
    solve(json.load(sys.stdin)["question"], sys.argv[1])
