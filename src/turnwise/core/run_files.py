"""Files of a run's folder to which rollouts append: errors.log, extra.jsonl and judge.jsonl.

Only the driver writes them: texts of a process of rollouts, which may be on a node without the
folder, go to it with the groups.
"""

import json
import logging
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.user_code import describe_user_error
from turnwise.errors import short_path, visible

logger = logging.getLogger(__name__)

JUDGEMENTS = "judge.jsonl"
"""File with each request to a judge, by its key, and the answer."""
_KEY = slice(len('{"key": "'), len('{"key": "') + 64)  # in a line of it
_ERRORS = "errors.log"


class RunFiles:
    """The run folder's files; without a folder, what is to be written to them elsewhere."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._writing = threading.Lock()
        self._kept: list[tuple[str, str]] = []
        self._seen: set[str] = set()  # kinds of errors that errors.log has

    def path(self, name: str) -> Path:
        return Path(name) if self.folder is None else self.folder / name

    def append(self, name: str, text: str) -> None:
        with self._writing:
            if self.folder is None:
                self._kept.append((name, text))
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / name).open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)

    async def add(self, name: str, text: str) -> None:
        """Append a text to a file; one that cannot be written is only reported."""
        try:
            await run_in_thread(self.append, name, text)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path(name), error.strerror)

    def take(self) -> list[tuple[str, str]]:
        """Return what has been kept, with the names of the files, and keep it no longer."""
        with self._writing:
            kept, self._kept = self._kept, []
        return kept

    async def log_error(self, kind: str, who: str, error: Exception) -> None:
        """Append the traceback of the first error of a kind, that of the trajectory `who`, to
        errors.log."""
        if kind in self._seen:
            return
        self._seen.add(kind)
        described = await describe_user_error(error)
        frames = "".join(traceback.format_tb(error.__traceback__))
        now = datetime.now().isoformat(" ", "seconds")
        entry = visible(f"{now}  first {kind}: {who}\n{frames}{described}\n\n")
        await self.add(_ERRORS, entry)
        path = short_path(str(self.path(_ERRORS)))
        logger.info("first %s: %s (full traceback in %s)", kind, described, path)


def judgements(run: Path, keys: Collection[str] | None = None) -> Iterator[tuple[str, JsonObject]]:
    """Yield the requests to judges in a run folder, or those with some keys, after their keys."""
    path = run / JUDGEMENTS
    if path.is_file() and not path.is_symlink():
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if keys is None or line[_KEY] in keys:
                    with suppress(ValueError):  # a line that was never completed
                        yield line[_KEY], json.loads(line)
