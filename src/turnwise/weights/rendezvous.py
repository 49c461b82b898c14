"""The rendezvous of ranks: torch's key-value store, on one address and behind a secret.

By default the store listens on all addresses of a machine and accepts any client. Here it listens
on one, and every key begins with the run's secret, which Ray passes to its processes. The secret
protects against accidents and scanners; a client that can reach the port and speaks the store's
protocol can still list its keys, so nodes that train together should be on a private network.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from turnwise.core.process import known_secret

LOOPBACK = "127.0.0.1"
_DEFAULT = timedelta(seconds=300)


def open_store(host: str, port: int, limit: timedelta = _DEFAULT) -> TCPStore:
    """Open a store on one address of this machine; port 0 takes a free port.

    Raises:
        OSError: when the port is in use, or the address is not of this machine.
    """
    family = socket.getaddrinfo(host, port)[0][0]
    listening = socket.create_server((host, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    # The store closes the descriptor that it is given.
    return TCPStore(
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def join_store(host: str, port: int, limit: timedelta) -> TCPStore:
    """Connect to a store that another process opened."""
    return TCPStore(host, port, None, False, limit, wait_for_workers=False)


def private(store: TCPStore) -> Store:
    """Return the part of a store that this run's processes share."""
    return PrefixStore(known_secret(), store)


def free_address() -> tuple[str, int]:
    """Return this node's address and a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    from ray.util import get_node_ip_address  # reads the environment when it is imported

    return get_node_ip_address(), port
