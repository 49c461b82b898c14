"""Lines of other programs in our log: bounded, whole, and counted."""

import logging
import re

import pytest

from turnwise.core.child import LINES_A_SECOND, LONGEST_LINE, ForeignLines

logger = logging.getLogger("tests.foreign")


def test_lines_are_whole_however_they_come(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.foreign")
    lines = ForeignLines(logger, "it")
    for piece in (b"one\ntw", b"", b"o\r\n", b"\n", b"\xff", b"!"):
        lines.add(piece)
    lines.end()
    assert caplog.messages == ["it: one", "it: two", "it: ", "it: �!"]


def test_a_flood_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.foreign")
    lines = ForeignLines(logger, "it")
    piece = b"noise\n" * 10_000
    for _ in range(100):
        lines.add(piece)
    lines.add(b"the last")
    lines.end()
    counts = [int(n) for m in caplog.messages if (n := re.sub(r".*\[(\d+) more.*|.*", r"\1", m))]
    shown = [message for message in caplog.messages if message == "it: noise"]
    assert len(shown) + sum(counts) == 1_000_000
    assert len(shown) % LINES_A_SECOND == 0
    assert "it: the last" in caplog.messages


def test_a_long_line_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tests.foreign")
    lines = ForeignLines(logger, "it")
    for _ in range(1_000):
        lines.add(b"x" * 65_536)
    assert len(lines._begun) <= LONGEST_LINE + 1
    lines.add(b"\nshort\n")
    assert caplog.messages == [f"it: {'x' * LONGEST_LINE}…", "it: short"]
