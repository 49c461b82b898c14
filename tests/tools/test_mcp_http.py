"""MCP servers over streamable HTTP; `mcp_server.py` is made with the SDK."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tools.test_mcp import SDK, call, opened, text
from turnwise.tools.mcp import MCPServer
from turnwise.tools.tool import McpError


@pytest.fixture
def http() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(port: str = "0") -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen([sys.executable, SDK, "http", port], stdout=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


async def until_it_listens(port: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def test_a_server_over_http(http: Callable[..., Any]) -> None:
    """Sessions of trajectories, a header for each, a restart, and a server that is away."""
    process = http()
    port = process.stdout.readline().strip()
    await until_it_listens(port)
    url = f"http://127.0.0.1:{port}/mcp"
    for header in (None, "X-Trajectory"):
        server = MCPServer(url=url, session_header=header)
        async with opened(server) as one, opened(server) as two:
            assert await text(one, "remember", number=1) == "[1]"
            assert await text(two, "remember", number=2) == "[2]"
            assert await text(one, "remember", number=3) == "[1, 3]"
            assert await text(one, "process") == await text(two, "process")
    async with opened(MCPServer(url=url, shared=True), max_chars=1000) as tools:
        flooded = await call(tools, "large", size=20_000_000)
        assert re.search(r"closed the connection .*limit", flooded.text), flooded.text
        died = await call(tools, "die")
        assert died.outcome == "error"
        process.wait()
        away = await call(tools, "process")
        assert away.outcome == "error"
        assert re.search(r"the MCP server http://\S+ did not start", away.text), away.text
        again = http(port)
        again.stdout.readline()
        await until_it_listens(port)
        assert await text(tools, "process") == str(again.pid)
    with pytest.raises(McpError, match=r"the MCP server http://127\.0\.0\.1:9/mcp did not start"):
        async with opened(MCPServer(url="http://name:password@127.0.0.1:9/mcp")):
            pass
