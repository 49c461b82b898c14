"""The page that shows run folders: served over HTTP to clients with the token, or as one file.

The file (`turnwise view --export`) holds the page's scripts and styles, and the answers that the
page requests. Its content security policy allows only its own scripts, by their hashes, and no
network.

To add something to the viewer: make its data in `summarise` or a method of `ViewedRun`
(`viewer/run_files.py`), its view in `viewer/static/` (`steps.js` has the list and its filters,
`trajectory.js` one trajectory), and its route here.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from urllib.parse import quote, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, TrajectoryError, translate_unwritable
from turnwise.observe.conversations import trajectory_file
from turnwise.serving.openai.address import listen
from turnwise.trajectory import Image, Trajectory
from turnwise.trajectory.images import data_url
from turnwise.viewer.continuations import MAX_BODY, Continuations
from turnwise.viewer.run_files import ViewedRun, demo_runs, open_runs, parse

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HOST = "127.0.0.1"
_HOSTS = {_HOST, "localhost"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_LARGEST = 100 * 2**20  # bytes of trajectories in one file; browsers are slow with more
_IMAGES = 30 * 2**20  # bytes of images in one file; further images are left out
_IMAGE = "files/{file}/images/{name}"
_WHAT_IF = "/whatif"
_MODULES = (
    *("dom.js", "data.js", "chart.js", "overview.js", "chat.js", "tokens.js"),
    *("whatif.js", "trajectory.js", "steps.js", "app.js"),
)
"""The page's modules, each after the modules that it imports."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_ANSWERS: dict[str, Callable[..., object]] = {
    "metrics": ViewedRun.rows,
    "alarms": ViewedRun.alarms,
    "config": ViewedRun.config,
    "problem": ViewedRun.files_with,
    "files/{file}": lambda run, file: {"trajectories": run.index(file).summaries},
    "files/{file}/search": ViewedRun.search,
    "files/{file}/timeline": ViewedRun.timeline,
    _IMAGE: ViewedRun.image,
    "files/{file}/{index:int}": ViewedRun.line,
    "files/{file}/{index:int}/tokens": ViewedRun.vocabulary,
    "files/{file}/{index:int}/audit": ViewedRun.audit,
    "files/{file}/{index:int}/judgements": ViewedRun.judgements,
    "files/{file}/{index:int}/values": ViewedRun.token_values,
    "files/{file}/{index:int}/template/{leaf:int}": ViewedRun.compare_with_template,
}
"""Functions for the paths below /api/runs/RUN; they get the run and the variable parts of the path.
If they return bytes, these are JSON already, or an image."""
_QUERIES = {"metrics": "offset", "problem": "name", "files/{file}/search": "q"}
"""Name of the query parameter that becomes the last argument of a path's function."""


def make_app(runs: Mapping[str, ViewedRun], token: str, port: int) -> ASGIApp:
    """Return the application, for clients that know the token; the cookie's name has the port."""
    pages = static_files()

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        return Response(pages[name], media_type=_TYPES[name.rpartition(".")[2]])

    def list_runs(_: Request) -> Response:
        described = [run.describe() | {"running": run.may_be_running()} for run in runs.values()]
        return JSONResponse({"runs": described})

    def route(path: str, read: Callable[..., object]) -> Route:
        def answer(request: Request) -> Response:  # runs in a thread
            run, *at = request.path_params.values()
            if path in _QUERIES:
                at.append(request.query_params.get(_QUERIES[path], ""))
            found = read(runs[run], *at)
            if path == _IMAGE:
                return Response(found, media_type=f"image/{at[-1].rpartition('.')[2]}")
            if isinstance(found, bytes) and (b"NaN" in found or b"Infinity" in found):
                found = parse(found)  # JSON has no such numbers
            text = found if isinstance(found, bytes) else json.dumps(found, default=str)
            return Response(text, media_type="application/json")

        return Route(f"/api/runs/{{run}}/{path}", answer)

    def explain(_: Request, error: Exception) -> Response:
        missing = isinstance(error, LookupError)
        detail = f"there is no {error}" if missing else str(error)
        return JSONResponse({"detail": detail}, 404 if missing else 422)

    continuations = Continuations()

    async def continue_it(request: Request) -> Response:
        run, file = runs[request.path_params["run"]], request.path_params["file"]
        line = await run_in_thread(run.line, file, request.path_params["index"])
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise InputError(f"a request has at most {MAX_BODY:,} bytes")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"a request is JSON: {error}") from error
        trajectory = Trajectory.from_json(line.decode())
        return JSONResponse(await continuations.make(run.path, file, trajectory, asked))

    routes = [Route("/", page), Route("/static/{name}", page), Route("/api/runs", list_runs)]
    what_if = f"/api/runs/{{run}}/files/{{file}}/{{index:int}}{_WHAT_IF}"
    routes.append(Route(what_if, continue_it, methods=["POST"]))
    routes += [route(path, read) for path, read in _ANSWERS.items()]
    handlers = dict.fromkeys((InputError, LookupError, TrajectoryError), explain)
    return _guarded(Starlette(routes=routes, exception_handlers=handlers), token, port)


def _guarded(app: ASGIApp, token: str, port: int) -> ASGIApp:
    """Return an application that answers only clients with the token. A client sends the token once
    in the query, and then in a cookie. Only local host names are accepted, so that no other site's
    name can be pointed here, and only the methods GET and HEAD, except that the page itself may ask
    for continuations. The response headers keep texts from running as scripts."""
    cookie = f"turnwise-view-{port}"

    def matches(given: str) -> bool:
        return hmac.compare_digest(given.encode(), token.encode())

    def chosen(scope: Scope) -> ASGIApp:
        request = Request(scope)
        if request.headers.get("host", "").rpartition(":")[0] not in _HOSTS:
            return PlainTextResponse("unknown host", 403)
        asks = request.method == "POST" and request.url.path.endswith(_WHAT_IF)
        if asks and request.headers.get("origin") != f"http://{request.headers.get('host')}":
            return PlainTextResponse("another site's page", 403)
        if request.method not in ("GET", "HEAD") and not asks:
            return PlainTextResponse("read only", 405)
        given, kept = request.query_params.get("token"), request.cookies.get(cookie)
        if given is not None and matches(given):
            query = request.query_params.multi_items()
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            target = "/" + scope["path"].lstrip("/\\") + (f"?{rest}" if rest else "")
            response = RedirectResponse(target, 303)
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
            return response
        if given is None and kept is not None and matches(kept):
            return app
        return PlainTextResponse(
            "open the address that `turnwise view` printed: it contains the token", 403
        )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http":
            await chosen(scope)(scope, receive, send_guarded)

    return guarded


def static_files() -> dict[str, str]:
    """Return the files of the page by name; they are part of the package."""
    folder = resources.files("turnwise.viewer") / "static"
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _TYPES
    }


async def view(
    folders: Sequence[Path], port: int, announce: Callable[[str], None], *, demo: bool = False
) -> None:
    """Serve runs on this machine until cancelled; port 0 takes a free port. `announce` gets the
    address, which contains the token, once the server listens."""
    with ExitStack() as stack:
        recorded = stack.enter_context(demo_runs()) if demo else []
        runs = open_runs([*folders, *recorded])
        try:
            listening = listen(_HOST, port)
        except InputError as error:
            raise InputError(f"--port {port}: {error.__cause__}; choose another") from error
        port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
        app = make_app(runs, token, port)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", access_log=False, ws="none", lifespan="off")
        )
        vars(server)["capture_signals"] = nullcontext  # the command line handles signals
        announce(f"http://{_HOST}:{port}/?token={token}")
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = server.force_exit = True
            await serving


def write_page(
    folder: Path, target: Path, step: int | None, heldout: bool, index: int | None
) -> None:
    """Write one page for a step of a run (None means the last step), or, if `index` is given, for
    the step's trajectory with this number, counted from 0."""
    [run] = open_runs([folder]).values()
    file = trajectory_file(run.path, step, heldout).stem
    try:
        lines = run.index(file).ranges
    except KeyError:
        raise InputError(f"{run.path} has no trajectories named {file}") from None
    chosen = range(len(lines)) if index is None else [index]
    if index is not None and not 0 <= index < len(lines):
        raise InputError(f"{file} has {len(lines)} trajectories, numbered from 0")
    if (size := sum(lines[i][1] for i in chosen)) > _LARGEST:
        raise InputError(
            f"{file} has {size / 2**20:,.0f} MiB of trajectories, too many for one page: choose "
            "one with --trajectory"
        )
    name = quote(run.name, safe="!~*'()")  # as the page encodes it
    prefix = f"/api/runs/{name}"
    described = run.describe() | {"files": {file: size}}
    answers: JsonObject = {
        "/api/runs": {"runs": [described]},
        f"{prefix}/metrics": run.rows(),
        f"{prefix}/alarms": run.alarms(),
        f"{prefix}/config": run.config(public=True),
        f"{prefix}/files/{file}": {"trajectories": run.index(file).summaries},
        f"{prefix}/files/{file}/timeline": run.timeline(file),
        "tokens": run.vocabulary(file, *chosen),
    }
    images: dict[str, Image] = {}
    for i in chosen:
        line = run.line(file, i)
        answers[f"{prefix}/files/{file}/{i}"] = parse(line)
        trajectory = Trajectory.from_json(line.decode())
        images |= trajectory.images
        for branch in trajectory.branches():
            compared = run.compare_with_template(file, i, branch.leaf)
            answers[f"{prefix}/files/{file}/{i}/template/{branch.leaf}"] = compared
        answers[f"{prefix}/files/{file}/{i}/audit"] = run.audit(file, i)
        answers[f"{prefix}/files/{file}/{i}/judgements"] = run.judgements(file, i)
        answers[f"{prefix}/files/{file}/{i}/values"] = run.token_values(file, i)
    room = _IMAGES
    for image in images.values():
        with suppress(LookupError, TrajectoryError):  # it is gone, or was changed
            image = replace(image, data=run.image(file, image.name))
            room -= len(image.data)
            if room >= 0:
                answers[f"{prefix}/files/{file}/images/{image.name}"] = data_url(image)
    start = f"#/run/{name}/{file}" + ("" if index is None else f"/{index}")
    with translate_unwritable(target):
        target.write_text(_page({"start": start, "answers": answers}), encoding="utf-8")


def _page(data: JsonObject) -> str:
    files = static_files()
    assert set(_MODULES) == {name for name in files if name.endswith(".js")}
    # One script without imports, because the names in all modules are unique.
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", files[name])) for name in _MODULES)
    style = files["style.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" never appears in the data as such, so that no text can end the script element.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    html = files["index.html"]
    for old, new in (
        (
            '<link rel="stylesheet" href="/static/style.css">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f"<style>{style}</style>",
        ),
        (
            '<script type="module" src="/static/app.js"></script>',
            f'<script type="application/json" id="embedded">{embedded}</script>\n'
            f'<script type="module">{script}</script>',
        ),
        ('<link rel="icon" href="/static/icon.svg">', '<link rel="icon" href="data:,">'),
    ):
        before, found, after = html.partition(old)
        assert found, f"index.html has no {old}"
        html = before + new + after
    return html


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
