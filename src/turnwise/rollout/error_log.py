"""errors.log in the run's folder: the log of errors in user code that do not end a run."""

import logging
import traceback
from datetime import datetime

from turnwise.core.aio import run_in_thread
from turnwise.core.user_code import describe_user_error
from turnwise.errors import short_path, visible
from turnwise.rollout.run_files import RunFiles

logger = logging.getLogger(__name__)

_NAME = "errors.log"


class ErrorLog:
    """Appends the full traceback of the first error of each kind.

    Example:
        errors = ErrorLog(RunFiles(Path("runs/demo")))
        await errors.write("reward_error", "group3-train.jsonl:7-0", error)
    """

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._seen: set[str] = set()

    async def write(self, kind: str, who: str, error: Exception) -> None:
        """Append an error, unless one of the same kind has been written.

        Args:
            kind: Kind of the error, such as `reward_error`; one of a small set.
            who: Name of the trajectory.
        """
        if kind in self._seen:
            return
        self._seen.add(kind)
        described = await describe_user_error(error)
        frames = "".join(traceback.format_tb(error.__traceback__))
        path = self._files.path(_NAME)
        now = datetime.now().isoformat(" ", "seconds")
        entry = visible(f"{now}  first {kind}: {who}\n{frames}{described}\n\n")
        try:
            await run_in_thread(lambda: self._files.append(_NAME, entry))
        except OSError as failure:
            logger.warning("%s cannot be written: %s", path, failure.strerror)
        logger.info("first %s: %s (full traceback in %s)", kind, described, short_path(str(path)))
