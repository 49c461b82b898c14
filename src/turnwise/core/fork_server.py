"""A process that imports vLLM and torch once, and is forked for every worker; and its client.

    program ── starts ──> fork server ── forks ──> Ray workers, engine processes
       └── starts ──> raylet ── starts ──> client ── asks ──> fork server

A fork is killed when the connection of its client closes, or when the server ends. The server must
therefore survive a lack of processes, memory or descriptors: it refuses one client, or lets that
client wait. Used on machines without a GPU: a process that has touched CUDA must not fork.
The variable `TURNWISE_FORK_SERVER` disables the server if it is `off`, or has the path of a server
that is already running.

The client is this file as a program, `python -I -S fork_server.py SOCKET ARGUMENT...`: it runs
`python ARGUMENT...` as a fork. To start in hundredths of a second, it needs only the imports at the
top; all other imports are in the functions of the server.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from turnwise.core.json_types import JsonObject

    Request = tuple[JsonObject, list[int]]
    """A request, and the descriptors that came with it: the standard streams first."""

VARIABLE = "TURNWISE_FORK_SERVER"
CLIENT = __file__
SPIN_COUNT = "2000"
"""Number of times that an idle OpenMP thread looks for work before it sleeps."""
SENDING_SECONDS = 10.0  # deadline for sending a request; other clients wait meanwhile
PRELOADED = (
    "turnwise.engine.preload",
    "turnwise.serving.openai.server",
    "turnwise.serving.openai.serving_host",
    "turnwise.training.rank",
    "turnwise.observe.trackers",
    "typer",
    "rich.live",
    "setproctitle",
)
"""Modules that the server imports before it forks."""
_NVIDIA = "/dev/nvidiactl"
_FORKSERVER = "multiprocessing.forkserver"
_STREAMS = 3  # number of standard streams that come with a request, before its other descriptors
_MAX_REQUEST = 2**24
_LACK_SECONDS = 0.1  # pause after a client for which there is no descriptor
_SET_PDEATHSIG = 1
_FROM_RAY = "--language=PYTHON"
_RAY_CONTEXT = "--serialized-runtime-env-context="


# The client


def _run_as_fork() -> None:
    """Run the program of this command line as a fork, forward signals to it, and end with its
    status; if no server listens, this process becomes the program."""
    # Ray starts its workers with this program instead of its own `setup_worker.py`, and passes the
    # runtime environment, which holds secrets, as an argument. Everyone on the machine can read the
    # arguments of a process, so move the secrets to the environment, and execute this program
    # again.
    if _FROM_RAY in sys.argv:
        own = []
        for argument in sys.argv[1:]:
            if argument.startswith(_RAY_CONTEXT):
                passed = json.loads(argument.removeprefix(_RAY_CONTEXT))
                os.environ.update(passed.get("env_vars", {}))
            elif argument != _FROM_RAY:
                own.append(argument)
        os.execv(sys.executable, [*command(os.environ.get(VARIABLE, "")), *own])
    path, arguments = sys.argv[1], sys.argv[2:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        ask(connection, _like_this(arguments))
        replies = connection.makefile()
        pid = int(replies.readline())
    except (OSError, ValueError):
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    if not (ended := replies.readline()):  # the server has ended, and the fork with it
        os._exit(1)
    status = int(ended)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def command(server: str) -> list[str]:
    """Return the words that replace `python` in a command line, so that the program is forked."""
    return [sys.executable, "-I", "-S", CLIENT, server]


def _like_this(arguments: list[str]) -> "JsonObject":
    """Return a request for a process with the working directory and environment of this one."""
    return {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}


def ask(connection: socket.socket, request: "JsonObject", *more: int) -> None:
    """Send a fork server a request, with the standard streams and further descriptors."""
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2, *more])
    connection.sendall(body)


# The server, from its owner's side


class ForkServer:
    """The server's process, owned by the program that starts it.

    The command is `python -m MODULE LISTENER ALIVE ARGUMENT...`; the module passes the two
    descriptors to `serve`."""

    def __init__(
        self, module: str = "turnwise.core.fork_server", arguments: Sequence[str] = ()
    ) -> None:
        import subprocess
        from tempfile import TemporaryDirectory

        self._folder = TemporaryDirectory(prefix="turnwise-fork-")
        self.address = os.path.join(self._folder.name, "socket")
        variables = {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not take processor time from engines
            # But idle threads spin for about 30 us, because a small operation takes less time than
            # waking a thread that sleeps.
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TOKENIZERS_PARALLELISM": "false",
            # Getting a new memory page costs more than copying one, so matrices get huge pages, and
            # all threads share a heap, so that a thread that packs weights can reuse freed memory.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1"),
        }
        read, self._alive = os.pipe()
        try:
            # Bind here, so that a client can connect, and wait, before the imports are done.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(self.address)
                listener.listen(128)
                descriptors = (listener.fileno(), read)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, descriptors), *arguments],
                    env=os.environ | variables,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the program
                )
        except OSError:
            os.close(self._alive)
            raise
        finally:
            os.close(read)
        self.pid = self.process.pid

    def close(self) -> None:
        """End the server and all of its forks."""
        from subprocess import TimeoutExpired

        os.close(self._alive)
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(5.0)
        self._folder.cleanup()


_own: ForkServer | None = None
_connections: list[socket.socket] = []  # kept open, because closing one kills its fork


def address() -> str | None:
    """Return the address of this program's fork server, started on the first call; None if it is
    off."""
    global _own
    known = os.environ.get(VARIABLE)
    if known == "off" or (known is None and os.path.exists(_NVIDIA)):
        return None
    if known is None and _own is None:
        import atexit

        _own = server = ForkServer()

        @atexit.register
        def close() -> None:
            with contextlib.suppress(ValueError):  # only the main thread can set handlers
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C interrupts nothing
            server.close()

    return known or (None if _own is None else _own.address)


def share_with_engines() -> bool:
    """Make multiprocessing's start method `forkserver` fork from a fork of the server; return
    False if no server can be reached."""
    from multiprocessing.util import get_temp_dir

    from turnwise.internals import python

    if python.knows_fork_server():
        return True
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    asking.settimeout(SENDING_SECONDS)
    try:
        asking.connect(os.environ.get(VARIABLE) or ("" if _own is None else _own.address))
    except OSError:
        return False
    place = os.path.join(get_temp_dir(), "forkserver")
    read, alive = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(place)
        listener.listen()
        ask(asking, _like_this([_FORKSERVER]), listener.fileno(), read)
    _connections.append(asking)
    os.close(read)
    python.use_fork_server(place, alive)
    return True


# The server's loop


def serve(listener: socket.socket, alive: int, *, end_groups: bool = False) -> "Request | None":
    """Fork for each request until `alive` is closed, then return None; in each fork, return the
    request. If `end_groups`, kill the rest of a fork's process group once the fork has ended."""
    server = _Server(listener, alive, end_groups)
    while True:
        for key, _ in server.selector.select():
            if key.fileobj is listener:
                if (request := server.fork()) is not None:
                    return request
            elif key.fileobj is server.woken:
                server.reap()
            elif key.fileobj == alive:
                server.end()
                return None
            else:
                server.leave(key.data)


class _Server:
    """The server's forks, and the selector with which it waits for their ends and for clients."""

    def __init__(self, listener: socket.socket, alive: int, end_groups: bool) -> None:
        import ctypes

        from turnwise.core.child import kill_group

        self._listener, self._alive, self._end_groups = listener, alive, end_groups
        self._kill_group = kill_group
        self._pid = os.getpid()
        self._libc = ctypes.CDLL(None)
        self._children: dict[int, socket.socket] = {}
        """Connections of the clients by the process ids of their forks."""
        self._wake, self.woken = socket.socketpair()
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector = selectors.DefaultSelector()
        for watched in (listener, alive, self.woken):
            self.selector.register(watched, selectors.EVENT_READ)

    def fork(self) -> "Request | None":
        """Fork for the next client; in the fork, return its request."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(_LACK_SECONDS)
            return None
        if (request := _receive(connection)) is None:
            connection.close()
            return None
        try:
            # Register the client before the fork, so that no fork runs without being watched.
            self.selector.register(connection, selectors.EVENT_READ)
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"no process can be forked: {error}\n")
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            connection.close()
        else:
            if pid == 0:  # in the fork: die with the server, and close the server's descriptors
                self._libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != self._pid:  # the server has ended meanwhile
                    os._exit(1)
                own = (self._listener, self._wake, self.woken, connection)
                for each in (*own, *self._children.values()):
                    each.close()
                os.close(self._alive)
                self.selector.close()
                return request
            self._children[pid] = connection
            self.selector.modify(connection, selectors.EVENT_READ, pid)
            _reply(connection, pid)
        for descriptor in request[1]:
            os.close(descriptor)
        return None

    def reap(self) -> None:
        """Send the clients of all forks that have ended the exit status of their fork."""
        self.woken.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if self._end_groups:
                    self._kill_group(pid, reaped=True)
                self.leave(pid, status)

    def leave(self, pid: int, status: int | None = None) -> None:
        """Send a client the status of its fork, which has ended. If `status` is None, the client
        has gone: kill its fork instead. Close the connection in both cases."""
        if (client := self._children.pop(pid, None)) is not None:
            if status is None:
                os.kill(pid, signal.SIGKILL)
            else:
                _reply(client, status)
            self.selector.unregister(client)
            client.close()

    def end(self) -> None:
        """Kill all forks."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            if self._end_groups:
                self._kill_group(pid, reaped=False)
        signal.set_wakeup_fd(-1)


def _receive(connection: socket.socket) -> "Request | None":
    """Return a request and the descriptors that came with it; None if it is incomplete."""
    from turnwise.core.untrusted import HEADER, receive

    connection.settimeout(SENDING_SECONDS)
    ends = time.monotonic() + SENDING_SECONDS
    descriptors: list[int] = []
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, HEADER, 8)
        header += receive(connection, HEADER - len(header), ends)
        size = int.from_bytes(header, "big")
        if len(descriptors) < _STREAMS or not 0 < size <= _MAX_REQUEST:
            raise ValueError("no request")
        # `json.loads` is enough: the client is a process of this user. Its environment may not be
        # UTF-8.
        request = json.loads(receive(connection, size, ends))
        if not isinstance(request, dict):
            raise TypeError("no request")
        connection.settimeout(SENDING_SECONDS)
        return request, descriptors
    except (OSError, EOFError, ValueError, TypeError, RecursionError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None


def _reply(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % number)


def exit_code(job: Callable[[], None]) -> int:
    """Run a job as an interpreter would, and return its exit code; skip freeing its memory, which
    takes seconds."""
    from turnwise.internals import python

    code = 0
    try:
        job()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    python.run_exit_functions()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


# The server's process


def main() -> None:
    """Run the server: `python -m turnwise.core.fork_server LISTENER ALIVE`, two descriptors."""
    import importlib
    import logging

    listener, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU has no Triton
    gc.disable()
    # Ray reads the environment when it is imported, so each fork imports Ray itself. vLLM imports
    # Ray only if it is available, so hide Ray here.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in PRELOADED:
        importlib.import_module(name)
    del sys.modules["ray"]
    gc.freeze()
    if (request := serve(listener, alive)) is not None:  # in a fork
        os._exit(exit_code(lambda: _become(*request)))


def _become(request: "JsonObject", descriptors: list[int]) -> None:
    """Become the requested process."""
    import runpy
    import shlex

    import numpy
    import setproctitle
    import torch

    from turnwise.core import logs
    from turnwise.internals import python

    os.setsid()  # Ray ends its workers by their process groups
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    streams, rest = descriptors[:_STREAMS], descriptors[_STREAMS:]
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Programs that the fork starts must not inherit the other descriptors.
    for descriptor in rest:
        os.set_inheritable(descriptor, False)
    os.chdir(request["cwd"])
    # Change only the variables that differ, because Ray and vLLM write process titles over the
    # memory of the environment, and must be able to locate it.
    wanted: dict[str, str] = request["env"]
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - os.environ.items())
    logs.redirect_output()
    # Libraries do this only when they are imported.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    numpy.random.seed()
    gc.enable()
    first, *arguments = request["arguments"]
    if first == _FORKSERVER:
        python.serve_forks(*rest)
        return
    place = os.getcwd() if first in ("-c", "-m") else os.path.dirname(os.path.realpath(first))
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([place, *own, *sys.path])
    if first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    elif first == "-m":
        setproctitle.setproctitle(shlex.join(["python", *request["arguments"]]))
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if __package__:
        main()
    else:
        _run_as_fork()
