"""The backends of a sandbox, the keeper's specification for each backend, and the filter of system
calls.

The filter is a handwritten BPF program. It refuses system calls that a backend alone would allow,
or that a model's code never needs: kernel interfaces with a history of defects, memory outside the
limits, priorities of other processes, new namespaces, and all sockets except Unix sockets.
"""

import importlib.util
import json
import os
import platform
import secrets
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from turnwise.config.rollout import CodeToolConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError

Engine = Literal["docker", "podman"]
Backend = Literal["sandlock", "bubblewrap", "none", Engine]
ENGINES: Final[tuple[Engine, ...]] = ("docker", "podman")
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


@lru_cache
def _python(interpreter: str | None) -> tuple[str, tuple[str, ...]]:
    """Return an interpreter's executable, and the folders outside /usr that the interpreter
    reads."""
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


def specify(backend: Backend, limits: CodeToolConfig, *, shell: bool, lifeline: int) -> JsonObject:
    """Return the keeper's specification of a new sandbox, and make the sandbox's scratch folder if
    the backend needs one. The sandbox ends when the other end of the pipe `lifeline` is closed."""
    root, kernel = os.geteuid() == 0, backend in ("sandlock", "bubblewrap")
    # If this process is root, every sandbox gets its own user id, because root owns the system's
    # files, and the kernel counts processes by user.
    uid = (1 << 30) + secrets.randbelow(1 << 29) if root and kernel else None
    bubblewrap, sandlock = backend == "bubblewrap", backend == "sandlock"
    inside: JsonObject = {
        "shell": shell,
        "memory": limits.memory * _MIB,
        "disk": limits.disk * _MIB,
        "processes": limits.processes if bubblewrap or uid is not None else None,
        "uid": uid,
        "reads_all": sandlock,
        "filter": filter_program(attributes=bubblewrap).hex() if kernel else None,
    }
    if backend == "docker" or backend == "podman":
        return _container(backend, limits, inside, lifeline)
    executable, prefixes = _python(limits.interpreter)
    scratch = None if bubblewrap else tempfile.mkdtemp(prefix="turnwise-sandbox-")
    if scratch is not None and uid is not None:
        os.chown(scratch, uid, uid)
    program = _PROGRAM if bubblewrap else str(_HERE / "inner.py")
    command = [executable, "-I", program, json.dumps(inside)]
    home = scratch or _INSIDE
    environment = {
        "PATH": f"{Path(executable).parent}:/usr/local/bin:/usr/bin:/bin",
        **{"HOME": home, "TMPDIR": home},
        "LANG": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    spec: JsonObject = {
        "lifeline": lifeline,
        "memory": limits.memory * _MIB,
        "disk": limits.disk * _MIB,
        "scratch": scratch,
        "mounted": [_INSIDE, _SHARED] if bubblewrap else [],
        "environment": environment,
        "command": command,
    }
    if bubblewrap:
        spec["command"] = [*_bubblewrap(prefixes, limits, root), *command]
    elif sandlock:
        readable = filter(os.path.exists, (*_SYSTEM, *_SYSTEM_FILES, *_DEVICES))
        options = {
            "fs_readable": [*readable, *prefixes, program],
            "fs_writable": [home, "/dev/null"],
            "cwd": home,
            "clean_env": True,
            "env": environment,
            "max_processes": limits.processes,
            "no_coredump": True,
        }
        found = importlib.util.find_spec("sandlock")
        if found is None or found.origin is None:
            raise InputError(MISSING)
        spec["sandlock"] = {"path": str(Path(found.origin).parents[1]), "options": options}
    return spec


def _bubblewrap(prefixes: Sequence[str], limits: CodeToolConfig, root: bool) -> list[str]:
    """Return bubblewrap's command line, up to the command to run."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if root:  # the program inside changes its user, and so drops both capabilities
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for folder in _SYSTEM:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            command += ["--ro-bind", folder, folder]
    for path in (*_SYSTEM_FILES, *prefixes):
        # Make the parents first, because bubblewrap would copy their modes from the host.
        for parent in reversed(Path(path).parents[:-1]):
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


def _container(
    engine: Engine, limits: CodeToolConfig, inside: JsonObject, lifeline: int
) -> JsonObject:
    """Return the specification of a session in a new container; `inside` is the specification for
    the program in the container."""
    program, name = shutil.which(engine) or engine, f"turnwise-{secrets.token_hex(8)}"
    memory, disk = f"{limits.memory}m", f"size={limits.disk}m"
    options = {
        "name": name,
        "label": "turnwise",
        "pull": "never",
        "log-driver": "none",  # a log of the output would fill the machine's disk
        "network": "none",
        "memory": memory,
        "memory-swap": memory,  # no swap
        "shm-size": f"{limits.disk}m",
        "pids-limit": str(limits.processes + 1),  # one more for the init process
        "cap-drop": "ALL",
        "security-opt": "no-new-privileges",
        "user": "65534:65534",
        "entrypoint": limits.interpreter or "python3",
    }
    # An init process reaps ended background processes, which would otherwise count against the
    # limit.
    command = [program, "run", "-i", "--init", "--read-only"]
    command += [f"--{key}={value}" for key, value in options.items()]
    # No --workdir, because docker would make a folder that only root may use; inner.py changes to
    # the folder instead.
    for folder in (_INSIDE, "/tmp"):
        command.append(f"--tmpfs={folder}:rw,exec,nosuid,nodev,mode=1777,{disk}")
    command += [f"--env={key}={_INSIDE}" for key in ("HOME", "TMPDIR")] + ["--env=LANG=C.UTF-8"]
    at_once: list[str] = []
    if engine == "podman":
        # Podman's own tmpfs mounts have no limit, and a proxy's URL may contain a password.
        command += ["--read-only-tmpfs=false", "--http-proxy=false"]
        at_once = ["-t", "0"]  # otherwise podman waits after SIGTERM
    # The program is an argument. Nothing is mounted, because the engine may be on another machine.
    inner, given = (_HERE / "inner.py").read_text(), json.dumps(inside | {"one_stream": True})
    return {
        "lifeline": lifeline,
        "scratch": None,
        "environment": None,  # the keeper's own environment
        "command": [*command, limits.image, "-I", "-c", inner, given],
        "end": [program, "rm", "-f", *at_once, name],
    }


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_ARCH, _NUMBER, _FIRST_ARGUMENT = 4, 0, 16
_NAMESPACES = 0x7E020080
"""Flags of `clone` that begin a new namespace."""
_AF_UNIX = 1
_X32 = 0x40000000

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SPECIAL = {"clone": (56, 220), "clone3": (435, 435), "prlimit64": (302, 261), "socket": (41, 198)}
_Numbers = dict[str, tuple[int | None, int | None]]
"""Names of system calls, each with its numbers on x86_64 and aarch64."""
_REFUSED: dict[str, _Numbers] = {
    "memory outside the limits": {
        "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
        "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    },
    "other processes": {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
        "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
        "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    },
    "mounts and namespaces": {
        "mount": (165, 40), "umount2": (166, 39), "fsopen": (430, 430), "fsmount": (432, 432),
        "fsconfig": (431, 431), "fspick": (433, 433), "move_mount": (429, 429),
        "open_tree": (428, 428), "mount_setattr": (442, 442), "pivot_root": (155, 41),
        "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    },
    "the kernel": {
        "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
        "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
        "request_key": (249, 218), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
        "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
        "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
        "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
        "personality": (135, 92), "quotactl": (179, 60), "acct": (163, 89),
        "fanotify_init": (300, 262), "syslog": (103, 116), "settimeofday": (164, 170),
        "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
        "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
        "lookup_dcookie": (212, 18),
    },
}  # fmt: skip
_ATTRIBUTES: _Numbers = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "inotify_init": (253, None),
    "inotify_init1": (294, 26),
}  # fmt: skip
"""System calls that Landlock does not limit to a folder: they work on any path."""


def filter_program(*, attributes: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter` for this machine's architecture. With
    `attributes`, the filter allows changes of files' modes, owners, times and attributes."""
    audit, column = ARCHITECTURES[platform.machine()]
    groups = (*_REFUSED.values(), {} if attributes else _ATTRIBUTES)
    refused = [call[column] for group in groups for call in group.values()]
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    code.append((_LOAD, 0, 0, _NUMBER))
    if column == 0:
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    for number in refused:
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _EPERM)]
    numbers = {name: call[column] for name, call in _SPECIAL.items()}
    # clone3's flags are in memory, which a filter cannot read. If clone3 fails with ENOSYS,
    # libraries use clone.
    code += [(_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    code += _argument(numbers["clone"], _ANY_BIT, _NAMESPACES, matches=_REFUSE | _EPERM)
    code += _argument(numbers["prlimit64"], _EQUAL, 0, matches=_ALLOW)  # 0 is the own process
    code += _argument(numbers["socket"], _EQUAL, _AF_UNIX, matches=_ALLOW)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _argument(
    number: int, test: int, value: int, *, matches: int
) -> list[tuple[int, int, int, int]]:
    """Return the instructions that decide a system call by its first argument."""
    otherwise = _ALLOW if matches != _ALLOW else _REFUSE | _EPERM
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (test, 0, 1, value),
        (_RETURN, 0, 0, matches),
        (_RETURN, 0, 0, otherwise),
    ]
