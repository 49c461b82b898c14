"""The tools `python` and `shell`, which run the model's code in the trajectory's own sandbox.

Whatever the code does, a call returns a text in time and the sandbox ends with the environment.
The sandbox's output is untrusted. It is read without blocking and kept up to a limit. The output
can only affect the text for the model, and end a call before its deadline.
"""

import contextlib
import copy
import importlib.util
import json
import os
import platform
import secrets
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import IO, Literal, cast

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.child import kill_group
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import load_object
from turnwise.errors import InputError, TrajectoryError
from turnwise.tools.sandbox import Sandbox, keeper
from turnwise.tools.sandbox.backends import ARCHITECTURES, ENGINES, MISSING, Backend, specify
from turnwise.tools.sandbox.http import HttpSandbox
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
"""Description of each tool, and the name and description of the tool's argument."""
GRACE_SECONDS = 2.0
"""Time between the interruption of late code inside the sandbox and the end of the sandbox."""
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_MAX_CODE = 1 << 20
_PIPE_BYTES = 1 << 20  # maximum size of a pipe
_MAX_OUTPUT = 8000
"""Maximum number of bytes of a call's output that are kept: half from its start, and half from its
end."""
_KEEPERS_ENVIRONMENT = {  # a keeper needs no variable of this process; sandlock needs a HOME
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/nonexistent",
}
_choosing = threading.Lock()


class CodeTool:
    """A sandboxed tool; each trajectory opens its own toolset and has its own sandbox.

    Args:
        options: Keys of a `python` or `shell` entry in `rollout.tools` (`CodeToolConfig`).
    """

    def __init__(self, name: Literal["python", "shell"], options: Mapping[str, object]) -> None:
        self.name = name
        self.limits = CodeToolConfig.model_validate(options)
        self._session: Sandbox | None = None

    def choose(self) -> Callable[..., Sandbox]:
        """Return the class or function that makes this tool's sandboxes from the limits and
        `shell`. Raise InputError when no backend works, or the class cannot be imported."""
        wanted = self.limits.sandbox
        if wanted.startswith(("http://", "https://")):
            return HttpSandbox
        if ":" in wanted:
            made: Callable[..., Sandbox] = load_object(wanted, "sandbox")
            return made
        return partial(CodeSession, choose(wanted, self.limits.interpreter, self.limits.image))

    def toolset(self) -> "CodeTool":
        """Return the toolset of one trajectory; nothing is started before its first call."""
        return copy.copy(self)

    async def open(self) -> list[Tool]:
        """Choose the sandbox and return the tool; raise the errors of `choose`."""
        make = await run_in_thread(self.choose)
        shell = self.name == "shell"
        self._session = session = await run_in_thread(make, self.limits, shell=shell)
        about, argument, described = _ABOUT[self.name]
        parameters: JsonObject = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": described}},
            "required": [argument],
            "additionalProperties": False,
        }

        def call(arguments: JsonObject) -> str:
            try:
                return session.run(arguments[argument])
            except InputError as error:  # the sandbox does not start, which the model cannot repair
                raise TrajectoryError("sandbox_error", str(error)) from error

        return [Tool(self.name, about, parameters, call, in_order=True)]

    async def close(self) -> None:
        """End the sandbox and all its processes."""
        if self._session is not None:
            await run_in_thread(self._session.close)


def python(**options: object) -> CodeTool:
    """Make the tool `python(code)`, a Python session for each trajectory; see `CodeTool`.

    Example:
        class Arithmetic(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["question"]
                self.tools = [turnwise.tools.python(timeout=5.0)]
    """
    return CodeTool("python", options)


def shell(**options: object) -> CodeTool:
    """Make the tool `shell(command)`, a bash session for each trajectory; see `CodeTool`.

    Example:
        class Files(turnwise.Environment):
            def __init__(self, row):
                self.problem = row["task"]
                self.tools = [turnwise.tools.shell(memory=1024)]
    """
    return CodeTool("shell", options)


@lru_cache
def choose(wanted: str, interpreter: str | None = None, image: str | None = None) -> Backend:
    """Return the first backend that works on this machine; test runs of code show this.

    Only `wanted` is tried; for `auto`, sandlock is tried, then bubblewrap. Raise InputError, with
    the packages to install, if no backend works.
    """
    if wanted == "none":
        return "none"
    tried = []
    names: tuple[Backend, ...] = ("sandlock", "bubblewrap")
    if wanted != "auto":
        names = (cast("Backend", wanted),)
    limits = {"interpreter": interpreter} | ({"image": image} if image else {})
    with _choosing:
        for name in names:
            sandlock = name == "sandlock" and importlib.util.find_spec(name)
            if name not in ENGINES and platform.machine() not in ARCHITECTURES:
                reason = "not available on this architecture"
            elif not sandlock and shutil.which({"bubblewrap": "bwrap"}.get(name, name)) is None:
                reason = "not installed"
            else:
                session = CodeSession(name, CodeToolConfig.model_validate(limits))
                try:
                    answer = session.run("6 * 7")
                    reason = "" if answer == "42" else f"answered {answer[:200]!r}"
                except InputError as error:
                    reason = str(error)
                finally:
                    session.close()
            if not reason:
                return name
            tried.append(f"{name}: {reason}")
    if wanted in ENGINES:
        raise InputError(
            f"no sandbox in a container works ({'; '.join(tried)}): is the image {image} there?"
        )
    raise InputError(f"{MISSING} ({'; '.join(tried)})")


class CodeSession:
    """One interpreter; the first call starts it. If the interpreter has ended, the next call starts
    a new one."""

    def __init__(self, backend: Backend, limits: CodeToolConfig, *, shell: bool = False) -> None:
        self._backend = backend
        self._limits = limits
        self._shell = shell
        self._calls = threading.Lock()
        self._process: _Process | None = None
        self._closed = threading.Event()

    def run(self, code: str) -> str:
        """Run code and return the text for the model: output and value, or the error.

        The call blocks for at most the sum of `limits.timeout`, `GRACE_SECONDS` and the time in
        which an interpreter starts. Raise InputError if the interpreter does not start.
        """
        seconds = self._limits.timeout
        if len(code) > _MAX_CODE:
            return f"[the code is longer than {_MAX_CODE} characters]"
        if not self._calls.acquire(timeout=seconds + GRACE_SECONDS):
            return "[the call before has not ended]"
        try:
            if self._closed.is_set():
                raise InputError("the sandbox is closed")
            if (process := self._process) is None:
                self._process = process = _Process(self._backend, self._limits, self._shell)
                if self._closed.is_set():  # a concurrent `close` may not have seen the process
                    process.cut()
                outcome, text = process.exchange(b"", b"ready", _START_SECONDS)
                if outcome != "answered":
                    complaint = text or process.complaint or outcome
                    process.stop()
                    self._process = None
                    raise InputError(f"{self._backend} did not start: {complaint}")
            nonce = secrets.token_hex(16)
            code = code.encode("utf-8", "replace").decode()  # without lone surrogates
            line = json.dumps({"nonce": nonce, "code": code, "seconds": seconds}) + "\n"
            waits = seconds + GRACE_SECONDS
            outcome, text = process.exchange(line.encode(), nonce.encode(), waits)
            if outcome != "answered":
                self._process = None
                status = process.stop()
                if status == keeper.OVER_MEMORY:
                    why = f"stopped: more than {self._limits.memory} MiB of memory"
                elif status == keeper.OVER_DISK:
                    why = f"stopped: more than {self._limits.disk} MiB of files, or too many"
                else:
                    late = outcome == "late"
                    why = f"stopped after {seconds:g} s" if late else "the interpreter ended"
                text += ("\n" if text else "") + f"[{why}; variables and files are lost]"
            return text or "[no output]"
        finally:
            self._calls.release()

    def close(self) -> None:
        """End the interpreter and all its processes, even during a call."""
        self._closed.set()
        if (process := self._process) is None:
            return
        process.cut()
        if self._calls.acquire(timeout=_END_SECONDS):
            try:
                process.stop()
                self._process = None
            finally:
                self._calls.release()


class _Process:
    """A keeper with its sandbox, and the pipes to it."""

    def __init__(self, backend: Backend, limits: CodeToolConfig, shell: bool) -> None:
        self._one_stream = backend in ENGINES
        self.complaint = ""
        """The last text that came instead of an answer, such as the reason why a sandbox does not
        start."""
        lifeline, end = os.pipe()
        self._lifeline: IO[bytes] = open(end, "wb", 0)  # noqa: SIM115
        try:
            spec = specify(backend, limits, shell=shell, lifeline=lifeline)
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(lifeline,),
                env=None if self._one_stream else _KEEPERS_ENVIRONMENT,
                start_new_session=True,
            )
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(lifeline)
        streams = self._keeper.stdin, self._keeper.stdout, self._keeper.stderr
        self._pipes = [pipe for pipe in streams if pipe]
        self._requests, self._output, self._answers = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, request: bytes, answer: bytes, seconds: float) -> tuple[str, str]:
        """Send a request and read until its answer arrives. Return "answered", "ended" or "late",
        and the output; the middle of a long output is left out."""
        ends, said, outcome = time.monotonic() + seconds, b"", ""
        output, half, left_out = bytearray(), _MAX_OUTPUT // 2, 0
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        poll.register(self._output, select.POLLIN)
        if request:
            poll.register(self._requests, select.POLLOUT)

        def keep(part: bytes) -> None:
            nonlocal left_out
            output.extend(part)
            excess = max(0, len(output) - _MAX_OUTPUT)
            del output[half : half + excess]
            left_out += excess

        while not outcome and (left := ends - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                if fd == self._requests:
                    try:
                        request = request[os.write(fd, request) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        request = b""
                    if not request:
                        poll.unregister(fd)
                elif (part := _read(fd)) is None:
                    continue
                elif fd == self._output:
                    keep(part)
                    if self._one_stream and (at := output.rfind(answer + b"\n", -half)) >= 0:
                        del output[at:]
                        outcome = "answered"
                        break
                    if not part:
                        poll.unregister(fd)
                else:
                    said += part
                    self.complaint = said[-1000:].decode("utf-8", "replace").strip()
                    if answer in said or not part:
                        outcome = "answered" if answer in said else "ended"
                        break
                    said = said[-1000:]
        unread = _PIPE_BYTES if outcome else 0  # read the output that is still in the pipe
        while unread > 0 and (part := _read(self._output)):
            keep(part)
            unread -= len(part)
        if left_out:
            output[half:half] = f"\n[{left_out} bytes left out]\n".encode()
        return outcome or "late", output.decode("utf-8", "replace").rstrip("\n")

    def cut(self) -> None:
        """Make the keeper end its sandbox; thread-safe."""
        self._lifeline.close()

    def stop(self) -> int | None:
        """End the sandbox and its keeper, and return the keeper's exit code; None if the keeper did
        not end in time."""
        self.cut()
        try:
            return self._keeper.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            if self._one_stream:  # let the keeper go on until it has removed the container
                return None
            kill_group(self._keeper.pid, reaped=False)
            self._keeper.wait(_END_SECONDS)
            return None
        finally:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.close()


def _read(fd: int) -> bytes | None:
    """Return the bytes that can be read now; b"" at the end of the file, None if no bytes are there
    yet."""
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return None
