"""Where ranks meet: torch's key-value store, on one address and behind a secret.

By itself the store listens on all addresses of a machine and lets in anybody who asks. Here it
listens on one, and every key begins with the secret of the run, which Ray brings to its processes.
The secret keeps out mistakes and scanners; whoever can reach the port and speaks the store's
protocol may still list its keys, so nodes that train together belong on a network of their own.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from turnwise import secret

LOOPBACK = "127.0.0.1"
_DEFAULT = timedelta(seconds=300)


def open_store(host: str, port: int, limit: timedelta = _DEFAULT) -> TCPStore:
    """Open a store at an address of this machine, and nowhere else; port 0 takes a free one.

    Raises:
        OSError: when the port is in use, or the address is not of this machine.
    """
    family = socket.getaddrinfo(host, port)[0][0]
    listening = socket.create_server((host, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    # The store closes what it is given.
    return TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def join_store(host: str, port: int, limit: timedelta) -> TCPStore:
    """Connect to a store that another process opened."""
    return TCPStore(host, port, None, False, limit, wait_for_workers=False)


def private(store: TCPStore) -> Store:
    """The part of a store that this run's processes share."""
    return PrefixStore(secret.known(), store)
