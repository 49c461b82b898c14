"""The tools `python` and `shell`: the model's code in a sandbox of its trajectory.

The first call starts the interpreter. Whatever the code does, a call returns a text in time and the
sandbox ends with the environment; what each backend holds is in docs/how-to/sandbox.md.
"""

from collections.abc import Sequence
from typing import Literal

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.tools.sandbox.backends import Backend, Limits
from turnwise.tools.sandbox.session import Session, choose
from turnwise.tools.tool import Tool

Sandbox = Literal["auto", "sandlock", "bubblewrap", "none"]

_PYTHON = (
    "Run Python code. Variables and files stay from call to call. Returns what the code prints and "
    "the value of its last expression, or the error. There is no network."
)
_SHELL = (
    "Run a bash command. The working directory, variables and files stay from call to call. "
    "Returns its output, and the exit code unless it is 0. There is no network."
)


class CodeTool:
    """A sandboxed tool; each trajectory opens a toolset of its own, with a sandbox of its own."""

    def __init__(self, name: Literal["python", "shell"], sandbox: Sandbox, limits: Limits) -> None:
        self._name = name
        self._sandbox = sandbox
        self._limits = limits

    def choose(self) -> Backend:
        """Return the backend that this tool uses on this machine.

        Raises:
            InputError: when none works; it says what to install.
        """
        return choose(self._sandbox, self._limits.interpreter)

    def toolset(self) -> "CodeToolset":
        """Return the toolset of one trajectory; nothing is started before its first call."""
        return CodeToolset(self, self._name, self._limits)


class CodeToolset:
    """One trajectory's `python` or `shell`."""

    def __init__(self, tool: CodeTool, name: Literal["python", "shell"], limits: Limits) -> None:
        self._tool = tool
        self._name = name
        self._limits = limits
        self._session: Session | None = None

    async def open(self) -> Sequence[Tool]:
        """Choose the sandbox and return the tool.

        Raises:
            InputError: when no sandbox works on this machine; it says what to install.
        """
        backend = await run_in_thread(self._tool.choose)
        self._session = session = Session(backend, self._limits, shell=self._name == "shell")
        argument = "code" if self._name == "python" else "command"
        description = "Python code." if self._name == "python" else "A bash command."
        parameters: JsonObject = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": description}},
            "required": [argument],
            "additionalProperties": False,
        }
        about = _PYTHON if self._name == "python" else _SHELL

        def call(arguments: JsonObject) -> str:
            return session.run(arguments[argument])

        return [Tool(self._name, about, parameters, call, in_order=True)]

    async def close(self) -> None:
        """End the sandbox and all its processes."""
        if self._session is not None:
            await run_in_thread(self._session.close)


def python(
    *,
    sandbox: Sandbox = "auto",
    timeout: float = 10.0,
    memory: int = 512,
    disk: int = 64,
    processes: int = 32,
    interpreter: str | None = None,
) -> CodeTool:
    """Make the tool `python(code)`, a Python session for each trajectory.

    Args:
        sandbox: `auto` uses sandlock if it works, or else bubblewrap; `none` runs the code with all
            rights of this process's user.
        timeout: Seconds for one call, after which the code is interrupted; shorter than
            `rollout.tool_timeout`.
        memory: MiB of memory, of each process and of all together.
        disk: MiB of files.
        processes: Largest number of processes and threads.
        interpreter: Python's executable, for the packages of its environment, whose folder becomes
            readable; None offers Python's own modules.

    Example:
        class Arithmetic(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["question"]
                self.tools = [turnwise.tools.python(timeout=5.0)]
    """
    return CodeTool("python", sandbox, Limits(timeout, memory, disk, processes, interpreter))


def shell(
    *,
    sandbox: Sandbox = "auto",
    timeout: float = 10.0,
    memory: int = 512,
    disk: int = 64,
    processes: int = 32,
    interpreter: str | None = None,
) -> CodeTool:
    """Make the tool `shell(command)`, a bash session for each trajectory.

    Args:
        sandbox: As for `python`, like the other arguments; `interpreter` is the shell's `python3`.

    Example:
        class Files(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["task"]
                self.tools = [turnwise.tools.shell(memory=1024)]
    """
    return CodeTool("shell", sandbox, Limits(timeout, memory, disk, processes, interpreter))
