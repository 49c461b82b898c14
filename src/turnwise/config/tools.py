"""The entries of `rollout.tools`: tools that a configuration adds to every environment's own."""

from typing import Literal

from pydantic import model_validator

from turnwise.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section


class CodeToolConfig(Section):
    """A tool that runs the model's code in a sandbox of its trajectory."""

    sandbox: Literal["auto", "sandlock", "bubblewrap", "none"] = "auto"
    """Program that confines the code: sandlock, bubblewrap, auto for the first of the two that
    works, or none, which gives the code all rights of the run's user."""
    timeout: PositiveFloat = 10.0
    """Seconds for one call, after which the code is interrupted."""
    memory: PositiveInt = 512
    """MiB of memory, of each process and of all together."""
    disk: PositiveInt = 64
    """MiB of files."""
    processes: PositiveInt = 32
    """Largest number of processes and threads."""
    interpreter: str | None = None
    """Python's executable, for the packages of its environment; null offers Python's own
    modules."""


class McpConfig(Section):
    """An MCP server: a command that speaks over its standard input and output, or a URL of
    streamable HTTP."""

    command: str | None = None
    """Program to start: one process for each trajectory, unless shared."""
    args: list[str] = []
    """Arguments of the command."""
    env: dict[str, str] = {}
    """Environment variables of the command besides PATH, HOME, USER, SHELL and TERM; ${NAME} stands
    for a variable of this process."""
    cwd: str | None = None
    """Working directory of the command; null uses this process's."""
    url: str | None = None
    """URL of a running server; each trajectory has its own MCP session, unless shared."""
    headers: dict[str, str] = {}
    """HTTP headers for the URL; ${NAME} stands for a variable of this process."""
    session_header: str | None = None
    """Name of an HTTP header that has its own value for each trajectory; null sends none."""
    shared: bool = False
    """One process, or one MCP session, for all trajectories."""
    warm: NonNegativeInt = 0
    """Number of processes that are started before a trajectory needs them."""
    tools: list[str] | None = None
    """Names of the server's tools to offer; null offers all."""
    prefix: str = ""
    """Text before each tool's name."""
    start_timeout: Seconds = 60.0
    """Deadline in seconds for the server to start and list its tools."""

    @model_validator(mode="after")
    def _consistent(self) -> "McpConfig":
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command or a url")
        if self.command and (self.headers or self.session_header):
            raise ValueError("headers and session_header apply to a url, not to a command")
        if self.url and (self.args or self.env or self.cwd or self.warm):
            raise ValueError("args, env, cwd and warm apply to a command, not to a url")
        if self.shared and (self.session_header or self.warm):
            raise ValueError(
                "session_header and warm are for one connection per trajectory: set shared to false"
            )
        return self


class ToolConfig(Section):
    """Tools from one source; exactly one key is set."""

    use: str | None = None
    """package.module:name of a function, a Tool, a toolset, a tool of openai-agents, pydantic-ai,
    LangChain or smolagents, or a class or function that makes a toolset for each trajectory."""
    mcp: McpConfig | None = None
    """The tools of an MCP server."""
    python: CodeToolConfig | None = None
    """A Python session for each trajectory."""
    shell: CodeToolConfig | None = None
    """A bash session for each trajectory."""

    @model_validator(mode="after")
    def _one_source(self) -> "ToolConfig":
        names = list(type(self).model_fields)
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"an entry of rollout.tools has exactly one of the keys {', '.join(names)}"
                + (f", not {' and '.join(given)}" if given else "")
            )
        return self
