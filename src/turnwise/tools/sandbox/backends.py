"""The backends of a sandbox, and the keeper's specification for each.

`sandlock` (Landlock and seccomp) is a package that needs Linux 6.7; `bubblewrap` is a program of
the Linux distribution that needs user namespaces or root. `none` limits time, memory and output,
but gives the code all rights of this process's user.
"""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.tools.sandbox.seccomp import filter_program

Backend = Literal["sandlock", "bubblewrap", "none"]
MISSING = (
    "a sandbox for code needs sandlock (pip install 'turnwise[sandbox]', Linux 6.7 with Landlock) "
    "or bubblewrap (apt install bubblewrap, user namespaces); sandbox: none runs code unconfined"
)
_HERE = Path(__file__).parent
_MIB = 1 << 20
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_INSIDE, _SHARED = "/sandbox", "/dev/shm"
_PROGRAM = "/run/turnwise.py"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one sandbox."""

    seconds: float = 10.0
    """Seconds for one call."""
    memory: int = 512
    """MiB of memory, of each process and of all together."""
    disk: int = 64
    """MiB of files."""
    processes: int = 32
    """Largest number of processes and threads."""
    interpreter: str | None = None
    """Python's executable; its folder becomes readable. None is this process's Python, without the
    packages of its virtual environment."""


@lru_cache
def _python(interpreter: str | None) -> tuple[str, tuple[str, ...]]:
    """Return an interpreter's executable and the folders that it reads, but for the system's."""
    if interpreter is None:
        executable, prefixes = os.path.realpath(sys.executable), [sys.base_prefix]
    else:
        ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
        try:
            command = [interpreter, "-I", "-c", ask]
            said = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise InputError(f"interpreter: {interpreter} does not run ({error})") from None
        executable, prefixes = os.path.abspath(interpreter), json.loads(said)
    folders = {prefix for prefix in prefixes if not Path(prefix).is_relative_to("/usr")}
    return executable, tuple(sorted(folders - {"/"}))


def specify(backend: Backend, limits: Limits, *, shell: bool, lifeline: int) -> JsonObject:
    """Return the keeper's specification of a new sandbox; makes its scratch folder.

    Args:
        lifeline: File descriptor whose end ends the sandbox.
    """
    executable, prefixes = _python(limits.interpreter)
    root = os.geteuid() == 0
    # As root, every sandbox has a user of its own: root would own the system's files, and the
    # kernel counts processes by user.
    uid = (1 << 30) + secrets.randbelow(1 << 29) if root and backend != "none" else None
    inside: JsonObject = {
        "shell": shell,
        "memory": limits.memory * _MIB,
        "disk": limits.disk * _MIB,
        "processes": None,
        "uid": uid,
        "reads_all": backend == "sandlock",
        "filter": None,
    }
    if backend != "none":
        inside["filter"] = filter_program(attributes=backend == "bubblewrap").hex()
    if backend == "bubblewrap" or uid is not None:
        inside["processes"] = limits.processes
    scratch = None if backend == "bubblewrap" else _scratch(uid)
    program = _PROGRAM if backend == "bubblewrap" else str(_HERE / "inner.py")
    command = [executable, "-I", program, json.dumps(inside)]
    home = scratch or _INSIDE
    environment = {
        "PATH": f"{Path(executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    spec: JsonObject = {
        "lifeline": lifeline,
        "memory": limits.memory * _MIB,
        "disk": limits.disk * _MIB,
        "scratch": scratch,
        "mounted": [_INSIDE, _SHARED] if backend == "bubblewrap" else [],
        "environment": environment,
        "command": command,
    }
    if backend == "bubblewrap":
        spec["command"] = [*_bubblewrap(prefixes, limits, root), *command]
    elif backend == "sandlock":
        options = {
            "fs_readable": [
                *filter(os.path.exists, (*_SYSTEM, *_SYSTEM_FILES, *_DEVICES)),
                *prefixes,
                program,
            ],
            "fs_writable": [home, "/dev/null"],
            "cwd": home,
            "clean_env": True,
            "env": environment,
            "max_processes": limits.processes,
            "no_coredump": True,
        }
        spec["sandlock"] = {"path": _folder_of("sandlock"), "options": options}
    return spec


def _scratch(uid: int | None) -> str:
    folder = tempfile.mkdtemp(prefix="turnwise-sandbox-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise InputError(MISSING)
    return str(Path(found.origin).parents[1])


def _bubblewrap(prefixes: Sequence[str], limits: Limits, root: bool) -> list[str]:
    """Return bubblewrap's command line, up to the command to run."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if root:  # the program inside changes its user, and drops both
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            command += ["--ro-bind", folder, folder]
    for path in (*_SYSTEM_FILES, *prefixes):
        for parent in reversed(Path(path).parents[:-1]):  # or it copies the modes of the host's
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    size = str(limits.disk * _MIB)
    for folder in (_INSIDE, _SHARED):
        command += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    if not any(Path(prefix).is_relative_to("/tmp") for prefix in prefixes):
        command += ["--symlink", _INSIDE, "/tmp"]
    command += ["--ro-bind", str(_HERE / "inner.py"), _PROGRAM]
    return [*command, "--remount-ro", "/", "--chdir", _INSIDE]
