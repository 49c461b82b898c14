"""What the docs name is there: configuration keys, tests, files."""

import re
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from turnwise.config import Config, known_keys

TABLE = ROOT / "docs" / "coming-from.md"
_SECTIONS = "|".join(
    name for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
)
_KEY = re.compile(rf"`((?:{_SECTIONS})\.[a-z_.]+)[`:]")


def rows() -> Iterator[tuple[str, str, str]]:
    for line in TABLE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "|---")):
            theirs, ours, test = (cell.strip() for cell in line.strip("|").split(" | "))
            if test != "test":
                yield theirs, ours, test


def test_every_row_names_a_test_that_is_there() -> None:
    sources = {
        str(path.relative_to(ROOT / "tests")): path.read_text()
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    wanted = [
        (theirs, *name.partition("::")[::2])
        for theirs, _, test in rows()
        for name in re.findall(r"`([^`]+)`", test)
    ]
    assert len(wanted) > 50
    for theirs, file, name in wanted:
        if name:
            assert re.search(rf"^(?:async )?def {name}", sources[file], re.M), (theirs, file, name)
        else:
            assert (ROOT / file).is_file(), (theirs, file)


@pytest.mark.parametrize("file", ["docs/coming-from.md", "README.md"])
def test_every_key_is_one_of_the_configuration(file: str) -> None:
    known = known_keys()
    text = (ROOT / file).read_text()
    if file.startswith("docs"):
        text = "\n".join(ours for _, ours, _ in rows())
    keys = _KEY.findall(text)
    assert len(keys) > 20
    sections = {key.rpartition(".")[0] for key in known}
    assert [k for k in keys if k not in known and k.rstrip(".") not in sections] == []


def test_the_readme_tells_where_every_file_is() -> None:
    text = (ROOT / "README.md").read_text()
    sources = ROOT / "src" / "turnwise"
    folders = {"loops", "algorithms"}  # told as one line each
    missing = [
        path.relative_to(sources)
        for path in sources.rglob("*.py")
        if path.name != "__init__.py" and path.parent.name not in folders
        if path.name not in text
    ]
    assert missing == []


def numbers(text: str) -> set[str]:
    """The requirements that a text names, singly (C17) or as a range (D22 to D24)."""
    named = set(re.findall(r"\b[ABCD]\d{1,2}\b", text))
    for letter, first, last in re.findall(r"\b([ABCD])(\d+) to \1(\d+)\b", text):
        named |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return named


def test_a_number_of_the_table_stands_in_a_test() -> None:
    found = numbers("\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")))
    wanted = (numbers(theirs) for theirs, _, test in rows() if not test.startswith("`benchmarks"))
    assert len(named := set[str]().union(*wanted)) > 50
    assert named - found == set()
