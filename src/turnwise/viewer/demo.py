"""Two recorded runs, which `turnwise view --demo` shows to who has none yet.

`examples/calculator/recording.py` trained them; the archive has the files of their run folders
that the viewer reads, and the tokenizer.
"""

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECORDING = Path(__file__).with_name("demo_runs.zip")
"""The archive."""


@contextmanager
def demo_runs() -> Iterator[list[Path]]:
    """Unpack the recorded runs for the length of a `with` block; return their folders.

    Example:
        with demo_runs() as folders:
            opened = open_runs(folders)
    """
    with tempfile.TemporaryDirectory(prefix="turnwise-demo-") as place:
        with zipfile.ZipFile(RECORDING) as archive:
            archive.extractall(place)
        yield sorted(Path(place).iterdir())
