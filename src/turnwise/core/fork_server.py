"""A process that imports vLLM and torch once, and is forked for every worker.

Importing them takes seconds of CPU time in each process; a fork shares the imported modules. The
server starts with the program that needs it, and ends with it, as does every fork. Ray starts its
workers through `fork_client`, and an engine's process is forked as well
(`share_with_engines`).

    program ── starts ──> fork server ── forks ──> Ray workers, engine processes
       └── starts ──> raylet ── starts ──> fork_client ── asks ──> fork server

Used on machines without a GPU: a process that has touched CUDA must not fork, and loading a model
for a GPU takes longer than the imports. `TURNWISE_FORK_SERVER=off` disables it; a path
names a server that is already running. Nothing here has been run on a GPU.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.core import fork_client, logs
from turnwise.core.forking import SENDING_SECONDS, STREAMS, exit_code, serve
from turnwise.core.json_types import JsonObject

VARIABLE = "TURNWISE_FORK_SERVER"
CLIENT = fork_client.__file__
_PRELOADED = (
    "turnwise.engine.preload",
    "turnwise.serving.openai.server",
    "turnwise.serving.engine_worker",
    "turnwise.training.rank",
    "turnwise.observe.trackers",
    "typer",
    "rich.live",
    "setproctitle",
)
_NVIDIA = Path("/dev/nvidiactl")
_FORKSERVER = "multiprocessing.forkserver"


class ForkServer:
    """The server's process, owned by the program that starts it.

    Args:
        module: The program to start, as `python -m MODULE LISTENER ALIVE ARGUMENT...`; it must call
            `serve` with the two descriptors.
        arguments: Its further arguments.
    """

    def __init__(
        self, module: str = "turnwise.core.fork_server", arguments: Sequence[str] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-fork-")
        self.address = str(Path(self._folder.name) / "socket")
        read, self._alive = os.pipe()
        try:
            self._process = self._start(module, arguments, read)
        except OSError:
            os.close(self._alive)
            raise
        finally:
            os.close(read)
        self.pid = self._process.pid

    def _start(self, module: str, arguments: Sequence[str], read: int) -> "subprocess.Popen[bytes]":
        # Bound here, so that a client that connects before the imports are done waits for them.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(128)
            descriptors = (listener.fileno(), read)
            return subprocess.Popen(
                [sys.executable, "-m", module, *map(str, descriptors), *arguments],
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "OMP_NUM_THREADS": "1",
                    "OMP_WAIT_POLICY": "PASSIVE",  # idle threads must not spin beside engines
                    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "TOKENIZERS_PARALLELISM": "false",
                },
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the program
            )

    @property
    def ended(self) -> bool:
        """Whether the server's process has ended, for example by a crash."""
        return self._process.poll() is not None

    def exit_code(self, seconds: float) -> int | None:
        """Return the exit code, negative for a signal; None if it runs on for `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def close(self) -> None:
        """End the server and all of its forks."""
        os.close(self._alive)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._folder.cleanup()


_own: ForkServer | None = None


def address() -> str | None:
    """Return the address of this program's fork server, started on the first call; None if off."""
    global _own
    known = os.environ.get(VARIABLE)
    if known == "off" or (known is None and _NVIDIA.exists()):
        return None
    if known is None and _own is None:
        _own = ForkServer()
        atexit.register(_close_at_exit, _own)
    return known or (None if _own is None else _own.address)


def _close_at_exit(server: ForkServer) -> None:
    """End the server when the program ends; another Ctrl-C must not interrupt this."""
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.close()


def command(server: str) -> list[str]:
    """Return the words that replace `python` in a command line, so that the program is forked."""
    return [sys.executable, "-I", "-S", CLIENT, server]


def share_with_engines() -> bool:
    """Let the server fork the engine processes of this process too, if this is a fork itself.

    From then on, multiprocessing's start method `forkserver` forks from a fork of the server.
    Returns False if there is no server.
    """
    own: Any = multiprocessing.forkserver._forkserver
    if own._forkserver_address is not None:
        # A process forked by a multiprocessing server knows that server's address, but would start
        # another server, which has imported nothing.
        own.ensure_running = lambda: None
        return True
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    asking.settimeout(SENDING_SECONDS)
    try:
        asking.connect(os.environ.get(VARIABLE, ""))
    except OSError:
        return False
    place = str(Path(multiprocessing.util.get_temp_dir()) / "forkserver")
    read, alive = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(place)
        listener.listen()
        request = fork_client.like_this([_FORKSERVER])
        fork_client.ask(asking, request, listener.fileno(), read)
        # The connection stays open: the fork ends with it.
        own._fork_client = asking
    os.close(read)
    own._forkserver_address, own._forkserver_alive_fd = place, alive
    own.ensure_running = lambda: None
    return True


def main() -> None:
    """Run the server: `python -m turnwise.core.fork_server LISTENER ALIVE`, two descriptors."""
    listener, alive = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU has no Triton
    gc.disable()
    # Ray reads the environment when it is imported, so each fork imports it itself; vLLM imports
    # it only if it is available.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in _PRELOADED:
        importlib.import_module(name)
    del sys.modules["ray"]
    gc.freeze()
    if (request := serve(listener, alive)) is not None:  # in a fork
        os._exit(exit_code(lambda: _run(*request)))


def _run(request: JsonObject, descriptors: list[int]) -> None:
    """Become the requested process."""
    import setproctitle

    os.setsid()  # Ray ends its workers by their process groups
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    streams, rest = descriptors[:STREAMS], descriptors[STREAMS:]
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Not inherited by programs that the fork starts.
    for descriptor in rest:
        os.set_inheritable(descriptor, False)
    os.chdir(request["cwd"])
    _set_environment(request["env"])
    logs.follow()
    _adapt()
    gc.enable()
    first, *arguments = request["arguments"]
    if first == _FORKSERVER:
        listener, alive = rest
        # An engine collects all garbage at its end, which would copy the memory that it shares.
        setattr(gc, "unfreeze", lambda: None)  # noqa: B010
        multiprocessing.forkserver.main(listener, alive, [])
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        _set_path("")
        exec(arguments[0], {"__name__": "__main__"})
    elif first == "-m":
        setproctitle.setproctitle(shlex.join(["python", *request["arguments"]]))
        sys.argv = arguments
        _set_path("")
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        _set_path(str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def _set_environment(wanted: dict[str, str]) -> None:
    """Change only the variables that differ.

    Process titles overwrite the environment's memory, which Ray and vLLM must be able to locate.
    """
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _adapt() -> None:
    """Apply the environment variables that libraries read only when they are imported."""
    import numpy
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    numpy.random.seed()


def _set_path(first: str) -> None:
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = dict.fromkeys([first or os.getcwd(), *own, *sys.path])


if __name__ == "__main__":
    main()
