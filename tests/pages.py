"""The code blocks of README, docs and the examples' page, as tests see them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT, own_environment

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (
        ROOT / "AGENTS.md",
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    )
)
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NAME = re.compile(r"# ([\w./-]+\.(?:py|yaml))$")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    """Reason why no test runs it; None if one does."""

    @property
    def name(self) -> str | None:
        """The file that its first line names."""
        found = _NAME.match(self.text.partition("\n")[0])
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["language"], found["text"], found["reason"])


def write_files(page: str, folder: Path, replacements: dict[str, str]) -> list[Path]:
    """Write the files that a page's blocks name, with texts replaced; returns their paths."""
    written = []
    for block in blocks(page):
        if block.name:
            text = block.text
            for old, new in replacements.items():
                text = text.replace(old, new)
            (folder / block.name).write_text(text, encoding="utf-8")
            written.append(folder / block.name)
    return written


def run_program(path: Path) -> None:
    """Run a page's program as a user does; it starts its own Ray."""
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=path.parent,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
