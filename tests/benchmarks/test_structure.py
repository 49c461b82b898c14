"""The counts of what a reader has to hold in the head."""

from pathlib import Path

from benchmarks.structure import called_once, figures, foreign_internals, import_circles, read

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
    assert import_circles(modules) == [["house.first", "house.second", "house.third"]]
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
