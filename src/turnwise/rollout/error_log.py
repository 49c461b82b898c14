"""The errors of user code that a run survives, for people: errors.log in the run's folder."""

import logging
import traceback
from datetime import datetime
from pathlib import Path

from turnwise.errors import short_path
from turnwise.tasks import describe_user_error, run_in_thread

logger = logging.getLogger(__name__)


class ErrorLog:
    """Appends the whole traceback of the first error of each kind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()

    async def write(self, kind: str, who: str, error: Exception) -> None:
        """Keep an error, unless one of its kind is known.

        Args:
            kind: Such as `reward_error`; there should be few.
            who: The trajectory's name.
        """
        if kind in self._seen:
            return
        self._seen.add(kind)
        described = await describe_user_error(error)
        frames = "".join(traceback.format_tb(error.__traceback__))
        now = datetime.now().isoformat(" ", "seconds")
        entry = f"{now}  first {kind}: {who}\n{frames}{described}\n\n"
        try:
            await run_in_thread(lambda: self._append(entry))
        except OSError as failure:
            logger.warning("%s cannot be written: %s", self._path, failure.strerror)
        logger.info(
            "first %s: %s (whole traceback in %s)", kind, described, short_path(str(self._path))
        )

    def _append(self, entry: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(entry)
