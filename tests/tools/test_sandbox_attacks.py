"""Attacks of code on its sandbox: what docs/how-to/sandbox.md promises, for each backend.

An attack prints BREACH where it succeeds, and what stopped it otherwise. The test expects the
latter, so that an attack that never ran cannot pass, and then looks at the host.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import sandboxes
from tests.tools.sandboxes import BACKENDS, session
from turnwise.config.rollout import CodeToolConfig as Limits
from turnwise.tools.code import CodeSession

SECRET = "correct-horse-battery-staple"
LIMITS = Limits(timeout=8.0, memory=128, disk=16, processes=16)
SHORT = Limits(timeout=0.3, memory=128, disk=16, processes=16)
DENIED = "PermissionError|OSError|FileNotFoundError|ProcessLookupError"

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
"""The number of a refused call is printed with its error number."""

ATTACKS: dict[str, tuple[str, str]] = {
    # The network.
    "tcp": ("import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('BREACH')",
            DENIED),
    "udp": (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', {port})); print('BREACH')", DENIED),
    "dns": ("import socket; socket.getaddrinfo('example.com', 80); print('BREACH')", "gaierror"),
    "listening": ("import socket; s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()\n"
                  "print('BREACH')", DENIED),
    "unix socket": ("import socket; s = socket.socket(socket.AF_UNIX); s.connect({unix!r})\n"
                    "print('BREACH')", DENIED + "|ConnectionRefusedError"),
    "abstract socket": (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + {abstract!r})\n"
        "print('BREACH')", DENIED + "|ConnectionRefusedError"),
    "raw sockets": (
        "import socket\n"
        "for family, kind in [(17, 3), (40, 1), (16, 3), (38, 5), (2, 3)]:\n"
        "    try:\n"
        "        socket.socket(family, kind); print('BREACH', family)\n"
        "    except OSError as error: print('refused', error)", "refused"),
    # Secrets.
    "environment": (
        "import os; print(dict(os.environ)); held = 0\n"
        "for pid in [p for p in range(1, 200)] + [os.getppid(), {driver}]:\n"
        "    for name in ('environ', 'cmdline', 'mem'):\n"
        "        try: print(open(f'/proc/{{pid}}/{{name}}', 'rb').read(20000))\n"
        "        except OSError: held += 1\n"
        "print(held, 'refused')", r"\d+ refused"),
    "home": (
        "import os\n"
        "for path in ({folder!r}, {home!r}, '/home', '/etc'):\n"
        "    try:\n"
        "        names = os.listdir(path)\n"
        "        print('BREACH' if {secret_name!r} in names or 'shadow' in names else 'absent')\n"
        "    except OSError as error: print('refused', error)", "refused|absent"),
    "secret file": ("print(open({secret!r}).read())", DENIED),
    "shadow": ("print('BREACH', open('/etc/shadow').read())", DENIED),
    "symlink": ("import os; os.symlink({secret!r}, 'link'); print(open('link').read())", DENIED),
    "hard link": ("import os; os.link({secret!r}, 'hard'); print(open('hard').read())", DENIED),
    "root of /proc": ("print(open('/proc/self/root' + {secret!r}).read())", DENIED),
    "source of the project": ("print('BREACH', open({source!r}).read(10))", DENIED),
    # Writes.
    "writes outside": (
        "import os\n"
        "for folder in ({folder!r}, '/etc', '/usr', '/var/tmp', '/dev', '/', '/proc/sys/kernel',\n"
        "               os.path.dirname(os.__file__)):\n"
        "    try:\n"
        "        open(folder + '/' + {mark!r}, 'w'); print('BREACH', folder)\n"
        "    except OSError as error: print('refused', error)", "refused"),
    "attributes outside": (
        "import os\n"
        "for change in (lambda p: os.chmod(p, 0o777), lambda p: os.utime(p, (1, 1)),\n"
        "               lambda p: os.truncate(p, 0), os.remove, lambda p: os.rename(p, 'x')):\n"
        "    try:\n"
        "        change({secret!r}); print('BREACH')\n"
        "    except OSError as error: print('refused', error)", "refused"),
    "kernel settings": ("open('/proc/sys/kernel/core_pattern', 'w').write('x'); print('BREACH')",
                        DENIED),
    "raw devices": (
        "import os, stat\n"
        "for path in ('/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/kvm', '/dev/fuse'):\n"
        "    try:\n"
        "        os.open(path, os.O_RDONLY); print('BREACH', path)\n"
        "    except OSError as error: print('refused', error)\n"
        "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))\n"
        "os.open('disk', os.O_RDONLY); print('BREACH')", DENIED),
    # Privileges.
    "setuid": (
        "import os\n"
        "for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0])):\n"
        "    try: change()\n"
        "    except OSError as error: print('refused', error)\n"
        "status = open('/proc/self/status').read() if os.path.exists('/proc/self/status') else ''\n"
        "if os.getuid() == 0: print('BREACH')", "refused"),
    "setuid programs": (
        "import subprocess\n"
        "said = subprocess.run(['su', '-c', 'echo BRE''ACH'], capture_output=True, text=True)\n"
        "print('refused', said.stdout, said.returncode)", r"refused\s+[1-9-]|FileNotFoundError"),
    "mount": (LIBC + "print('refused', libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
              "refused -1"),
    "namespaces": (LIBC + "print('refused', [libc.unshare(flag) for flag in "
                   "(0x10000000, 0x20000, 0x20000000, 0x40000000)])",
                   r"refused \[-1, -1, -1, -1\]"),
    "namespaces by clone": (LIBC + "print('refused', libc.syscall(56, 0x10000011, 0, 0, 0, 0))",
                            "refused -1"),
    "kernel interfaces": (
        LIBC + "numbers = {{'bpf': 321, 'perf': 298, 'userfaultfd': 323, 'io_uring': 425, 'keyctl':"
        " 250, 'memfd': 319, 'shmget': 29, 'handle': 304, 'module': 175, 'kexec': 246}}\n"
        "print({{name: libc.syscall(number, 0, 64, 0o1600) for name, number in numbers.items()}}"
        ", 'refused')", r"^\{('\w+': -1(, )?){10}\} refused"),
    "the clock": ("import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); "
                  "print('BREACH')", DENIED),
    # Other processes.
    "killing": (
        "import os, signal\n"
        "for pid in ({driver}, {other}, os.getppid() if os.getppid() > 1 else {driver}):\n"
        "    try: os.kill(pid, signal.SIGKILL); print('BREACH', pid)\n"
        "    except OSError as error: print('refused', error)", "refused"),
    "killing everybody": (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "try: os.kill(-1, signal.SIGTERM)\n"
        "except OSError as error: print(error)\n"
        "print('tried')", "tried"),
    "ptrace": (LIBC + "print('refused', [libc.ptrace(16, pid, 0, 0) for pid in "
               "({driver}, {other}, os.getppid())])", r"refused \[-1, -1, -1\]"),
    "memory of others": (
        LIBC + "buffer = ctypes.create_string_buffer(64)\n"
        "print('refused', [libc.syscall(310, pid, buffer, 1, buffer, 1, 0) for pid in "
        "({driver}, {other})])", r"refused \[-1, -1\]"),
    "limits of others": (
        "import resource, os\n"
        "for pid in ({driver}, {other}):\n"
        "    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (9, 9)); print('BREACH')\n"
        "    except OSError as error: print('refused', error)\n"
        "    for change in (lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),\n"
        "                   lambda: os.sched_setaffinity(pid, [0])):\n"
        "        try: change(); print('BREACH')\n"
        "        except OSError as error: print('refused', error)", "refused"),
    # Exhaustion.
    "1 GB of memory": ("x = bytearray(1 << 30); print('BREACH')", "MemoryError"),
    "memory of many processes": (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if not os.fork():\n"
        "        x = bytearray(60 << 20); time.sleep(30); os._exit(0)\n"
        "time.sleep(6); print('BREACH')", r"stopped: more than 128 MiB of memory"),
    "shared memory": (
        "import mmap\n"
        "x = mmap.mmap(-1, 1 << 30); x.write(bytes(1 << 30)); print('BREACH')",
        "MemoryError|Cannot allocate|OSError"),
    "files of /dev/shm": (
        "f = open('/dev/shm/x', 'wb', 0)\n"
        "for _ in range(64): f.write(bytes(1 << 20))\n"
        "print('BREACH')", DENIED),
    "1 GB file": (
        "with open('big', 'wb', 0) as f:\n"
        "    for _ in range(1024):\n"
        "        if f.write(bytes(1 << 20)) < 1 << 20: raise OSError('a short write')\n"
        "print('BREACH')", "OSError|stopped: more than 16 MiB"),
    "many files": (
        "import time\n"
        "for n in range(64):\n"
        "    with open(f'f{{n}}', 'wb', 0) as f: f.write(bytes(1 << 20))\n"
        "time.sleep(5); print('BREACH')", "OSError|stopped: more than 16 MiB"),
    "empty files": (
        "import os, time\n"
        "for n in range(30_000): os.close(os.open(f'e{{n}}', os.O_CREAT))\n"
        "time.sleep(5); print('BREACH')", "or too many|OSError"),
    "fork bomb": (
        "import os, time\n"
        "try:\n"
        "    for n in range(400):\n"
        "        if not os.fork(): time.sleep(60); os._exit(0)\n"
        "except OSError as error: print(error)\n"
        "print('BREACH' if n > 20 else 'stopped at', n)", r"stopped at \d+"),
    "threads": (
        "import threading, time\n"
        "for n in range(400):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('BREACH')", "can't start new thread|ended"),
    "deep recursion": (
        "import sys; sys.setrecursionlimit(10**9)\n"
        "def f(): f()\n"
        "f()", "ended|RecursionError|MemoryError|SystemError"),
    "open files": ("files = [open('/dev/null') for _ in range(1000)]; print('BREACH')",
                   "Too many open files"),
    # The protocol.
    "flood": ("import os\nfor _ in range(400): os.write(1, b'x' * 1_000_000)", "bytes left out"),
    "flood of answers": (
        "import os\n"
        "for fd in range(3, 40):\n"
        "    try:\n"
        "        for _ in range(100): os.write(fd, b'{{\"nonce\": 1}}\\nready\\n' * 5000)\n"
        "    except OSError: pass\n"
        "print('tried')", "tried|ended"),
    "forged answer": (
        "import sys, os, time\n"
        "frame = sys._getframe()\n"
        "while 'request' not in frame.f_locals: frame = frame.f_back\n"
        "names = frame.f_locals\n"
        "os.write(names['answers'], names['request']['nonce'].encode() + b'\\n')\n"
        "time.sleep(0.3); print('late')", r"no output|late"),
    "closed descriptors": ("import os; print('tried', flush=True); os.closerange(0, 300)", "tried"),
    "an error that cannot be shown": (
        "class E(BaseException):\n"
        "    def __str__(self): raise SystemExit(3)\n"
        "raise E", "E"),
    "a forked copy of the interpreter": (
        "import os, time\n"
        "if os.fork() == 0: 1 / 0\n"
        "time.sleep(0.3); 'parent'", "parent"),
}  # fmt: skip

ENDLESS = {
    "a loop": ("print('partial', end='')\nwhile True: pass", r"partial.*(?s:.*)interrupted after"),
    "a loop in C": ("print('partial', flush=True); sum(iter(int, 1))",
                    r"partial\s+\[stopped after 0.3 s; variables and files are lost\]"),
    "no signals": (
        "import signal\n"
        "for number in range(1, 32):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\n"
        "while True: pass", "stopped after 0.3 s"),
}  # fmt: skip


class Host:
    """What attacks aim at on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.chmod(0o777)
        self.secret = folder / "secret.txt"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o666)
        self.before = self.secret.stat()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "u"))
        (folder / "u").chmod(0o777)
        self.abstract = f"turnwise-{os.getpid()}"
        self.hidden = socket.socket(socket.AF_UNIX)
        self.hidden.bind(f"\0{self.abstract}")
        self.servers = [self.tcp, self.unix, self.hidden]
        for server in self.servers:
            server.listen()
            server.setblocking(False)
        self.other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def fill(self, code: str) -> str:
        """Return an attack with this host's targets; its source does not contain BREACH."""
        return code.replace("'BREACH'", "'BRE' 'ACH'").format(
            port=self.tcp.getsockname()[1],
            unix=str(self.folder / "u"),
            abstract=self.abstract,
            driver=os.getpid(),
            other=self.other.pid,
            folder=str(self.folder),
            home=str(Path.home()),
            secret=str(self.secret),
            secret_name=self.secret.name,
            source=__file__,
            mark=f"mark-{os.getpid()}",
        )

    def check(self) -> None:
        """Fail if an attack changed something."""
        for server in self.servers:
            with pytest.raises(BlockingIOError):
                server.accept()
        assert self.other.poll() is None
        assert self.secret.read_text() == SECRET
        after = self.secret.stat()
        assert (after.st_mode, after.st_mtime) == (self.before.st_mode, self.before.st_mtime)
        assert sorted(os.listdir(self.folder)) == ["secret.txt", "u"]

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.other.kill()
        self.other.wait()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    os.environ["TURNWISE_TEST_SECRET"] = SECRET
    host = Host(tmp_path_factory.mktemp("host"))
    yield host
    host.close()
    del os.environ["TURNWISE_TEST_SECRET"]


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[CodeSession]:
    opened = session(request.param, LIMITS)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_and_the_next_call_is_answered(
    sandbox: CodeSession, host: Host, name: str
) -> None:
    code, expected = ATTACKS[name]
    text = sandbox.run(host.fill(code))
    assert "BREACH" not in text
    assert SECRET not in text
    assert re.search(expected, text), text
    assert len(text) < 9000
    host.check()
    assert re.search(r"(^|\n)42$", sandbox.run("6 * 7"))
    assert "lost]" in sandbox.run("import os; os._exit(0)")  # the next attack has a new sandbox


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_code_is_ended(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.tools.code.GRACE_SECONDS", 0.5)
    code, expected = ENDLESS[name]
    opened = session(backend, SHORT)
    try:
        assert re.search(expected, opened.run(code))
        assert opened.run("6 * 7") == "42"
    finally:
        opened.close()


DAEMON = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execlp("sleep", "sleep", "{seconds}")
    os._exit(0)
os.wait(); time.sleep(0.2); "started"
"""


def processes(seconds: int) -> list[str]:
    """Return the processes `sleep SECONDS` of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(folder.name)
        except OSError:
            continue
    return found


def gone(seconds: int) -> bool:
    """Return whether all processes `sleep SECONDS` end within a minute."""
    ends = time.monotonic() + 60
    while processes(seconds) and time.monotonic() < ends:
        time.sleep(0.02)
    return not processes(seconds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_daemon_does_not_outlive_its_session(backend: str) -> None:
    opened, seconds = session(backend, LIMITS), 100_000 + os.getpid()
    assert opened.run(DAEMON.format(seconds=seconds)) == "'started'"
    assert processes(seconds)
    opened.close()
    assert gone(seconds)


DRIVER = """
import sys, time
from turnwise.config.rollout import CodeToolConfig as Limits
from turnwise.tools.code import CodeSession
session = CodeSession(sys.argv[1], Limits())
print(session.run(sys.argv[2]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_outlives_a_driver_that_is_killed(backend: str) -> None:
    name, seconds = sandboxes.backend(backend), 200_000 + os.getpid()
    command = [sys.executable, "-c", DRIVER, name, DAEMON.format(seconds=seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"'started'\n"
        assert processes(seconds)
        driver.send_signal(signal.SIGKILL)
    assert gone(seconds)
