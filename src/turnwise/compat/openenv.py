"""Environments of OpenEnv servers, over their WebSocket; OpenEnv itself is not imported.

Each trajectory has a session, which is an environment of its own on the server:

    setup       connect, read the tools, reset with the row
    tools       an MCP environment's tools, or one tool `act` with the schema of the typed actions
    call, step  an action; its reward belongs to the turn that asked for it, `done` ends it
    close       always: the server closes its environment with the session
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from turnwise.compat.openenv_session import OpenEnvError, OpenEnvSession, StepResult
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.rollouts.environment import Environment, EnvironmentType, Rewards
from turnwise.rollouts.problems import Row
from turnwise.tools import Tool
from turnwise.trajectory import Message, Trajectory

ACT = "act"
"""Name of the tool that sends a typed action."""


class OpenEnv(Environment):
    """An environment of an OpenEnv server.

    The problem is the row's field `prompt` (a text or messages), followed by the text of the first
    observation. Subclasses change what this class decides: `problem_of`, `describe`, `action`.

    Attributes:
        url: The server's address, `ws://host:port`.

    Example:
        class Echo(turnwise.OpenEnv):
            url = "ws://localhost:8000"

            def action(self, message):
                return {"message": message["content"]}
    """

    url: ClassVar[str] = ""

    def __init__(self, row: Row, url: str = "") -> None:
        self._row = row
        self._results: list[StepResult] = []
        self._session = OpenEnvSession(url or self.url, self._results)

    async def setup(self) -> None:
        """Connect, read the tools, and reset the environment with the row."""
        await self._session.open()
        first = await self._session.reset(self.reset_arguments(self._row))
        described = await self._session.tools()
        if described is not None:
            self.tools = [self._tool(tool) for tool in described]
        elif type(self).action is OpenEnv.action:
            self.tools = [_act(await self._session.action_schema(), self)]
        self.problem = self.problem_of(self._row, self.describe(first.observation))

    def reset_arguments(self, row: Row) -> JsonObject:
        """Return the arguments of `reset`: the row without its prompt."""
        return {key: value for key, value in row.items() if key != "prompt"}

    def problem_of(self, row: Row, observation: str) -> Sequence[Message]:
        """Return the problem of a row, with the text of the first observation at its end."""
        prompt = row.get("prompt") or []
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = [dict(message) for message in prompt]
        if observation and messages and messages[-1].get("role") == "user":
            messages[-1]["content"] = f"{messages[-1]['content']}\n\n{observation}"
        elif observation:
            messages.append({"role": "user", "content": observation})
        if not messages:
            raise InputError("the row has no prompt, and the environment's reset says nothing")
        return messages

    def describe(self, observation: JsonObject) -> str:
        """Return an observation as the model reads it.

        The result of a tool, or the observation's only text, or JSON without `metadata`.
        """
        if "tool_name" in observation:
            return _tool_text(observation)
        rest = {key: value for key, value in observation.items() if key != "metadata"}
        texts = [value for value in rest.values() if isinstance(value, str)]
        if len(texts) == 1:
            return texts[0]
        return json.dumps(rest, ensure_ascii=False) if any(rest.values()) else ""

    def action(self, message: Message) -> JsonObject | None:
        """Return the action of a turn that calls no tool; None, the default, ends the trajectory.

        A class that defines this method offers the model no tool `act`.
        """
        return None

    async def act(self, action: JsonObject) -> str:
        """Send an action, and return its observation as text."""
        result = await self._session.step(action, self.current_turn)
        self.done = self.done or result.done
        return self.describe(result.observation)

    async def step(self, message: Message) -> str | None:
        """Send the turn's action, and answer with its observation."""
        action = self.action(message)
        if action is None:
            return None
        try:
            text = await self.act(action)
        except OpenEnvError as error:  # the model may do better
            return f"Error: {error}"
        return None if self.done else text

    async def state(self) -> JsonObject:
        """Return the environment's state, as the server reports it."""
        return await self._session.state()

    def reward(self, trajectory: Trajectory) -> Rewards:
        """Return the rewards of the steps, each for the turn that asked for it."""
        turns = [0.0] * len(trajectory.turns)
        final = 0.0
        for result in self._results:
            if result.turn < 0:
                final += result.reward
            else:
                turns[result.turn] += result.reward
        return Rewards(final, turns)

    def metrics(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the number of steps."""
        return {"openenv_steps": sum(result.turn >= 0 for result in self._results)}

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    def _tool(self, described: JsonObject) -> Tool:
        name = str(described["name"])

        async def call(arguments: JsonObject) -> str:
            return await self.act({"type": "call_tool", "tool_name": name, "arguments": arguments})

        schema = described.get("input_schema") or described.get("inputSchema") or _NO_ARGUMENTS
        return Tool(name, str(described.get("description") or ""), schema, call)


_NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}


def at(url: str) -> EnvironmentType:
    """Return the environment of a server: `environment: openenv:ws://host:port`.

    Raises:
        InputError: when the address is none.
    """
    OpenEnvSession(url, [])
    return partial(OpenEnv, url=url)


def _act(schema: JsonObject, environment: OpenEnv) -> Tool:
    """Return the tool that sends typed actions."""
    fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
    more = {key: value for key, value in schema.items() if key in ("$defs", "required")}
    return Tool(
        ACT,
        str(schema.get("description") or "Act in the environment."),
        {"type": "object", "properties": fields, **more},
        environment.act,
    )


def _tool_text(observation: JsonObject) -> str:
    """Return the text of a tool's result.

    Raises:
        OpenEnvError: when the call failed, so that the model reads it as an error.
    """
    if error := observation.get("error"):
        raise OpenEnvError(str(error.get("message") if isinstance(error, dict) else error))
    result = observation.get("result")
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    blocks = result.get("content")
    texts = [str(b["text"]) for b in blocks or () if isinstance(b, dict) and "text" in b]
    text = "\n".join(texts) if texts else json.dumps(result, ensure_ascii=False, default=str)
    if result.get("is_error") or result.get("isError"):
        raise OpenEnvError(text)
    return text
