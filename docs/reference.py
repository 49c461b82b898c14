"""Make the reference pages from the code when the documentation is built (a hook of MkDocs).

A comment alone on a line, `<!-- table: NAME -->`, marks the place of a table in a page. Importing
`turnwise.config` needs only pydantic and PyYAML; the server's routes are read from its source,
because importing it would need vLLM.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from turnwise.config.explain import describe_keys, known_keys  # noqa: E402
from turnwise.config.resume import RULES  # noqa: E402

_LISTED = re.compile(r"environments\.NAME\.(tools\[\]|teacher)\.")
"""Keys of an environment that the page has under `rollout.tools` and `algorithm.teacher`."""
_TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
_OPENAI = ROOT / "src" / "turnwise" / "serving" / "openai"
_METHODS = ("get", "post", "delete")
PROJECT_PAGES = {
    name: f"{name.removesuffix('.md').upper()}.md"
    for name in ("architecture.md", "contributing.md", "security.md", "changelog.md")
}
"""Files in the repository's root that become pages, by the page's name."""
_VLLM_ROUTES = {
    "/v1/chat/completions": "OpenAI's Chat Completions, with streaming, tools and `n`",
    "/v1/chat/completions/batch": "vLLM's batch: `messages` is a list of conversations, and the "
    "answer has a choice for each",
    "/invocations": "SageMaker's path: a request of Chat Completions, Completions or Responses",
    "/ping": "SageMaker's name of `/health`",
    "/v1/completions": "OpenAI's Completions",
    "/v1/responses": "OpenAI's Responses",
    "/v1/messages": "Anthropic's Messages",
    "/v1/messages/count_tokens": "Anthropic's token count",
    "/v1/models": "The names of the model",
    "/health": "200 while a worker can take requests",
    "/version": "vLLM's version",
    "/openapi.json": "The schema of all routes",
    "/docs": "The routes with all fields, for a browser; needs no network",
    "/static": "The scripts of `/docs`",
    "/tokenize": "The ids of a text or of a conversation",
    "/detokenize": "The text of ids",
}


_pages: dict[str, tuple[str, str]] = {}
"""Title and text of each page, by its URL, in the order of the navigation."""


def on_nav(nav: Any, **_: Any) -> Any:
    _pages.update((page.url, ("", "")) for page in nav.pages)
    return nav


def on_post_build(config: Any) -> None:
    """Write llms.txt, a list of the pages with the first sentence of each (llmstxt.org), and
    llms-full.txt, the text of all pages."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    lines += [f"- [{t}]({url}): {first_sentence(text)}" for url, (t, text) in _pages.items()]
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join([*lines, ""]))
    (site / "llms-full.txt").write_text("\n\n".join(text for _, text in _pages.values()))


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without links."""
    prose = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraph = re.search(r"^[A-Z`\[].*(?:\n.+)*", prose, re.MULTILINE)
    words = " ".join(paragraph[0].split()) if paragraph else ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)
    return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":")


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Replace each table's comment with the table."""
    made = _TABLE.sub(lambda found: TABLES[found[1]](), markdown)
    if page is not None:
        _pages[page.url] = page.title, made
    return made


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose source is a file in the repository's root."""
    from mkdocs.structure.files import File

    for page, source in PROJECT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](docs/", "](").replace("](README.md)", "](index.md)")
        text = re.sub(r"\]\(([A-Z]+)\.md", lambda found: f"]({found[1].lower()}.md", text)
        text = re.sub(r"\[([^]]+)\]\(LICENSE\)", r"\1 (LICENSE)", text)
        files.append(File.generated(config, page, content=text))
    return files


def configuration() -> str:
    """Return every key of the configuration by section: its type, default and meaning."""
    lines: list[str] = []
    section = None
    for key in describe_keys(items=True):
        if _LISTED.match(key.name):
            continue
        head = key.name.partition(".")[0] if "." in key.name else "The run"
        if head != section:
            section = head
            lines += ["", f"## {section}", "", "| key | type | default | meaning |"]
            lines += ["|---|---|---|---|"]
        kind = f" ({key.kind})" if key.kind else ""
        default = "required" if key.default is None else f"`{key.default}`"
        cells = (f"`{key.name}`{kind}", _cell(key.type), default, _cell(key.meaning))
        lines += [f"| {' | '.join(cells)} |"]
    return "\n".join(lines)


def metrics() -> str:
    """Return every metric of a step, Prometheus' names of it, and its meaning."""
    from turnwise.observe.metrics import meanings, series

    lines = ["| metric | for Prometheus | meaning |", "|---|---|---|"]
    for name, text in meanings().items():
        exported = ", ".join(
            f"`{each.name}`{f' by {each.label}' if each.label else ''}"
            for of, each in series()
            if of == name
        )
        lines.append(f"| `{name}` | {exported} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def resume() -> str:
    """Return the rules of keys when a run is resumed."""
    lines = ["| key | may change | meaning |", "|---|---|---|"]
    known = list(known_keys())
    place = {
        key: next(n for n, k in enumerate(known) if f"{k}.".startswith(f"{key}.")) for key in RULES
    }
    lines += [
        f"| `{key}` | {'yes' if RULES[key][0] else 'no'} | {RULES[key][1]} |"
        for key in sorted(RULES, key=place.__getitem__)
    ]
    return "\n".join(lines)


def routes() -> str:
    """Return the server's routes: Turnwise's own, then those that vLLM's server has too."""
    lines = ["| route | meaning |", "|---|---|"]
    lines += [f"| `{route}` | {_cell(meaning)} |" for route, meaning in own_routes()]
    own = {route.partition(" ")[2] for route, _ in own_routes()}
    lines += ["", "## As OpenAI, Anthropic and vLLM have them", ""]
    lines += ["| route | meaning |", "|---|---|"]
    lines += [
        f"| `{path}` | {_VLLM_ROUTES.get(path, '')} |" for path in sorted(vllm_routes() - own)
    ]
    return "\n".join(lines)


def additions() -> str:
    """Return how to add things, as the docstrings of the modules say."""
    lines = ["| to add | do this | in |", "|---|---|---|"]
    lines += [f"| {what} | {_cell(how)} | `{file}` |" for what, how, file in additions_of_modules()]
    return "\n".join(lines)


def additions_of_modules() -> list[tuple[str, str, str]]:
    """Return each "To add WHAT: HOW" of a module's docstring, with the module's file."""
    found = []
    source = ROOT / "src" / "turnwise"
    for path in sorted(source.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for paragraph in text.split("\n\n"):
            if paragraph.startswith("To add "):
                parts = re.split(r"To add ([^:]+): ", " ".join(paragraph.split()))[1:]
                file = str(path.relative_to(source))
                found += [
                    (what, how.strip(), file)
                    for what, how in zip(parts[::2], parts[1::2], strict=True)
                ]
    return found


def own_routes() -> list[tuple[str, str]]:
    """Method and path of each route that Turnwise adds, with its handler's docstring."""
    found = []
    for node in ast.walk(ast.parse((_OPENAI / "server.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.AsyncFunctionDef):
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    method, path = call.func.attr, ast.literal_eval(call.args[0])
                    if method in _METHODS:
                        meaning = ast.get_docstring(node) or ""
                        found.append((f"{method.upper()} {path}", meaning))
    return found


def vllm_routes() -> set[str]:
    """Paths of vLLM's application that the server keeps."""
    for node in ast.parse((_OPENAI / "vllm_app.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VLLM_ROUTES":
            kept: set[str] = ast.literal_eval(node.value)
            return kept
    raise LookupError("vllm_app.py defines no VLLM_ROUTES")


def _cell(text: str) -> str:
    """A docstring as one cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"<([\w|/]+)>", r"&lt;\1&gt;", text)


TABLES = {
    "additions": additions,
    "configuration": configuration,
    "metrics": metrics,
    "resume": resume,
    "routes": routes,
}
