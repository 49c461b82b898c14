"""`python -I -S fork_client.py SOCKET ARGUMENT...`: run `python ARGUMENT...` as a fork.

The fork comes from the `fork_server` that listens at SOCKET and gets this process's arguments,
working directory, environment and standard streams. This process stays alive: it forwards
signals, and exits as the fork does. If no server listens, it becomes `python ARGUMENT...`.
Imports little, so that it starts in hundredths of a second.

Ray starts its workers with it too, instead of its own `setup_worker.py`; the runtime environment is
then among the arguments, and the socket is that environment's TURNWISE_FORK_SERVER. Everyone on the
machine can read the arguments of a process, and that environment has secrets: this program starts
itself again, in the same process, with the environment as its own and no longer as an argument.
"""

import json
import os
import signal
import socket
import sys

_FROM_RAY = "--language=PYTHON"
_CONTEXT = "--serialized-runtime-env-context="
_VARIABLE = "TURNWISE_FORK_SERVER"


def main() -> None:
    if _FROM_RAY in sys.argv:
        arguments = _set_up_for_ray(sys.argv[1:])
        again = [sys.executable, "-I", "-S", __file__, os.environ.get(_VARIABLE, "")]
        os.execv(sys.executable, [*again, *arguments])
    path, arguments = sys.argv[1], sys.argv[2:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        ask(connection, like_this(arguments))
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
        if os.WTERMSIG(status) != signal.SIGKILL:  # which has no handler to set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def like_this(arguments: list[str]) -> dict[str, object]:
    """Return the request for a process that is like this one."""
    return {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}


def ask(connection: socket.socket, request: dict[str, object], *more: int) -> None:
    """Send a fork server a request, with the standard streams and further descriptors."""
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], [0, 1, 2, *more])
    connection.sendall(body)


def _set_up_for_ray(arguments: list[str]) -> list[str]:
    """Set the environment variables that Ray passes; return the worker's own arguments."""
    own = []
    for argument in arguments:
        if argument.startswith(_CONTEXT):
            os.environ.update(json.loads(argument.removeprefix(_CONTEXT)).get("env_vars", {}))
        elif argument != _FROM_RAY:
            own.append(argument)
    return own


if __name__ == "__main__":
    main()
