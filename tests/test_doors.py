"""Others are let in by one door of each kind: requests by one client, schemas by one validator,
files by one opener."""

import ast
import re
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

OTHERS_NAMES = (
    *("agent_worker.py", "chat", "compat", "core/images.py", "core/run_files.py", "rollouts"),
    *("serving", "tinker", "tools", "trajectory", "viewer"),
)
"""Files and folders of the source whose names and files may come from others."""
PATH_METHODS = (
    *("glob", "hardlink_to", "iterdir", "mkdir", "read_bytes", "read_text", "rglob", "rmdir"),
    *("symlink_to", "touch", "unlink", "write_bytes", "write_text"),
)
MODULE_FUNCTIONS = {
    "io": ("open", "open_code"),
    "os": (
        *("chmod", "chown", "link", "listdir", "makedirs", "mkdir", "open", "remove", "rename"),
        *("replace", "rmdir", "scandir", "symlink", "truncate", "unlink", "walk"),
    ),
    "shutil": ("copy", "copy2", "copyfile", "copytree", "move", "rmtree", "unpack_archive"),
}
FILE_FILES = {
    "agent_worker.py": "the null device",
    "compat/chatlearn/model_file.py": "files that the user's script names",
    "compat/chatlearn/pipeline.py": "makes the folder of the run",
    "compat/chatlearn/pipeline_file.py": "files that the user's script names",
    "compat/nemo_rl/program.py": "the folder of the run",
    "compat/nemo_rl/utilities.py": "files that the user's script names",
    "compat/trl/trainer.py": "the folder that the user's script names",
    "core/run_files.py": "appends to files of the run, by names of its own",
    "rollouts/data.py": "data of the configuration",
    "rollouts/environment_host.py": "a file that the run wrote into a private folder",
    "rollouts/evaluation.py": "writes files of the run, by names of its own",
    "rollouts/group.py": "writes files of the run, by names of its own",
    "rollouts/remote_episode.py": "a private folder",
    "tinker/backend.py": "the lock of the run's folder",
    "tinker/checkpoints.py": "folders that it wrote itself, whose names it checks",
    "tinker/routes.py": "sends files of a checkpoint in the folder that `hold` returns",
    "tinker/service.py": "files that it wrote itself, by the ids that it chose",
    "tools/code.py": "a pipe",
    "tools/sandbox/backends.py": "the sandbox's folder, which it makes",
    "tools/sandbox/inner.py": "runs in the sandbox",
    "tools/sandbox/keeper.py": "imports nothing of the package; follows no link where it counts",
    "trajectory/files.py": "a file that the user names; images by names that match `FILE`",
    "trajectory/images.py": "writes images under their hashes",
    "trajectory/training_trace.py": "files that the user names",
    "viewer/run_files.py": "lists the recorded runs that it unpacked",
    "viewer/server.py": "files of the package, and the page that the user asks for",
}


def opened(tree: ast.AST) -> Iterator[str]:
    """What a source may do with files by their names, anywhere in it."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="open" | "safe_open" | "FileResponse" | "StaticFiles"):
                yield node.id
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in MODULE_FUNCTIONS:
                yield from [f"{module}.{name}"] if name in MODULE_FUNCTIONS[module] else []
            case ast.Attribute(attr=name) if name in PATH_METHODS:
                yield name
            case ast.Call(
                func=ast.Attribute(attr="open"), args=[ast.Constant(value=str(mode)), *_]
            ):
                yield from ["open"] if re.fullmatch("[rwaxbt+]+", mode) else []


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


def test_files_of_others_are_opened_by_one_opener() -> None:
    """The files named above open others by names, and say why."""
    folder = ROOT / "src" / "turnwise"
    used = {
        name
        for path in SOURCES
        if (name := str(path.relative_to(folder))).startswith(OTHERS_NAMES)
        and any(opened(ast.parse(path.read_text())))
    }
    assert used == FILE_FILES.keys()


@pytest.mark.parametrize(
    "source",
    [
        "open(name)",
        "def f():\n    with path.open('rb') as file: pass",
        "os.open(name, os.O_RDONLY)",
        "(folder / name).read_text()",
        "shutil.rmtree(folder)",
        "run_in_thread(path.unlink)",
        "FileResponse(path)",
    ],
)
def test_the_guard_sees_every_way_to_a_file(source: str) -> None:
    assert any(opened(ast.parse(source)))


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
