"""The address of a server: the socket that it listens on, and how others reach it."""

import socket
from contextlib import suppress

from turnwise.errors import InputError

QUEUE = 2_048
"""Connections that wait to be accepted."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        InputError: when the address cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio switches Nagle off only where the protocol is said to be TCP.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(QUEUE)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"the server cannot listen on {host}:{port} ({error}); choose another serving.port "
            "(0 takes a free one) or serving.host"
        ) from error
    return listening


def reachable(host: str) -> str:
    """The address under which other machines reach a server that listens on `host`."""
    if host not in ("0.0.0.0", "::"):
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = "2001:db8::1" if ":" in host else "192.0.2.1"  # for documentation: nobody is there
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((outside, 9))  # chooses the interface; a datagram socket sends nothing
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
    return "::1" if ":" in host else "127.0.0.1"
