"""Python and shell for the model, in a sandbox: one session for each trajectory.

A sandbox on this machine is an interpreter behind pipes, which a keeper process ends (`backends`).
`sandbox` may also be the URL of a server (`http`), or the name of your own class.

To add a sandbox: write a class with `run` and `close` (see `Sandbox`), and set `sandbox:
package.module:Class`. A built-in one needs a name in `SANDBOXES` of `config/rollout.py`, and a case
in `specify` of `tools/sandbox/backends.py`.
"""

from typing import Protocol

from turnwise.config.rollout import CodeToolConfig

__all__ = ["Sandbox"]


class Sandbox(Protocol):
    """The session of one trajectory. To use your own class, set `sandbox: package.module:Class`.

    With `shell` the session runs bash commands, otherwise Python. The methods are called in
    threads. Calls of `run` overlap only if a call takes longer than `rollout.tool_timeout`.

    Example:
        class Stateless:
            def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
                self.command = ["ssh", "sandboxes", "bash" if shell else "python3", "-"]
                self.seconds = limits.timeout

            def run(self, code: str) -> str:
                options = {"capture_output": True, "text": True, "timeout": self.seconds}
                return subprocess.run(self.command, input=code, **options).stdout

            def close(self) -> None: ...
    """

    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None: ...

    def run(self, code: str) -> str:
        """Run code within `limits.timeout` seconds, and return the text for the model: the code's
        output, or its error. If the sandbox fails, raise TrajectoryError to drop the trajectory.
        The model reads the message of an exception of any other class."""

    def close(self) -> None:
        """End the session and all its processes, even during a call or before the first call."""
