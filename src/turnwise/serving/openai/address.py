"""A server's address and key: its socket, its address for other machines, and its API key."""

import socket
from contextlib import suppress

from turnwise.errors import InputError

QUEUE = 2_048  # maximum number of connections waiting to be accepted
EVERYWHERE = ("0.0.0.0", "::")
"""Values of `serving.host` that mean all addresses of the machine."""


def listen(host: str, port: int, ports: str | None = None) -> socket.socket:
    """Return a listening socket; raise InputError when the address cannot be used. Port 0 takes a
    free port, in the range `ports` (`serving.ports`) if it is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = map(int, (ports or "0-0").split("-"))
    for each in [port] if port else range(first, last + 1):
        # asyncio switches Nagle off only for sockets whose protocol is given as TCP.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, each))
            listening.listen(QUEUE)
        except (OSError, OverflowError) as error:
            listening.close()
            failure = error
        else:
            return listening
    why = (
        f"the server cannot listen on {host}:{port} ({failure}); choose another serving.port "
        "(0 takes a free one) or serving.host"
    )
    if ports is not None and not port:
        why = f"no port of {ports} (serving.ports) is free on {host} ({failure})"
    raise InputError(why) from failure


def reachable(host: str) -> str:
    """Return the address at which other machines reach a server that listens on `host`."""
    if host not in EVERYWHERE:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = "2001:db8::1" if ":" in host else "192.0.2.1"  # reserved for documentation
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((outside, 9))  # chooses the interface; a datagram socket sends nothing
        return str(probe.getsockname()[0])
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
    return "::1" if ":" in host else "127.0.0.1"
