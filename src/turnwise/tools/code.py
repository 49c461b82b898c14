"""The tools `python` and `shell`: the model's code in a sandbox of its trajectory.

The first call starts the interpreter. Whatever the code does, a call returns a text in time and the
sandbox ends with the environment; what each backend holds is in docs/how-to/sandbox.md.
"""

from typing import Literal, TypedDict, Unpack

from turnwise.config.tools import CodeToolConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.tools.sandbox.backends import Backend
from turnwise.tools.sandbox.session import Session, choose
from turnwise.tools.tool import Tool

_ABOUT = {
    "python": (
        "Run Python code. Variables and files stay from call to call. Returns what the code prints "
        "and the value of its last expression, or the error. There is no network.",
        "code",
        "Python code.",
    ),
    "shell": (
        "Run a bash command. The working directory, variables and files stay from call to call. "
        "Returns its output, and the exit code unless it is 0. There is no network.",
        "command",
        "A bash command.",
    ),
}
"""Description of each tool, and name and description of its argument."""


class CodeOptions(TypedDict, total=False):
    """Options of `python` and `shell`, with the meanings and defaults of `CodeToolConfig`."""

    sandbox: Literal["auto", "sandlock", "bubblewrap", "none"]
    timeout: float
    memory: int
    disk: int
    processes: int
    interpreter: str | None


class CodeTool:
    """A sandboxed tool; each trajectory opens a toolset of its own, with a sandbox of its own."""

    def __init__(self, name: Literal["python", "shell"], options: CodeOptions) -> None:
        self.name = name
        self.limits = CodeToolConfig(**options)

    def choose(self) -> Backend:
        """Return the backend that this tool uses on this machine.

        Raises:
            InputError: when none works; it says what to install.
        """
        return choose(self.limits.sandbox, self.limits.interpreter)

    def toolset(self) -> "CodeToolset":
        """Return the toolset of one trajectory; nothing is started before its first call."""
        return CodeToolset(self)


class CodeToolset:
    """One trajectory's `python` or `shell`."""

    def __init__(self, tool: CodeTool) -> None:
        self._tool = tool
        self._session: Session | None = None

    async def open(self) -> list[Tool]:
        """Choose the sandbox and return the tool; raises what `CodeTool.choose` does."""
        backend, name = await run_in_thread(self._tool.choose), self._tool.name
        self._session = session = Session(backend, self._tool.limits, shell=name == "shell")
        about, argument, description = _ABOUT[name]
        parameters: JsonObject = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": description}},
            "required": [argument],
            "additionalProperties": False,
        }

        def call(arguments: JsonObject) -> str:
            return session.run(arguments[argument])

        return [Tool(name, about, parameters, call, in_order=True)]

    async def close(self) -> None:
        """End the sandbox and all its processes."""
        if self._session is not None:
            await run_in_thread(self._session.close)


def python(**options: Unpack[CodeOptions]) -> CodeTool:
    """Make the tool `python(code)`, a Python session for each trajectory.

    Example:
        class Arithmetic(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["question"]
                self.tools = [turnwise.tools.python(timeout=5.0)]
    """
    return CodeTool("python", options)


def shell(**options: Unpack[CodeOptions]) -> CodeTool:
    """Make the tool `shell(command)`, a bash session for each trajectory.

    Example:
        class Files(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["task"]
                self.tools = [turnwise.tools.shell(memory=1024)]
    """
    return CodeTool("shell", options)
