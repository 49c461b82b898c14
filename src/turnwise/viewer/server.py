"""The viewer's HTTP server: run folders as JSON, and the page that shows them."""

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Query, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.viewer.guard import Guard
from turnwise.viewer.run_files import RunFiles, parse

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HOST = "127.0.0.1"


def make_app(runs: Mapping[str, RunFiles], token: str, port: int) -> ASGIApp:
    """Return the application that shows runs.

    Args:
        token: Text that every request must know.
        port: Port that the server listens on, part of the cookie's name.

    Example:
        app = make_app(open_runs([Path("runs/demo")]), secrets.token_urlsafe(24), 8080)
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    pages = static_files()

    @app.exception_handler(InputError)
    async def explain(_: object, error: InputError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(LookupError)
    async def not_found(_: object, error: LookupError) -> JSONResponse:
        return JSONResponse({"detail": f"there is no {error}"}, 404)

    @app.get("/")
    def page() -> Response:
        return Response(pages["index.html"], media_type="text/html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        return Response(pages[name], media_type=_TYPES[name.rpartition(".")[2]])

    @app.get("/api/runs")
    def list_runs() -> JsonObject:
        return {"runs": [run.describe() for run in runs.values()]}

    @app.get("/api/runs/{run}/metrics")
    def metrics(
        run: str, offset: Annotated[str, Query(pattern=r"^(0|\d{1,18}-[0-9a-f]{16})?$")] = ""
    ) -> JsonObject:
        return runs[run].rows(offset)

    @app.get("/api/runs/{run}/alarms")
    def alarms(run: str) -> JsonObject:
        return runs[run].alarms()

    @app.get("/api/runs/{run}/config")
    def config(run: str) -> dict[str, object]:
        return runs[run].config()

    @app.get("/api/runs/{run}/problem")
    def files_with(run: str, name: str) -> JsonObject:
        return {"files": runs[run].files_with(name)}

    @app.get("/api/runs/{run}/files/{file}")
    def summaries(run: str, file: str) -> JsonObject:
        return {"trajectories": runs[run].index(file).summaries}

    @app.get("/api/runs/{run}/files/{file}/search")
    def search(run: str, file: str, q: Annotated[str, Query(min_length=1)]) -> JsonObject:
        return {"found": runs[run].search(file, q)}

    @app.get("/api/runs/{run}/files/{file}/timeline")
    def timeline(run: str, file: str) -> JsonObject:
        return runs[run].timeline(file)

    @app.get("/api/runs/{run}/files/{file}/{index}")
    def trajectory(run: str, file: str, index: int) -> Response:
        line = runs[run].line(file, index)
        if b"NaN" in line or b"Infinity" in line:  # which JSON does not have
            line = json.dumps(parse(line)).encode()
        return Response(line, media_type="application/json")

    @app.get("/api/runs/{run}/files/{file}/{index}/tokens")
    def tokens(run: str, file: str, index: int) -> JsonObject:
        return runs[run].vocabulary(file, [index])

    @app.get("/api/runs/{run}/files/{file}/{index}/audit")
    def exactness(run: str, file: str, index: int) -> JsonObject:
        return runs[run].audit(file, index)

    @app.get("/api/runs/{run}/files/{file}/{index}/values")
    def values(run: str, file: str, index: int) -> JsonObject:
        return runs[run].token_values(file, index)

    @app.get("/api/runs/{run}/files/{file}/{index}/template/{leaf}")
    def template(run: str, file: str, index: int, leaf: int) -> JsonObject:
        return runs[run].compare_with_template(file, index, leaf)

    return Guard(app, token, port)


def static_files() -> dict[str, str]:
    """Return the files of the page by name; they are part of the package."""
    folder = resources.files("turnwise.viewer") / "static"
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


async def serve(runs: Mapping[str, RunFiles], port: int, announce: Callable[[str], None]) -> None:
    """Serve runs on this machine until cancelled.

    Args:
        port: 0 takes a free one.
        announce: Called with the address, which contains the token, once the server listens.

    Raises:
        InputError: when the port is in use.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((_HOST, port))
    except OSError as error:
        listening.close()
        raise InputError(f"--port {port}: {error.strerror}; choose another") from error
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    options = uvicorn.Config(
        make_app(runs, token, port), log_level="error", access_log=False, ws="none", lifespan="off"
    )
    server = _Server(options)
    listening.listen()
    announce(f"http://{_HOST}:{port}/?token={token}")
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = server.force_exit = True
        await serving


class _Server(uvicorn.Server):
    """uvicorn's server without handling of signals, which the command line does."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
