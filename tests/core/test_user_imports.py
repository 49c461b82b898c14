"""First imports by user code: modules that import one another, in threads that enter by each."""

import asyncio
import importlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnwise.core import user_imports
from turnwise.core.user_code import call_and_wait, call_user_code

MODULES = ("ring.left", "ring.right")


@pytest.fixture(autouse=True)
def _ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose modules import each other in an order that the package knows. A thread that
    holds `ring.left` waits for the package, which another thread imports: one must see a part."""
    folder = tmp_path / "ring"
    folder.mkdir()
    wait = "import time\ntime.sleep(0.2)\n"
    (folder / "__init__.py").write_text(f"{wait}from ring.right import right\n")
    (folder / "left.py").write_text(f"from ring import right as module\n{wait}left = 1\n")
    (folder / "right.py").write_text(f"from ring.left import left\n{wait}right = 1\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "old.py").write_text("import warnings\nwarnings.warn('old', stacklevel=2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("ring", "ring.broken", "ring.old", *MODULES):
        sys.modules.pop(name, None)


def names_of(module: str) -> tuple[str, bool]:
    found = importlib.import_module(module)
    return module, hasattr(found, module.partition(".")[2])


async def names_on_the_loop(module: str) -> tuple[str, bool]:
    await asyncio.sleep(0)
    return names_of(module)


@pytest.mark.parametrize("second", [names_of, names_on_the_loop], ids=["thread", "loop"])
async def test_modules_that_import_one_another_are_whole_in_every_call(
    second: Callable[[str], object],
) -> None:
    """In tools, steps and rewards alike: each is such a call."""
    calls = (
        call_user_code(each, module, name="it", seconds=60)
        for each, module in zip((names_of, second), MODULES, strict=True)
    )
    assert await asyncio.gather(*calls) == [(module, True) for module in MODULES]
    assert user_imports._turn._since is None


def test_an_endless_import_delays_others_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_imports, "MAX_SECONDS", 0.1)
    gate, begun = threading.Event(), threading.Event()

    def hang() -> None:
        user_imports._turn.begin()
        begun.set()
        gate.wait(60)
        user_imports._turn.end()

    hanging = threading.Thread(target=hang, daemon=True)
    hanging.start()
    assert begun.wait(60)
    assert call_and_wait(lambda: names_of("ring.left"), name="it", seconds=60)[1]
    assert user_imports._turn._since is not None
    gate.set()
    hanging.join(60)
    assert user_imports._turn._since is None


def test_an_event_loop_of_our_own_waits_for_no_import() -> None:
    user_imports._turn.begin()
    try:
        own = threading.Thread(target=names_of, args=["ring.left"])
        own.start()
        own.join(60)
        assert "ring.left" in sys.modules
    finally:
        user_imports._turn.end()


def test_errors_and_warnings_of_an_import_name_those_who_import() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        importlib.import_module("ring.broken")
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert not any("turnwise" in frame.filename for frame in frames[1:])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import ring.old  # type: ignore[import-not-found]  # noqa: F401
    assert [each.filename for each in caught] == [__file__]
