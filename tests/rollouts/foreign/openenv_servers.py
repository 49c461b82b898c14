"""Servers of OpenEnv's wheel: `python openenv_servers.py PORT calculator|echo|camera SESSIONS`.

Runs in the environment that `make .venv-interop/.installed` makes.
"""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from plain_png import png


class Calculator(MCPEnvironment):
    """Tools `add`, `calculate` and `answer`; a call earns 0.25, the right answer 1 and the end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def calculate(a: int, operation: str, b: int) -> int:
            """Calculate a + b, a - b or a * b."""
            return {"+": a + b, "-": a - b, "*": a * b}[operation]

        @server.tool
        def answer(value: int) -> str:
            """Give the answer."""
            self.right = value == self.expected
            return "right" if self.right else "wrong"

        super().__init__(server)
        self.expected = 0
        self.right = False
        self.calls = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **row: Any
    ) -> Observation:
        self.expected = row.get("expected", 0)
        return Observation(metadata={"seed": seed})

    async def step_async(self, action: Action, timeout_s: float | None = None, **rest: Any) -> Any:
        seen = await super().step_async(action, timeout_s, **rest)
        if isinstance(seen, CallToolObservation):
            self.calls += 1
            seen.reward = float(self.right) if action.tool_name == "answer" else 0.25
            seen.done = self.right
        return seen

    def _step_impl(
        self, action: Action, timeout_s: float | None = None, **rest: Any
    ) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State(step_count=self.calls)


class Say(Action):
    message: str


class Heard(Observation):
    echoed: str = ""
    length: int = 0


class Echo(Environment):
    """Repeats messages, and rewards a tenth for each letter; `bye` ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Heard:
        return Heard(echoed="Say something.")

    def step(self, action: Say, timeout_s: float | None = None, **rest: Any) -> Heard:
        self.steps += 1
        return Heard(
            echoed=action.message,
            length=len(action.message),
            reward=len(action.message) / 10,
            done=action.message == "bye",
        )

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Picture(Observation):
    text: str = ""
    screenshot: str | None = None  # a PNG file in base64, as OpenEnv's own environments send it


class Camera(Echo):
    """Shows a picture at first, and another one after each message."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Any:
        return Picture(text="Look.", screenshot=png(255, 0, 0))

    def step(self, action: Say, timeout_s: float | None = None, **rest: Any) -> Any:
        return Picture(text=action.message, screenshot=png(0, 0, 255), reward=0.1)


KINDS = {
    "calculator": (Calculator, CallToolAction, CallToolObservation),
    "echo": (Echo, Say, Heard),
    "camera": (Camera, Say, Picture),
}

if __name__ == "__main__":
    port, kind, sessions = sys.argv[1:]
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
