"""Web pages cannot use a server under a name of their own, nor write to it from another site."""

import socket
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from turnwise.chat.session_store import SessionStore
from turnwise.config import SamplingConfig
from turnwise.config.serving import ServingConfig
from turnwise.serving.openai.protection import canonical, guarded

THERE = "http://attacker.example"
JSON = {"content-type": "application/json"}
NO_BODY = {"content-type": "application/octet-stream"}  # of aiohttp


async def ask(
    method: str = "GET", headers: dict[str, str] | None = None, bound: Any = None, **serving: Any
) -> httpx.Response:
    """Send a request to a server that listens at `bound`."""
    store = SessionStore(SamplingConfig())
    app = guarded(PlainTextResponse("inside"), ServingConfig(**serving), None, store)

    async def at_address(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": bound or ("127.0.0.1", 8000)}, receive, send)

    transport = httpx.ASGITransport(at_address)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
        return await http.request(method, "/sessions", headers=headers)


@pytest.mark.parametrize(
    ("host", "serving"),
    [
        *((name, {}) for name in ("127.0.0.1:8000", "127.0.0.1", "LocalHost:9", "[::1]:8000")),
        ("a.localhost:8000", {}),
        ("127.8.8.8", {}),
        ("10.1.2.3:8000", {"host": "10.1.2.3"}),
        ("node-7:8000", {"host": "node-7"}),
        ("192.0.2.9:8000", {"host": "0.0.0.0", "bound": ("192.0.2.9", 8000)}),
        ("192.0.2.9:8000", {"host": "::", "bound": ("::ffff:192.0.2.9", 8000)}),
        ("[2001:db8::7]:8000", {"host": "::", "bound": ("2001:db8::7", 8000, 0, 0)}),
        (f"{socket.gethostname()}:8000", {"host": "0.0.0.0"}),
        ("model.example.com", {"allowed_hosts": ["Model.Example.com:443"]}),
        ("attacker.example", {"allowed_hosts": ["*"]}),
    ],
)
async def test_a_server_answers_under_its_own_names(host: str, serving: dict[str, Any]) -> None:
    assert (await ask(headers={"host": host}, **serving)).text == "inside"


@pytest.mark.parametrize(
    ("host", "serving"),
    [
        ("attacker.example", {}),
        ("attacker.example:8000", {"host": "0.0.0.0", "api_key": "a-long-key"}),
        ("attacker.example", {"bound": ("attacker.example", None)}),
        ("localhost.attacker.example", {}),
        ("127.0.0.1.attacker.example", {"allowed_hosts": ["example"]}),
        ("192.0.2.9", {"host": "0.0.0.0"}),
        ("", {}),
        ("[", {}),
    ],
)
async def test_another_name_gets_421(host: str, serving: dict[str, Any]) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        answer = await ask(method, {"host": host, **JSON}, **serving)
        assert answer.status_code == 421
        if method != "HEAD":
            assert "serving.allowed_hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "serving", "status"),
    [
        ({}, {}, 200),  # a program's
        ({**JSON, "origin": THERE}, {}, 200),  # a browser asks before it sends this
        ({"origin": "http://127.0.0.1:8000"}, {}, 200),  # a page of the server's own
        ({"origin": THERE}, {"cors_origins": [THERE]}, 200),
        ({"origin": THERE}, {"cors_origins": ["*"]}, 200),
        ({"origin": THERE}, {}, 403),
        ({"origin": "null"}, {}, 403),
        ({"origin": "http://127.0.0.1:9000"}, {}, 403),
        ({"origin": THERE}, {"cors_origins": ["http://another.example"]}, 403),
        ({**NO_BODY, "content-length": "0"}, {}, 200),
        ({**NO_BODY, "content-length": "0", "origin": THERE}, {}, 403),
        ({**NO_BODY, "content-length": "1"}, {}, 415),
        ({"content-type": "text/plain"}, {}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, {}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, {"cors_origins": ["*"]}, 415),
    ],
)
async def test_pages_of_other_sites_write_nothing(
    headers: dict[str, str], serving: dict[str, Any], status: int
) -> None:
    assert (await ask("POST", headers, **serving)).status_code == status


async def test_only_configured_sites_read_answers() -> None:
    asking = {
        "origin": THERE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-session-id",
    }
    allow = "access-control-allow-origin"
    for serving, allowed in (
        ({}, None),
        ({"cors_origins": ["http://another.example"]}, None),
        ({"cors_origins": [THERE]}, THERE),
        ({"cors_origins": ["*"]}, "*"),
    ):
        answer = await ask("OPTIONS", asking, **serving)
        assert answer.headers.get(allow) == allowed
        if allowed:
            assert answer.status_code == 200
            assert "x-session-id" in answer.headers["access-control-allow-headers"]
        assert (await ask("GET", {"origin": THERE}, **serving)).headers.get(allow) == allowed


def test_hosts_are_compared_in_one_form() -> None:
    assert canonical("[::FFFF:127.0.0.1]:80") == "127.0.0.1"
    assert canonical("2001:DB8::1") == canonical("[2001:db8:0::1]:8000") == "2001:db8::1"
    assert canonical(" Example.COM.:8000 ") == "example.com"
