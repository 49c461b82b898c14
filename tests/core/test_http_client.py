"""Requests to servers that are not trusted."""

import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from turnwise.core import http_client
from turnwise.core.http_client import HttpClient, HttpError, Unreachable
from turnwise.core.untrusted import AnswerError
from turnwise.errors import InputError
from turnwise.serving.openai.address import listen


class Server:
    """A server's address, and the paths that it was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.answer: Callable[[web.Request], Any] = lambda request: web.Response(text="hello")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path == "/secret":
            return web.Response(text="SECRET")
        found = self.answer(request)
        return found if isinstance(found, web.StreamResponse) else await found


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    with listen("127.0.0.1", 0) as own:
        server.url = f"http://127.0.0.1:{own.getsockname()[1]}"
        await web.SockSite(runner, own).start()
        yield server
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_redirect_is_an_answer_and_not_followed(
    server: Server, status: int, method: str
) -> None:
    server.answer = lambda _: web.Response(status=status, headers={"location": "/secret"})
    async with HttpClient() as client:
        answer = await client.request(method, f"{server.url}/a", json={})
        assert (answer.status, answer.ok, answer.body) == (status, False, b"")
        assert server.asked == ["/a"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_of_a_web_socket_is_not_followed(server: Server, status: int) -> None:
    server.answer = lambda _: web.Response(status=status, headers={"location": "/secret"})
    async with HttpClient() as client:
        with pytest.raises(HttpError, match=f"answered {status}, and a redirect is not followed"):
            await client.web_socket(f"{server.url}/ws")
    assert server.asked == ["/ws"]


async def test_an_answer_is_read_up_to_a_largest_size(server: Server) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    async with HttpClient() as client:
        assert (await client.request("GET", server.url, largest=5)).body == b"hello"
        server.answer = endless
        with pytest.raises(AnswerError, match="sent an answer of more than 100,000 bytes"):
            await client.request("GET", server.url, largest=100_000)


async def test_a_compressed_answer_is_not_opened(server: Server) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    server.answer = lambda _: web.Response(body=bomb, headers={"content-encoding": "gzip"})
    async with HttpClient() as client:
        with pytest.raises(AnswerError, match="sent an answer in 'gzip', which was not asked for"):
            await client.request("GET", server.url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/a", "/etc/passwd", "", "http://[1", "http://"]
)
async def test_other_addresses_are_refused(url: str) -> None:
    async with HttpClient() as client:
        with pytest.raises(InputError):
            await client.request("GET", url)
        with pytest.raises(InputError):
            await client.web_socket(url)


async def test_a_header_with_a_line_break_is_refused(server: Server) -> None:
    async with HttpClient() as client:
        with pytest.raises(InputError, match="no request can be sent"):
            await client.request("GET", server.url, headers={"authorization": "a\nb: c"})
    assert server.asked == []


async def test_an_unreachable_server_differs_from_one_that_breaks_off(server: Server) -> None:
    def vanish(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.answer = vanish
    with listen("127.0.0.1", 0) as reserved:
        nowhere = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    async with HttpClient(connect_seconds=5) as client:
        with pytest.raises(HttpError) as broken:
            await client.request("GET", server.url)
        assert not isinstance(broken.value, Unreachable)
        with pytest.raises(Unreachable):
            await client.request("GET", nowhere)
        with pytest.raises(Unreachable):
            await client.web_socket(nowhere)


async def test_cookies_are_kept_only_where_they_are_asked_for(server: Server) -> None:
    def seen(request: web.Request) -> web.Response:
        response = web.Response(text=request.cookies.get("a", "none"))
        response.set_cookie("a", "b")
        return response

    server.answer = seen
    for cookies, last in ((True, b"b"), (False, b"none")):
        async with HttpClient(cookies=cookies) as client:
            assert (await client.request("GET", server.url)).body == b"none"
            assert (await client.request("GET", server.url)).body == last


async def test_messages_of_a_web_socket_are_texts_of_a_largest_size(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(await socket.receive_str())
        await socket.send_str("x" * 2000)
        return socket

    monkeypatch.setattr(http_client, "MAX_BYTES", 1000)
    server.answer = talk
    async with HttpClient() as client:
        socket = await client.web_socket(server.url.replace("http", "ws"))
        await socket.send("hello")
        assert await socket.receive() == b"hello"
        with pytest.raises(AnswerError, match="sent what cannot be read"):
            await socket.receive()
        with pytest.raises(HttpError, match="close"):
            await socket.receive()
        await socket.close()
