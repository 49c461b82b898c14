"""`python -I -S fork_client.py SOCKET ARGUMENT...`: run `python ARGUMENT...` as a fork.

The fork comes from the `fork_server` that listens at SOCKET and gets this process's arguments,
working directory, environment and standard streams. This process stays in its place: it passes
signals on, and exits as the fork does. Where no server listens it becomes `python ARGUMENT...`.
Imports little, so that it starts in hundredths of a second.
"""

import json
import os
import signal
import socket
import sys
from array import array


def main() -> None:
    path, arguments = sys.argv[1], sys.argv[2:]
    request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    body = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        streams = array("i", [0, 1, 2])
        header = len(body).to_bytes(4, "big")
        connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(body)
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
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
