"""Lines of other programs in our log: as many a second, and as long, as people can read."""

import logging
import time

from turnwise.errors import visible

LINES_A_SECOND = 20
"""Number of a program's lines that are logged in a second."""
LONGEST_LINE = 1_000
"""Number of bytes of a line that are logged."""


class ForeignLines:
    """The output of a program that writes what it likes, as lines of our log.

    What is beyond `LINES_A_SECOND` and `LONGEST_LINE` is left out; its lines are counted.

    Args:
        name: The program in the log.

    Example:
        lines = ForeignLines(logger, "the agent worker my_agent.py")
        while piece := await process.stderr.read(65_536):
            lines.add(piece)
        lines.end()
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._begun = b""
        """Beginning of the line that has not ended."""
        self._since = time.monotonic()
        self._logged = 0
        self._left_out = 0

    def add(self, piece: bytes) -> None:
        """Add output as it comes."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._count()
            self._since, self._logged = now, 0
        *lines, rest = piece.split(b"\n", max(0, LINES_A_SECOND - self._logged))
        for line in lines:
            self._log(self._begun + line)
            self._begun = b""
        if ended := rest.count(b"\n"):
            self._left_out += ended
            self._begun, rest = b"", rest[rest.rfind(b"\n") + 1 :]
        self._begun += rest[: LONGEST_LINE + 1 - len(self._begun)]

    def end(self) -> None:
        """Log what has not been logged at the end of the output."""
        if self._begun:
            self._log(self._begun)
            self._begun = b""
        self._count()

    def _log(self, line: bytes) -> None:
        self._logged += 1
        text = line[:LONGEST_LINE].decode(errors="replace").rstrip("\r")
        cut = "…" if len(line) > LONGEST_LINE else ""
        self._logger.info("%s: %s%s", self._name, visible(text), cut)

    def _count(self) -> None:
        if self._left_out:
            self._logger.info("%s: [%d more lines left out]", self._name, self._left_out)
            self._left_out = 0
