"""One HTML file that shows a step, or a trajectory, without a server: `turnwise view --export`.

The file holds the page's scripts and styles and the answers of the server that the page asks for.
Nothing in it can load or send anything: its policy allows only its own scripts, by their hashes.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from urllib.parse import quote

from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError, translate_unwritable
from turnwise.observe.conversations import trajectory_file
from turnwise.trajectory import Trajectory
from turnwise.viewer.run_files import open_runs, parse
from turnwise.viewer.server import static_files

_LARGEST = 100 * 2**20
"""Bytes of trajectories that one file may hold; browsers read more only slowly."""
_MODULES = (
    *("dom.js", "data.js", "chart.js", "overview.js", "chat.js", "tokens.js"),
    *("trajectory.js", "steps.js", "app.js"),
)
"""The page's modules, each after those that it imports."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_page(
    folder: Path, target: Path, step: int | None, heldout: bool, index: int | None
) -> None:
    """Write one page of a step of a run (None: the last), or of one trajectory, numbered from 0."""
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
        "tokens": run.vocabulary(file, chosen),
    }
    for i in chosen:
        line = run.line(file, i)
        answers[f"{prefix}/files/{file}/{i}"] = parse(line)
        for branch in Trajectory.from_json(line.decode()).branches():
            compared = run.compare_with_template(file, i, branch.leaf)
            answers[f"{prefix}/files/{file}/{i}/template/{branch.leaf}"] = compared
        answers[f"{prefix}/files/{file}/{i}/audit"] = run.audit(file, i)
        answers[f"{prefix}/files/{file}/{i}/values"] = run.token_values(file, i)
    start = f"#/run/{name}/{file}" + ("" if index is None else f"/{index}")
    with translate_unwritable(target):
        target.write_text(_page({"start": start, "answers": answers}), encoding="utf-8")


def _page(data: JsonObject) -> str:
    files = static_files()
    assert set(_MODULES) == {name for name in files if name.endswith(".js")}
    # One script: imports are left out, as the names in all modules are unique.
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", files[name])) for name in _MODULES)
    style = files["style.css"]
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" never appears in the data as such, so that no text can end the element.
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
