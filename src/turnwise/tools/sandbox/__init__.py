"""Python and shell for the model, in a sandbox: one session for each trajectory.

Sandboxes on this machine are interpreters behind pipes, which a keeper process ends (`backends`).
`sandbox` may also name the URL of a server (`http`), or a class of your own.
"""

from typing import Protocol

from turnwise.config.rollout import CodeToolConfig

__all__ = ["Sandbox"]


class Sandbox(Protocol):
    """The session of one trajectory; a class of your own is `sandbox: package.module:Class`.

    `shell` says whether it runs bash commands or Python. The methods are called in threads; calls
    of `run` overlap only where one is later than `rollout.tool_timeout`.

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
        """Run code within `limits.timeout`, and return what the model reads: its output, or its
        error. A TrajectoryError, for a sandbox that fails, drops the trajectory; the model reads
        any other error's message."""

    def close(self) -> None:
        """End the session and all its processes, also during a call or before any."""
