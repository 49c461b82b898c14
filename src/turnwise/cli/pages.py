"""The pages of the installed version on the terminal: `turnwise docs` and `turnwise explain`."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.config.explain import describe_keys
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.observe.metrics import meanings

_INSTALLED = Path(__file__).parent.parent / "pages"  # the wheel has the pages there
_CLONE = Path(__file__).parents[3] / "docs"
_WORD = re.compile(r"[a-z0-9_]+")
_HEADING = re.compile(r"^#{1,4} (.+)$")
_HEADING_WEIGHT = 4
_COMMON = re.compile(r"an?|and|are|can|doe?|for|how|in?|it|my|of|on|or|the|to|what|why")
"""Words of a question that say nothing of its subject."""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A page's part below one heading."""

    page: str
    """Path below `docs/`."""
    title: str
    text: str
    words: Counter[str] = field(default_factory=Counter, repr=False)

    def to_json(self) -> JsonObject:
        return {"page": self.page, "title": self.title, "text": self.text}


def pages_folder() -> Path:
    """Return the folder of the pages.

    Raises:
        InputError: when the installation has no pages.
    """
    for folder in (_INSTALLED, _CLONE):
        if (folder / "index.md").is_file():
            return folder
    raise InputError(f"this installation has no pages (in {_INSTALLED})")


def sections() -> Iterator[PageSection]:
    """Yield the sections of all pages."""
    folder = pages_folder()
    for path in sorted(folder.rglob("*.md")):
        page, title, lines, code = str(path.relative_to(folder)), "", list[str](), False
        for line in [*path.read_text(encoding="utf-8").splitlines(), "# "]:
            code ^= line.startswith("```")
            heading = _HEADING.match(line) if not code else None
            if heading is None and line != "# ":
                lines.append(line)
                continue
            if text := "\n".join(lines).strip():
                words = Counter(_words(text))
                words.update({word: _HEADING_WEIGHT for word in _words(title)})
                yield PageSection(page, title, text, words)
            title, lines = heading[1] if heading else "", []


def search(query: str, count: int) -> list[PageSection]:
    """Return the sections that fit a query best, the best first: each word of the query counts by
    its frequency in the section (BM25), and more in a heading.

    Raises:
        InputError: when no page has a word of the query.
    """
    words = set(_words(query))
    wanted = {word for word in words if not _COMMON.fullmatch(word)} or words
    known = list(sections())
    mean = sum(each.words.total() for each in known) / len(known)

    def score(section: PageSection) -> float:
        total = 0.0
        for word in wanted:
            having = sum(word in each.words for each in known)
            often = section.words[word]
            rare = math.log(1 + (len(known) - having + 0.5) / (having + 0.5))
            length = 0.25 + 0.75 * section.words.total() / mean
            total += rare * often * 2.2 / (often + 1.2 * length)
        return total

    ranked = sorted(((score(each), -n, each) for n, each in enumerate(known)), reverse=True)
    found = [each for points, _, each in ranked[:count] if points > 0]
    if not found:
        raise InputError(f"no page has a word of {query!r}")
    return found


def explain(name: str) -> list[PageSection]:
    """Return what the pages say of a name: a reason, an event, a metric, an alarm, a key of the
    configuration, a command or a term. The rows of tables that begin with the name come first.

    Raises:
        InputError: when no page has the name.
    """
    found: list[PageSection] = []
    if (meaning := meanings().get(name)) is not None:
        found.append(PageSection("reference/metrics.md", f"metric {name}", meaning))
    for key in describe_keys():
        if key.name == name:
            text = f"{key.meaning}\ntype: {key.type}\ndefault: {key.default or 'must be set'}"
            found.append(PageSection("reference/configuration.md", f"key {name}", text))
    known = list(sections())
    for section in known:
        header: Sequence[str] = ()
        for line in section.text.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            header = header or cells
            if len(cells) > 1 and name in _names(cells[0]):
                rest = zip(header[1:], cells[1:], strict=False)
                text = "\n".join(f"{of}: {cell}" if of else cell for of, cell in rest)
                found.append(PageSection(section.page, f"{section.title}: {cells[0]}", text))
            header = header if cells else ()
    for section in known if not found else ():
        parts = re.split(r"\n\n+(?=\S)", section.text)
        if own := [part for part in parts if f"`{name}`" in part or name == section.title]:
            found.append(PageSection(section.page, section.title, "\n\n".join(own)))
    if not found:
        raise InputError(f"no page has the name {name!r}; `turnwise docs` searches for words")
    return found


def _names(cell: str) -> set[str]:
    """Return the names in a table's cell: the texts in backticks, and the whole cell."""
    quoted = re.findall(r"`([^`]+)`", cell)
    return {cell, *quoted, *(each.split("=")[0] for each in quoted)}


def _words(text: str) -> list[str]:
    """Return a text's words, without the s of plurals."""
    return [word.rstrip("s") for word in _WORD.findall(text.lower())]
