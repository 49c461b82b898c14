"""Sessions of Daytona: `python: {sandbox: "examples.sandboxes.daytona:DaytonaSandbox"}`.

pip install daytona, and the key in DAYTONA_API_KEY. Written from Daytona's documentation and never
run: check it before you rely on it. Its sandboxes have network access.
"""

import math

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.optional import Foreign, required
from turnwise.errors import TrajectoryError


class DaytonaSandbox:
    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self.seconds, self.shell = math.ceil(limits.timeout), shell
        self.client: Foreign = None
        self.session: Foreign = None

    def run(self, code: str) -> str:
        daytona = required("daytona", "daytona", "a sandbox of Daytona")
        try:
            if self.session is None:
                self.client = daytona.Daytona()
                self.session = self.client.create()
            if self.shell:
                done = self.session.process.exec(code, timeout=self.seconds)
                ended = f"\n[exit code {done.exit_code}]" if done.exit_code else ""
                return f"{done.result}{ended}" or "[no output]"
            done = self.session.code_interpreter.run_code(code, timeout=self.seconds)
        except Exception as error:  # an error of the service, which the model cannot fix
            raise TrajectoryError("sandbox_error", f"Daytona: {error}") from error
        parts = [done.stdout, done.stderr]
        if done.error is not None:
            parts.append(f"{done.error.name}: {done.error.value}")
        return "".join(filter(None, parts)) or "[no output]"

    def close(self) -> None:
        if self.session is not None:
            self.client.delete(self.session)
