"""Files of a run's folder to which rollouts append: errors.log, extra.jsonl and judge.jsonl.

Only the driver writes them. A rollout process, which may be on a node without the folder, sends its
texts to the driver with its groups.
"""

import json
import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted_files import open_untrusted
from turnwise.core.user_code import describe_user_error
from turnwise.errors import short_path, user_traceback, visible, without_numbers

logger = logging.getLogger(__name__)

JUDGEMENTS = "judge.jsonl"
"""File with each request to a judge, by its key, and the answer."""
_KEY = slice(len('{"key": "'), len('{"key": "') + 64)  # place of the key in a line
_ERRORS = "errors.log"
_MAX_CAUSES = 20  # maximum number of errors in errors.log of one kind and environment


class RunFiles:
    """The run folder's files; without a folder, texts are kept for the driver, which writes them
    (`take`)."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._writing = threading.Lock()
        self._kept: list[tuple[str, str]] = []
        self._seen: set[tuple[str, str, str]] = set()  # errors that errors.log has; see `log_error`

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
        """Append a text to a file; if it cannot be written, only log a warning."""
        try:
            await run_in_thread(self.append, name, text)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self.path(name), error.strerror)

    def take(self) -> list[tuple[str, str]]:
        """Return the kept texts, each after the name of its file, and forget them."""
        with self._writing:
            kept, self._kept = self._kept, []
        return kept

    async def log_error(self, kind: str, who: str, error: Exception, environment: str = "") -> None:
        """Append an error of the trajectory `who`, with its traceback, to errors.log. Skip it if
        errors.log already has an error with the same environment, kind and description (apart from
        numbers), or `_MAX_CAUSES` errors with the same environment and kind."""
        alike = sum(seen[:2] == (environment, kind) for seen in self._seen)
        if alike >= _MAX_CAUSES:
            return
        described = await describe_user_error(error)
        key = environment, kind, without_numbers(described)
        if key in self._seen:
            return
        self._seen.add(key)
        now, of = datetime.now().isoformat(" ", "seconds"), environment and f" of {environment}"
        entry = f"{now}  first {kind}{of}: {who}\n{described}\n{user_traceback(error)}\n"
        entry = visible(entry)
        await self.add(_ERRORS, entry)
        path = short_path(str(self.path(_ERRORS)))
        logger.info("first %s: %s (full traceback in %s)", kind, described, path)


def judgements(run: Path, keys: Collection[str] | None = None) -> Iterator[tuple[str, JsonObject]]:
    """Yield the key and the content of each request to a judge in a run folder. If `keys` are
    given, yield only requests with one of these keys."""
    try:
        file = open_untrusted(run / JUDGEMENTS, run)
    except OSError:  # no such file, or a link to another place
        return
    with file:
        for line in file:
            if keys is None or line[_KEY].decode(errors="replace") in keys:
                with suppress(ValueError):  # a line that was never completed
                    yield line[_KEY].decode(), json.loads(line)
