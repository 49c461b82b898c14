"""The entries of `rollout.tools`: tools that a configuration adds to every environment's own."""

from typing import Literal

from pydantic import model_validator

from turnwise.config.base import PositiveFloat, PositiveInt, Section


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


class ToolConfig(Section):
    """Tools from one source; exactly one key is set."""

    use: str | None = None
    """package.module:name of a function, a Tool, a toolset, or a class or function that makes a
    toolset for each trajectory."""
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
