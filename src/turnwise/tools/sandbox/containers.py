"""Sandboxes in containers of docker or podman, by their command lines: one for each session.

The program inside is an argument of its interpreter, so nothing is mounted, also where the daemon
is on another machine. The kernel's groups limit memory, processor time and processes; the keeper
removes the container.
"""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Final, Literal

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.json_types import JsonObject

Engine = Literal["docker", "podman"]
ENGINES: Final[tuple[Engine, ...]] = ("docker", "podman")
_INNER = Path(__file__).with_name("inner.py")
_PROGRAM = (
    "import sys; exec(compile(sys.argv.pop(1), 'turnwise.py', 'exec'), "
    "{'__name__': '__main__', '__file__': 'turnwise.py'})"
)
_FOLDERS = ("/sandbox", "/tmp")
_NOBODY = "65534:65534"
_CLIENTS = ("PATH", "HOME", "USER", "XDG_", "DOCKER_", "CONTAINER", "DBUS_")
"""Beginnings of the variables of this process that the command line needs."""


def specify_container(
    engine: Engine, limits: CodeToolConfig, inside: JsonObject, lifeline: int
) -> JsonObject:
    """Return the keeper's specification of a session in a new container; `inside` is that of the
    program."""
    program, name = shutil.which(engine) or engine, f"turnwise-{secrets.token_hex(8)}"
    memory, disk = f"{limits.memory}m", f"size={limits.disk}m"
    options = {
        "name": name,
        "label": "turnwise",
        "pull": "never",
        "log-driver": "none",  # its output would fill the machine's disk
        "network": "none",
        "memory": memory,
        "memory-swap": memory,  # no swap
        "shm-size": f"{limits.disk}m",
        "cpus": f"{limits.cpus:g}",
        "pids-limit": str(limits.processes),
        "cap-drop": "ALL",
        "security-opt": "no-new-privileges",
        "user": _NOBODY,
        "hostname": "sandbox",
        "workdir": _FOLDERS[0],
        "entrypoint": limits.interpreter or "python3",
    }
    variables = {"HOME": _FOLDERS[0], "TMPDIR": _FOLDERS[0], "LANG": "C.UTF-8"}
    command = [program, "run", "-i", "--read-only"]
    command += [f"--{key}={value}" for key, value in options.items()]
    command += [f"--tmpfs={folder}:rw,exec,nosuid,nodev,mode=1777,{disk}" for folder in _FOLDERS]
    command += [f"--env={key}={value}" for key, value in variables.items()]
    if engine == "podman":
        command.append("--read-only-tmpfs=false")  # those have no limit
    given = json.dumps(inside | {"one_stream": True})
    command += [limits.image, "-I", "-c", _PROGRAM, _INNER.read_text(), given]
    at_once = ["-t", "0"] if engine == "podman" else []  # it waits for SIGTERM otherwise
    return {
        "lifeline": lifeline,
        "scratch": None,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_CLIENTS)},
        "command": command,
        "end": [program, "rm", "-f", *at_once, name],
    }
