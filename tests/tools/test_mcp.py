"""MCP servers as toolsets, over stdio; test_mcp_http.py has those over HTTP.

`mcp_server.py` is made with the SDK; `raw_mcp_server.py` starts at once, and can misbehave.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import turnwise
from tests.conftest import ROOT
from turnwise.config import Config, parse_config
from turnwise.errors import DeadlineError, InputError
from turnwise.rollouts import Problem
from turnwise.rollouts.configured_tools import load_tools
from turnwise.rollouts.episode import Episode
from turnwise.tools.mcp import MCPServer
from turnwise.tools.tool import McpError
from turnwise.tools.toolbox import Toolbox, ToolResult

SDK = str(Path(__file__).with_name("mcp_server.py"))
RAW = str(Path(__file__).with_name("raw_mcp_server.py"))


def command(mode: str = "", **more: Any) -> MCPServer:
    return MCPServer(sys.executable, ["-S", RAW, mode], **more)


@pytest.fixture
def children() -> Iterator[Callable[[], list[int]]]:
    """The servers that run; none may be left."""

    def running() -> list[int]:
        found = psutil.Process().children(recursive=True)
        return [p.pid for p in found if is_server(p)]

    assert running() == []
    yield running
    assert running() == []


def is_server(process: psutil.Process) -> bool:
    try:
        return (
            bool({SDK, RAW} & set(process.cmdline())) and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def opened(
    server: MCPServer, timeout: float = 60.0, max_chars: int = 8192
) -> AsyncIterator[Toolbox]:
    toolset = server.toolset()
    try:
        yield Toolbox(await toolset.open(), timeout=timeout, max_chars=max_chars)
    finally:
        await toolset.close()


async def call(toolbox: Toolbox, tool: str, /, **arguments: object) -> ToolResult:
    return await toolbox.call(tool, json.dumps(arguments))


async def text(toolbox: Toolbox, tool: str, /, **arguments: object) -> str:
    result = await call(toolbox, tool, **arguments)
    assert result.outcome == "ok", result.text
    return result.text


async def test_a_command_is_started_called_and_ended(children: Callable[[], list[int]]) -> None:
    async with opened(MCPServer(sys.executable, [SDK])) as tools:
        schema = next(s["function"] for s in tools.schemas if s["function"]["name"] == "divide")
        assert schema["description"] == "Divide two numbers."
        assert set(schema["parameters"]["properties"]) == {"a", "b"}
        assert await text(tools, "divide", a=6, b=4) == "1.5"
        seen = await call(tools, "picture")
        assert (seen.text, seen.outcome) == ("before\n[image left out]\nafter", "ok")
        assert seen.parts is not None
        assert [part["type"] for part in seen.parts] == ["text", "image", "text"]
        assert (seen.parts[1]["image"].width, seen.parts[1]["image"].height) == (2, 1)
        broken = await call(tools, "bomb")
        assert (broken.outcome, broken.parts) == ("error", None)
        assert "is no image that can be read: it may be png, jpeg, webp, gif" in broken.text
        assert [int(await text(tools, "process"))] == children()
        wrong = await call(tools, "divide", a="six", b=4)
        assert (wrong.outcome, '"six" is not of type "integer"' in wrong.text) == (
            "bad_arguments",
            True,
        )
        failed = await call(tools, "divide", a=1, b=0)
        assert failed.outcome == "error"
        assert "division by zero" in failed.text


async def test_each_trajectory_has_its_own_process_unless_it_is_shared(
    children: Callable[[], list[int]],
) -> None:
    for shared in (False, True):
        server = command(shared=shared)
        async with opened(server) as one, opened(server) as two:
            assert len(children()) == (1 if shared else 2)
            said = await asyncio.gather(text(one, "remember", number=1), text(two, "process"))
            assert said[0] == "[1]"
            assert await text(two, "remember", number=2) == "[2]"
            assert await text(one, "remember", number=3) == "[1, 3]"
            same = await text(one, "process") == said[1]
            assert same == shared
        assert len(children()) == (1 if shared else 0)
        await server.close()


async def test_tools_are_allowed_by_name_and_prefixed(children: Callable[[], list[int]]) -> None:
    async with opened(command(tools=["remember", "process"], prefix="my_")) as tools:
        assert [s["function"]["name"] for s in tools.schemas] == ["my_remember", "my_process"]
        assert await text(tools, "my_remember", number=1) == "[1]"
    with pytest.raises(McpError, match=r"has no tool procces; it has: 'process', 'die', 'hang'"):
        async with opened(command(tools=["procces"])):
            pass


async def test_a_server_sees_its_own_variables_only(
    children: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    async with opened(command(env={"KEY": "<${SECRET}>"})) as tools:
        assert await text(tools, "variable", name="KEY") == "<swordfish>"
        assert await text(tools, "variable", name="SECRET") == "not set"
    with pytest.raises(InputError, match="env names the variable NO_SUCH, which is not set"):
        async with opened(command(env={"KEY": "${NO_SUCH}"})):
            pass


async def test_the_schemas_of_a_configuration_are_read_once(
    children: Callable[[], list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "requests"
    for _ in range(3):
        async with opened(command("thousand", env={"REQUESTS": str(path)})) as tools:
            assert len(tools.schemas) == 1000
    assert path.read_text().count('"tools/list"') == 1
    assert path.read_text().count('"initialize"') == 3


async def test_a_dead_server_fails_its_call_and_restarts_for_the_next(
    children: Callable[[], list[int]],
) -> None:
    for shared in (False, True):
        server = command("", shared=shared, prefix="p_")
        async with opened(server) as tools:
            first = await text(tools, "p_process")
            died = await call(tools, "p_die")
            assert died.outcome == "error"
            assert "ended with status 3 (Traceback: out of memory)" in died.text
            assert await text(tools, "p_process") != first
            assert await text(tools, "p_remember", number=5) == "[5]"
        await server.close()


async def test_a_call_that_hangs_is_late_and_its_server_is_replaced(
    children: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.tools.mcp_connection._ALIVE_SECONDS", 0.3)
    monkeypatch.setattr("turnwise.tools.mcp_connection._LEAVE_SECONDS", 0.1)
    server = command()
    async with opened(server) as patient, opened(server, timeout=0.5) as hurried:
        for tools in (patient, hurried):
            await text(tools, "process")
        first = await text(hurried, "process")
        late = await call(hurried, "slow")
        assert (late.outcome, late.text) == ("timeout", "Error: slow did not answer within 0.5 s")
        assert await text(hurried, "process") == first
        assert (await call(hurried, "hang")).outcome == "timeout"
        async with asyncio.timeout(60):  # a start may take longer than this deadline
            while (again := await call(hurried, "process")).outcome != "ok":
                pass
        assert again.text != first
        assert (await call(hurried, "hang")).outcome == "timeout"
        assert await text(patient, "process") not in (first, again.text)


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("silent", DeadlineError, r"the MCP server .* silent did not start within 0\.5 s"),
        ("dies", McpError, r"did not start: ended with status 1 \(no licence\)"),
        ("twice", McpError, "lists two tools named tool"),
        ("name", McpError, r"lists a tool with the invalid name 'rm -rf /\\n'"),
        ("schema", McpError, "invalid answer|whose schema is not of type object"),
        ("remote", McpError, "tool tool: its parameters refer to another document, .http://127"),
        (
            "invalid",
            McpError,
            "tool: its parameters are not a JSON schema: properties.a.type: ",
        ),
        ("pages", McpError, "lists more than 5000 tools or 100 pages"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_and_ended(
    children: Callable[[], list[int]], mode: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with opened(command(mode, start_timeout=0.5 if mode == "silent" else 60)):
            pass


async def test_a_program_that_is_missing_is_named(children: Callable[[], list[int]]) -> None:
    with pytest.raises(McpError, match=r"the MCP server no-such-program did not start: .*No such"):
        async with opened(MCPServer("no-such-program")):
            pass


async def test_lines_that_are_no_messages_are_dropped(children: Callable[[], list[int]]) -> None:
    async with opened(command("noise")) as tools:
        assert await text(tools, "chatter", lines=500) == "done"
        flooded = await call(tools, "chatter", lines=20_000)
        assert "sent 10000 lines that answer no request" in flooded.text
        assert await text(tools, "remember", number=1) == "[1]"


async def test_output_without_an_end_fails_its_call_only(
    children: Callable[[], list[int]],
) -> None:
    async with opened(command(), max_chars=1000) as tools:
        cut = await call(tools, "large", size=100_000)
        assert (cut.outcome, len(cut.text)) == (
            "truncated",
            1000 + len("\n[99000 more characters left out]"),
        )
        for name, arguments in (("endless", {}), ("large", {"size": 20_000_000})):
            flooded = await call(tools, name, **arguments)
            assert "sent a line of more than 8,388,608 bytes" in flooded.text, flooded.text
        assert await text(tools, "remember", number=1) == "[1]"


async def test_what_a_server_started_ends_with_it(children: Callable[[], list[int]]) -> None:
    async with opened(command()) as tools:
        left = int(await text(tools, "child"))
        assert runs(left)
    async with asyncio.timeout(60):  # it was killed, and may not be gone yet
        while runs(left):
            await asyncio.sleep(0.02)


async def test_a_server_that_will_not_end_is_killed(
    children: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwise.tools.mcp_connection._LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("turnwise.tools.mcp_connection._KILL_SECONDS", 0.3)
    async with opened(command("stubborn")) as tools:
        assert await text(tools, "remember", number=1) == "[1]"


async def test_warm_servers_wait_for_trajectories(children: Callable[[], list[int]]) -> None:
    server = command(warm=1)
    async with opened(server) as one:
        async with asyncio.timeout(60):
            while len(children()) < 2:
                await asyncio.sleep(0.02)
        (waiting,) = set(children()) - {int(await text(one, "process"))}
        async with asyncio.timeout(60):  # until it is ready, and no longer starting
            while not warm(server):
                await asyncio.sleep(0.02)
        async with opened(server) as two:
            assert int(await text(two, "process")) == waiting
            assert await text(two, "remember", number=1) == "[1]"
            async with asyncio.timeout(60):
                while not warm(server):
                    await asyncio.sleep(0.02)
            assert len(children()) == 3
    assert len(children()) == 1
    await server.close()


def warm(server: MCPServer) -> int:
    from turnwise.tools.mcp import pool_of

    return sum(task.done() for task in pool_of(server.config)._warm)


async def test_a_cancelled_start_leaves_nothing(children: Callable[[], list[int]]) -> None:
    toolset = command("silent").toolset()
    starting = asyncio.create_task(toolset.open())
    async with asyncio.timeout(60):
        while not children():
            await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await toolset.close()
    await command().toolset().close()  # never opened


def test_the_end_of_a_program_ends_its_servers() -> None:
    """Also of those that end neither with their input nor at SIGTERM."""
    code = (
        "import asyncio, sys; from turnwise.tools.mcp import MCPServer\n"
        "async def main():\n"
        f"    server = MCPServer(sys.executable, ['-S', {RAW!r}, 'stubborn'], warm=1)\n"
        "    tools = await server.toolset().open()\n"
        "    print(await tools[0].call({}))\n"
        "asyncio.run(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
    ends = time.monotonic() + 60
    while runs(int(ran.stdout)):  # it was killed, and may not be gone yet
        assert time.monotonic() < ends
        time.sleep(0.02)


def configured(keys: dict[str, Any]) -> Config:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    return parse_config(tree | {"rollout": {"tools": [{"mcp": keys}]}})


class Desk(turnwise.Environment):
    problem = "Work."
    tools = (command(tools=["remember"], prefix="own_"),)

    def __init__(self, row: dict[str, Any]) -> None:
        pass


async def test_twenty_trajectories_leave_no_process(children: Callable[[], list[int]]) -> None:
    """Tools of the environment's class and of the configuration; a third of their servers die."""
    keys = {"command": sys.executable, "args": [RAW], "tools": ["process", "die"]}
    rollout = configured(keys).rollout
    sources = load_tools(rollout.tools)

    async def trajectory(index: int) -> str:
        episode = Episode(Desk, Problem("rows:1", {}), rollout, sources)
        try:
            await episode.open()
            names = [s["function"]["name"] for s in episode.toolbox.schemas]
            assert names == ["own_remember", "process", "die"]
            assert await text(episode.toolbox, "own_remember", number=index) == f"[{index}]"
            if index % 3 == 0:
                assert (await call(episode.toolbox, "die")).outcome == "error"
            return await text(episode.toolbox, "process")
        finally:
            await episode.close(never)

    seen = await asyncio.gather(*map(trajectory, range(20)))
    assert len(set(seen)) == 20


async def never(reason: str, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "has either a command or a url"),
        ({"command": "a", "url": "b"}, "has either a command or a url"),
        ({"command": "a", "headers": {"a": "b"}}, "headers and session_header apply to a url"),
        ({"url": "a", "args": ["b"]}, "apply to a command, not to a url"),
        ({"command": "a", "shared": True, "warm": 1}, "set shared to false"),
        ({"command": "a", "warm": -1}, "greater than or equal to 0"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"rollout\.tools\.0\.mcp.*{message}"):
        configured(keys)
    with pytest.raises(InputError, match=rf"MCPServer: .*{message}"):
        MCPServer(**keys)


def test_importing_the_class_imports_no_sdk() -> None:
    code = "import sys, turnwise; turnwise.MCPServer('a'); print('mcp' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.stdout.strip() == "False", ran.stderr
