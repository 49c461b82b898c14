"""The counts of what a reader has to hold in the head."""

from pathlib import Path

import pytest

from benchmarks.structure import (
    called_once,
    figures,
    foreign_internals,
    import_cycles,
    main,
    read,
    sentences,
)

SOURCES = {
    "__init__.py": "from house.first import go\n",
    "first.py": '''
import ray
from ray._private import node
from house import third

def go():
    """Go.

    At once.
    """
    ray.core._flag = ray.util.seen = _once()

def _once():
    return _twice() + _twice()

def _twice():
    return 1
''',
    "second.py": "if TYPE_CHECKING:\n    from house.first import go\n",
    "third.py": "class Third:\n    def late(self):\n        import house.second\n",
    "alone.py": "import subprocess\nimport house.first\nsubprocess.Popen([])\n",
}


def test_what_is_counted_is_what_is_there(tmp_path: Path) -> None:
    source = tmp_path / "house"
    source.mkdir()
    for name, text in SOURCES.items():
        (source / name).write_text(text)
    modules = read(source)
    assert [module.name for module in modules] == [
        "house",
        "house.alone",
        "house.first",
        "house.second",
        "house.third",
    ]
    assert import_cycles(modules) == [["house.first", "house.second", "house.third"]]
    assert called_once(modules) == (1, 2)
    assert {name for module in modules for _, name in foreign_internals(module)} == {
        "ray._private",
        "ray.core._flag",
        "ray.util.seen",
    }
    counted = figures(modules)
    assert counted["lines"] == str(sum(len(text.splitlines()) for text in SOURCES.values()))
    assert (counted["classes"], counted["functions"]) == ("1", "4")
    assert counted["functions of over 60 lines"] == "0"
    assert counted["files that start processes"] == "1"
    assert counted["private functions called once"] == "1 of 2, 50%"


WRITES = """
from house.internals import vllm
from starlette.types import ASGIApp
import uvicorn

def build(own):
    with own:
        app: object = vllm.make(own)
    chat, other = app.state.chat, own.state
    chat.create = own.create
    other.create = chat.create
    vllm.Request.fields["most"].default = None
    app.router.routes[:] = []
    own.kept = app

def tell(request: "vllm.Request", server: uvicorn.Server | None):
    request.choice = "none"
    server._seen = request.choice
    values = request.values()
    values[0] = 1
"""


def test_writes_to_foreign_objects_are_counted_in_every_module(tmp_path: Path) -> None:
    source = tmp_path / "house"
    source.mkdir()
    (source / "app.py").write_text(WRITES)
    (source / "internals.py").write_text(WRITES)
    assert [use for module in read(source) for _, use in foreign_internals(module)] == [
        "app.router.routes[:]",
        "chat.create",
        "request.choice",
        "vllm.Request.fields['most'].default",
    ]


def test_a_package_that_defines_something_is_part_of_a_circle(tmp_path: Path) -> None:
    source = tmp_path / "house"
    (source / "room").mkdir(parents=True)
    (source / "room/__init__.py").write_text("def enter():\n    from house.room.door import Door\n")
    (source / "room/door.py").write_text("from house.room import enter\n\nclass Door: ...\n")
    assert import_cycles(read(source)) == [["house.room", "house.room.door"]]


PROSE = '''"""Doors of a house. A door
has a lock.

Example:
    Door().open()
"""

class Door:
    size: int = 2
    """Width, in metres."""

    def open(self) -> None:
        # The lock is old: it needs
        # two turns.
        self.turn()  # noqa: SLF001
'''


def test_sentences_are_of_docstrings_and_comments_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "house"
    source.mkdir()
    (source / "door.py").write_text(PROSE)
    expected = [
        (1, "Doors of a house."),
        (1, "A door has a lock."),
        (10, "Width, in metres."),
        (13, "The lock is old: it needs two turns."),
    ]
    assert list(sentences(read(source)[0])) == expected
    main([str(source), "--prose", "--count", "2"])
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 2
    main([str(source), "--prose", "--count", "2"])
    assert capsys.readouterr().out == first
