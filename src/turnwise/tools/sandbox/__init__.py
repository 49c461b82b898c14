"""Python and shell for the model, in a sandbox: one session for each trajectory.

Sandboxes on this machine are interpreters behind pipes; a keeper process ends them (`backends`).
`sandbox` may also be the URL of a server (`http`), or the name of your own class.
"""

from typing import Protocol

from turnwise.config.rollout import CodeToolConfig

__all__ = ["Sandbox"]


class Sandbox(Protocol):
    """The session of one trajectory; name your own class by `sandbox: package.module:Class`.

    With `shell` it runs bash commands, otherwise Python. The methods are called in threads. Calls
    of `run` overlap only if one takes longer than `rollout.tool_timeout`.

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
        output, or its error. Raise TrajectoryError if the sandbox fails: it drops the trajectory.
        The model reads the message of any other exception."""

    def close(self) -> None:
        """End the session and all its processes, also during a call or before any."""
