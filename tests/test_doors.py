"""Others are let in by one door of each kind: requests by one client, schemas by one validator."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
CLIENTS = (
    "aiohttp",
    "ftplib",
    "http.client",
    "httpcore",
    "httpx",
    "httpx2",
    "pycurl",
    "requests",
    "smtplib",
    "telnetlib",
    "urllib.request",
    "urllib3",
    "websocket",
    "websockets",
    "xmlrpc.client",
)
CLIENT_FILES = {
    "core/http_client.py": "the client",
    "core/fetch.py": "connects to the very address that it found to be public, hop by hop",
    "core/sources.py": "asks once whether the Hub is there, by its user's proxies; reads no answer",
    "tools/mcp_connection.py": "the MCP SDK takes only its own client, whose answers it limits",
}
VALIDATORS = ("fastjsonschema", "jsonschema", "jsonschema_rs", "openapi_schema_validator")
VALIDATOR_FILES = {"tools/json_schema.py": "the validator"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a source imports, anywhere in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield module
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[first, *_]):
                yield from [first.value] if isinstance(first, ast.Constant) else []


def users(modules: tuple[str, ...]) -> set[str]:
    """Files of the source that import one of some modules, or a part of it."""
    return {
        str(path.relative_to(ROOT / "src" / "turnwise"))
        for path in SOURCES
        for name in imported(ast.parse(path.read_text()))
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def test_requests_to_others_go_through_one_client() -> None:
    assert users(CLIENTS) == CLIENT_FILES.keys()


def test_schemas_of_others_are_read_by_one_validator() -> None:
    assert users(VALIDATORS) == VALIDATOR_FILES.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import aiohttp",
        "def f():\n    import aiohttp.web as w",
        "from urllib import request",
        "from urllib.request import urlopen",
        "import_module('aiohttp')",
    ],
)
def test_the_guard_sees_every_import(source: str, tmp_path: Path) -> None:
    found = set(imported(ast.parse(source)))
    assert found & {"aiohttp", "aiohttp.web", "urllib.request"}
