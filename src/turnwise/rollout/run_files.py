"""Files of a run's folder to which rollouts append: errors.log and extra.jsonl.

Only the driver writes them. A process of rollouts may be on a node that does not share the folder,
or shares it without atomic appends; its texts go to the driver with its groups.
"""

import threading
from pathlib import Path


class RunFiles:
    """The run folder's files, or what is to be written to them elsewhere.

    Args:
        folder: The run folder; None keeps the texts until they are taken.

    Example:
        files = RunFiles(Path("runs/demo"))
        files.append("extra.jsonl", '{"problem_id": "rows:1"}')
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._writing = threading.Lock()
        self._kept: list[tuple[str, str]] = []

    def path(self, name: str) -> Path:
        """Return a file's path in messages."""
        return Path(name) if self._folder is None else self._folder / name

    def append(self, name: str, text: str) -> None:
        """Append a text to a file at once; call it from a thread.

        Raises:
            OSError: when it cannot be written.
        """
        with self._writing:
            if self._folder is None:
                self._kept.append((name, text))
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / name).open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)

    def take(self) -> list[tuple[str, str]]:
        """Return what has been kept, with the names of the files, and keep it no longer."""
        with self._writing:
            kept, self._kept = self._kept, []
        return kept
