"""Files from URLs in data, which is not trusted: over HTTP or HTTPS, from public addresses only.

Each connection, also after a redirect, is made to the very address that was checked, so that no
name leads into this network. A proxy of the environment is not used.
"""

import socket
import ssl
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from urllib.parse import urljoin, urlsplit

from turnwise.core.aio import call_within
from turnwise.core.untrusted import IDENTITY
from turnwise.errors import InputError

_MAX_HOPS = 4  # maximum number of requests for one file; all but the last are redirected
_REFUSED = ("168.63.129.16",)  # public addresses of metadata services: Azure's


def fetch(url: str, max_bytes: int, seconds: float) -> bytes:
    """Return the file at a URL, of at most `max_bytes`, within `seconds`; blocks meanwhile.

    Raises:
        InputError: when the file may not be fetched, does not come in time, or is too long.
    """
    opened: list[socket.socket] = []
    try:
        return call_within(lambda: _fetched(url, max_bytes, seconds, opened), seconds)
    except TimeoutError:
        with suppress(OSError, IndexError):  # ends the read: a slow host would keep the thread
            opened[-1].shutdown(socket.SHUT_RDWR)
        raise InputError(f"{url[:200]} did not come within {seconds:g} s") from None
    except (OSError, HTTPException, ValueError) as error:  # also for a bad certificate
        raise InputError(f"{url[:200]} cannot be fetched: {error}") from error


def _fetched(url: str, max_bytes: int, seconds: float, opened: list[socket.socket]) -> bytes:
    for _ in range(_MAX_HOPS):
        parts = urlsplit(url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        if not host or parts.scheme not in ("http", "https"):
            raise InputError(
                f"{url[:200]} cannot be fetched: a URL must begin with http:// or https://"
            )
        port = parts.port or (443 if secure else 80)
        talk = socket.create_connection((_address(host, port), port), seconds)
        connection = (HTTPSConnection if secure else HTTPConnection)(host, port)
        with closing(connection):
            connection.sock = talk
            if secure:
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(talk, server_hostname=host)
            opened.append(connection.sock)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers=IDENTITY)
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308):
                url = urljoin(url, answer.headers.get("location", ""))
                continue
            if answer.status != 200:
                raise InputError(f"{url[:200]} answered with status {answer.status}")
            if len(data := answer.read(max_bytes + 1)) > max_bytes:
                raise InputError(f"{url[:200]} has more than {max_bytes:,} bytes")
            return data
    raise InputError(f"{url[:200]} is redirected more than {_MAX_HOPS - 1} times")


def _address(host: str, port: int) -> str:
    """Return an address of a host; raise InputError when one of its addresses is not public."""
    found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not _is_public(address):
            why = f"its address {address} is not public"
            raise InputError(f"no image may be fetched from {host}: {why}")
    return found[0]


def _is_public(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_global and address not in _REFUSED
