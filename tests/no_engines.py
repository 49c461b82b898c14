"""A pytest plug-in: the tests that need neither vLLM nor Ray, which cannot be imported with it.

    pytest -p tests.no_engines            # `make quick`: all such tests that are not slow
    pytest -p tests.no_engines PATH ...   # those under these paths

A test that asks for the fixture of an engine or of Ray is left out, and so is a file that starts
programs. What imports vLLM or Ray by itself is skipped.
"""

import sys
from collections.abc import Generator

import pytest

NAMES = ("vllm", "ray")
HALTED = (
    *(f"import of {name} halted" for name in NAMES),
    *(f"No module named '{name}." for name in NAMES),
    "vLLM is not installed",
)
"""Beginnings of the errors of what needs an engine."""
FIXTURES = {"ray_started"}  # an engine asks for it, too
PROGRAMS = ("python", "command_environment", "own_environment")
"""Functions of `conftest.py` with which a file starts programs."""

for name in NAMES:
    sys.modules[name] = None  # type: ignore[assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need engines, or programs that do."""
    left_out = [item for item in items if needs_engines(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def needs_engines(item: pytest.Item) -> bool:
    """Return whether a test asks for an engine or Ray, or its file starts programs."""
    if FIXTURES & set(getattr(item, "fixturenames", ())):
        return True
    used = (vars(getattr(item, "module", object)).get(name) for name in PROGRAMS)
    return any(getattr(each, "__module__", "").endswith("conftest") for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports vLLM or Ray."""
    report = yield
    if report.failed and any(text in report.longreprtext for text in HALTED):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "Skipped: imports vLLM or Ray")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that imports vLLM or Ray by itself, also where its error is another's cause."""
    report = yield
    if report.failed and call.excinfo is not None and halted(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "Skipped: needs vLLM or Ray")
    return report


def halted(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is that of a missing engine."""
    if error is None or str(error).startswith(HALTED):
        return error is not None
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(halted, (*inner, error.__cause__, error.__context__)))
