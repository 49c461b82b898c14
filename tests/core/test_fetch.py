"""URLs of images in data: which hosts are asked, and what a host may do."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from turnwise.core.fetch import _is_public, fetch
from turnwise.errors import InputError

LEFT = threading.Event()  # set when a client has left the slow answer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, rest = self.path[1:].partition("/")
        if name == "to":
            self.send_response(302)
            self.send_header("location", rest)
            self.end_headers()
            return
        if name == "slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for _ in range(2000):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
            LEFT.set()
            return
        self.send_response(200 if name.startswith("ok") else 404)
        self.end_headers()
        self.wfile.write(b"0123456789")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address counts as public, and no other of this network."""
    monkeypatch.setattr(
        "turnwise.core.fetch._is_public",
        lambda address: address == "127.0.0.1" or _is_public(address),
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_a_file_is_fetched_also_behind_redirects(server: str) -> None:
    assert fetch(f"{server}/ok", 10, 60.0) == b"0123456789"
    assert fetch(f"{server}/to/{server}/ok?a=b", 10, 60.0) == b"0123456789"
    assert fetch(f"{server}/to//ok", 10, 60.0) == b"0123456789"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://169.254.169.254/latest/meta-data/", "its address 169.254.169.254 is not public"),
        ("http://[fd00:ec2::254]/latest/", "is not public"),
        ("http://[::ffff:169.254.169.254]/", "is not public"),
        ("http://168.63.129.16/metadata", "its address 168.63.129.16 is not public"),
        ("http://100.100.100.200/latest/", "is not public"),
        ("http://127.0.0.1:9/", "is not public"),
        ("http://0x7f000001/", "is not public"),
        ("http://10.0.0.1/", "is not public"),
        ("http://0.0.0.0/", "is not public"),
        ("file:///etc/passwd", "must begin with http:// or https://"),
        ("http://", "must begin with http:// or https://"),
        ("http://a:b/", "cannot be fetched"),
    ],
)
def test_only_public_addresses_are_asked(url: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        fetch(url, 10, 60.0)


def test_a_name_with_one_address_here_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(0, 0, 0, "", (address, port)) for address in ("93.184.216.34", "169.254.169.254")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InputError, match=r"evil\.example: its address 169\.254\.169\.254"):
        fetch("http://evil.example/cat.png", 10, 60.0)


def test_a_redirect_leads_to_no_other_host(server: str) -> None:
    with pytest.raises(InputError, match=r"fetched from 169\.254\.169\.254"):
        fetch(f"{server}/to/http://169.254.169.254/latest/", 10, 60.0)
    with pytest.raises(InputError, match="must begin with http:// or https://"):
        fetch(f"{server}/to/file:///etc/passwd", 10, 60.0)
    with pytest.raises(InputError, match="is redirected more than 3 times"):
        fetch(f"{server}/to//to//to//to//ok", 10, 60.0)


def test_a_host_that_never_ends_keeps_no_thread(server: str) -> None:
    LEFT.clear()
    with pytest.raises(InputError, match=r"did not come within 0\.3 s"):
        fetch(f"{server}/slow", 1000, 0.3)
    assert LEFT.wait(60)


def test_a_host_that_does_not_answer_well_is_named(server: str) -> None:
    with pytest.raises(InputError, match="answered with status 404"):
        fetch(f"{server}/missing", 10, 60.0)
    with pytest.raises(InputError, match="has more than 9 bytes"):
        fetch(f"{server}/ok", 9, 60.0)
    with pytest.raises(InputError, match=r"did not come within 0\.5 s"):
        fetch(f"{server}/slow", 1000, 0.5)
    with pytest.raises(InputError, match="cannot be fetched"):
        fetch("http://127.0.0.1:1/", 10, 60.0)
