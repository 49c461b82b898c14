"""MCP servers that people have, in an environment of their own: the SDK before its version 2."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from turnwise.tools.mcp import MCPServer
from turnwise.tools.toolbox import Toolbox


@pytest.fixture(scope="module")
def programs() -> Path:
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=ROOT, check=True, timeout=900)
    return ROOT / ".venv-interop" / "bin"


@pytest.mark.slow
async def test_a_clock_and_a_database(programs: Path, tmp_path: Path) -> None:
    """mcp-server-time, and mcp-server-sqlite with a database for each trajectory."""
    clock = MCPServer(str(programs / "mcp-server-time"), ["--local-timezone", "Europe/Oslo"])
    toolset = clock.toolset()
    tools = Toolbox(await toolset.open(), timeout=60, max_chars=4000)
    assert {s["function"]["name"] for s in tools.schemas} == {"get_current_time", "convert_time"}
    converted = await tools.call(
        "convert_time",
        '{"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Asia/Kolkata"}',
    )
    assert converted.outcome == "ok"
    assert json.loads(converted.text)["time_difference"] == "-3.5h"
    refused = await tools.call("get_current_time", '{"timezone": "Nowhere"}')
    assert refused.outcome == "error"
    await toolset.close()

    opened = []
    for number in range(2):
        path = str(tmp_path / f"{number}.db")
        server = MCPServer(str(programs / "mcp-server-sqlite"), ["--db-path", path], prefix="db_")
        opened.append(server.toolset())
        tools = Toolbox(await opened[-1].open(), timeout=60, max_chars=4000)
        for name, query in (
            ("db_create_table", "CREATE TABLE places (name TEXT, people INTEGER)"),
            ("db_write_query", f"INSERT INTO places VALUES ('Merrow', {number})"),
            ("db_read_query", "SELECT people FROM places"),
        ):
            result = await tools.call(name, json.dumps({"query": query}))
            assert result.outcome == "ok", result.text
        assert result.text == f"[{{'people': {number}}}]"
    for toolset in opened:
        await toolset.close()
