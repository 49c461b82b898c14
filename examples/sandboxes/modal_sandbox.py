"""Sessions of Modal: `python: {sandbox: "examples.sandboxes.modal_sandbox:ModalSandbox"}`.

pip install modal, and `modal token new`. Written from Modal's documentation and never run: check it
before you rely on it. Files stay from call to call, variables do not: each call is a new process.
"""

import math

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.optional import Foreign, required
from turnwise.errors import TrajectoryError

LIFE_SECONDS = 3600  # then Modal ends a session that was not closed


class ModalSandbox:
    def __init__(self, limits: CodeToolConfig, *, shell: bool) -> None:
        self.limits, self.program = limits, ["bash" if shell else "python", "-c"]
        self.session: Foreign = None

    def run(self, code: str) -> str:
        modal = required("modal", "modal", "a sandbox of Modal")
        try:
            if self.session is None:
                self.session = modal.Sandbox.create(
                    app=modal.App.lookup("turnwise", create_if_missing=True),
                    timeout=LIFE_SECONDS,
                    memory=self.limits.memory,
                    block_network=True,
                )
            seconds = math.ceil(self.limits.timeout)
            process = self.session.exec(*self.program, code, timeout=seconds)
            said = process.stdout.read() + process.stderr.read()
            code_of_exit = process.wait()
        except Exception as error:  # an error of the service, which the model cannot fix
            raise TrajectoryError("sandbox_error", f"Modal: {error}") from error
        return said + (f"\n[exit code {code_of_exit}]" if code_of_exit else "") or "[no output]"

    def close(self) -> None:
        if self.session is not None:
            self.session.terminate()
