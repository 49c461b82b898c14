"""The program inside a sandbox: it limits itself, then runs the code that it receives.

It imports only Python's standard library, because it runs in the interpreter of the model's code.
Requests are lines of JSON on standard input. The code's output goes to standard output. To answer,
the program writes the request's nonce to standard error, or, in a container, at the end of the
output. If the code forges an answer, this only ends the code's own call.
"""

import ast
import contextlib
import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import subprocess
import sys
import traceback
import types
from typing import Any

_INTERVAL = 0.5
"""Seconds between two interruptions of code that continues after the first interruption."""
_FRAMES = 8
"""Number of frames of a traceback that the model reads."""
_KEEPCAPS, _SET_SECCOMP, _NO_NEW_PRIVS, _AMBIENT = 8, 22, 38, 47
_DAC_READ_SEARCH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def confine(spec: dict[str, Any]) -> None:
    """Set this process's resource limits, change its user, and install its filter of system calls;
    raise OSError when the kernel refuses one of these."""
    limits = {
        resource.RLIMIT_AS: spec["memory"],
        resource.RLIMIT_FSIZE: spec["disk"],
        resource.RLIMIT_NPROC: spec["processes"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    for which, limit in limits.items():
        if limit is not None:
            hard = resource.getrlimit(which)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(which, (limit, limit))
    if spec["uid"] is not None:  # a user without privileges
        # If the sandbox itself limits the readable folders, the process keeps the capability to
        # read files of other users.
        _prctl(_KEEPCAPS, int(spec["reads_all"]))
        os.setgroups([])
        os.setresgid(spec["uid"], spec["uid"], spec["uid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
        if spec["reads_all"]:
            version_3, mask = 0x20080522, 1 << _DAC_READ_SEARCH
            header = struct.pack("Ii", version_3, 0)
            if _libc.capset(header, struct.pack("6I", mask, mask, mask, 0, 0, 0)):
                raise OSError(ctypes.get_errno(), "capset")
            _prctl(_AMBIENT, 2, _DAC_READ_SEARCH)
    if spec["filter"] is not None:  # the filter applies to this process and all its children
        program = bytes.fromhex(spec["filter"])
        buffer = ctypes.create_string_buffer(program, len(program))
        fields = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
        filtering = ctypes.create_string_buffer(fields, len(fields))
        _prctl(_NO_NEW_PRIVS, 1)
        _prctl(_SET_SECCOMP, 2, ctypes.addressof(filtering))


def _prctl(option: int, second: int, third: int = 0) -> None:
    parts = [ctypes.c_ulong(value) for value in (second, third, 0, 0)]
    if _libc.prctl(option, *parts):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


class Python:
    """A Python session, in which variables stay from call to call, as in a notebook."""

    def __init__(self) -> None:
        self._module = types.ModuleType("__main__")
        self._calls = 0
        self._running = False
        sys.modules["__main__"] = self._module

    def run(self, code: str, seconds: float) -> None:
        """Run code and print the value of its last expression, or the end of the traceback."""
        self._calls += 1
        name = f"<call {self._calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        process = os.getpid()
        out = _console()

        def interrupt(*_: object) -> None:
            if self._running:
                raise KeyboardInterrupt(f"interrupted after {seconds:g} s")

        try:
            signal.signal(signal.SIGALRM, interrupt)
            self._running = True
            signal.setitimer(signal.ITIMER_REAL, seconds, _INTERVAL)
            tree = compile(code, name, "exec", ast.PyCF_ONLY_AST)
            assert isinstance(tree, ast.Module)
            names = self._module.__dict__
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
                if value is not None:
                    names["_"] = value
                    print(repr(value))
            self._running = False
        except BaseException as error:
            self._running = False
            with contextlib.suppress(OSError, ValueError):
                print(_tail(error), file=out)
        finally:
            self._running = False
            if os.getpid() != process:  # a forked child that has left the model's code
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for stream in {out, sys.stdout, sys.stderr}:
                with contextlib.suppress(Exception):
                    stream.flush()


_SHELL = """
source ~/.session 2> /dev/null
__save() { { declare -p; declare -f; printf 'cd %q\\n' "$PWD"; } > ~/.session 2> /dev/null; }
trap __save EXIT
eval "$1"
"""
"""Script that runs one command of a session, and keeps the working directory, variables and
functions for the next command."""


def run_shell(command: str, seconds: float) -> None:
    """Run a command; print its exit code unless it is 0."""
    out = _console()
    try:
        bash = ["bash", "--noprofile", "--norc", "-c", _SHELL, "bash", command]
        shell = subprocess.Popen(bash, start_new_session=True)
    except (OSError, ValueError) as error:
        print(f"bash: {error}", file=out, flush=True)
        return
    try:
        shell.wait(seconds)
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(0.3)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        print(f"[interrupted after {seconds:g} s]", file=out, flush=True)
    if code := shell.wait():
        print(f"[exit code {code}]", file=out, flush=True)


def _console() -> Any:
    """Open standard output and standard error again, because the code may have replaced them."""
    out = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = out
    return out


def _tail(error: BaseException) -> str:
    """Return the end of an error's traceback, without this file's frames."""
    try:
        depth, step = 0, error.__traceback__
        while step is not None:  # a recursion may be a million frames deep
            depth, step = depth + 1, step.tb_next
        frames = traceback.extract_tb(error.__traceback__, limit=-min(depth, _FRAMES))
        here = _tail.__code__.co_filename
        own = [frame for frame in frames if frame.filename != here]
        lines = traceback.format_list(own)
        head = ["Traceback (most recent call last):\n"] if lines else []
        if depth > _FRAMES:
            head.append(f"  [{depth - _FRAMES} frames left out]\n")
        return "".join([*head, *lines, *traceback.format_exception_only(error)]).rstrip("\n")
    except BaseException:
        return type(error).__name__


def serve(run: Any, stream: int) -> None:
    """Answer requests on a stream until standard input ends."""
    requests, answers = os.dup(0), os.dup(stream)  # not inherited by the code's processes
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.write(answers, b"ready\n")
    rest = b""
    while True:
        while b"\n" not in rest:
            part = os.read(requests, 65536)
            if not part:
                return
            rest += part
        line, _, rest = rest.partition(b"\n")
        request = json.loads(line)
        with contextlib.suppress(KeyboardInterrupt):  # an interruption that comes after the code
            run(request["code"], request["seconds"])
        os.write(answers, request["nonce"].encode() + b"\n")


def main() -> None:
    """Confine this process and answer requests; `sys.argv[1]` is the specification as JSON."""
    spec = json.loads(sys.argv[1])
    sys.argv = [""]
    confine(spec)
    os.chdir(os.environ["HOME"])
    # A container's engine does not keep the order of the two streams, so in a container the answers
    # go to standard output.
    serve(run_shell if spec["shell"] else Python().run, 1 if spec.get("one_stream") else 2)


if __name__ == "__main__":
    main()
