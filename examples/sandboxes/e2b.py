"""Sessions of E2B's code interpreter: `python: {sandbox: "examples.sandboxes.e2b:E2B"}`.

pip install e2b-code-interpreter, and the key in E2B_API_KEY. Written from E2B's documentation and
never run: check it before you rely on it. Its sandboxes have network access.
"""

import math

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.optional import Foreign, required
from turnwise.errors import TrajectoryError

LIFE_SECONDS = 3600  # then E2B ends a session that was not closed


class E2B:
    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self.seconds, self.shell = limits.timeout, shell
        self.session: Foreign = None

    def run(self, code: str) -> str:
        e2b = required("e2b_code_interpreter", "e2b-code-interpreter", "a sandbox of E2B")
        try:
            if self.session is None:
                self.session = e2b.Sandbox.create(timeout=LIFE_SECONDS)
            if self.shell:
                done = self.session.commands.run(code, timeout=math.ceil(self.seconds))
                return str(done.stdout) + str(done.stderr) or "[no output]"
            done = self.session.run_code(code, timeout=self.seconds)
        except Exception as error:  # an error of the service, which the model cannot fix
            raise TrajectoryError("sandbox_error", f"E2B: {error}") from error
        parts = [*done.logs.stdout, *done.logs.stderr, done.text or ""]
        if done.error is not None:
            parts.append(f"{done.error.name}: {done.error.value}")
        return "".join(parts) or "[no output]"

    def close(self) -> None:
        if self.session is not None:
            self.session.kill()
