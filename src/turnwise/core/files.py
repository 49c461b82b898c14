"""Files and folders that appear whole or not at all, and entries of a folder by their numbers.

A replacement is flushed to the disk first, so that a crash or a loss of power leaves the old
version or the new one. A folder is written under its name with `.tmp`. A folder that is replaced is
put aside under its name with `.old` for the moment between two renames.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems that cannot flush a folder


def numbered(folder: Path, kind: str, suffix: str = "") -> list[Path]:
    """Return the entries `KIND-NUMBER` with a suffix in a folder, in the order of their numbers."""
    pattern = re.compile(rf"{re.escape(kind)}-[0-9]+{re.escape(suffix)}")
    found: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        found = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """Return the number in an entry's name, such as 3 of `step-0003.jsonl`."""
    return int(path.name.partition(".")[0].rpartition("-")[2])


def write_file(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, or replace one atomically; only the owner can read a `private` file."""
    new = temporary(path)
    with new.open("w", encoding="utf-8") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def temporary(place: Path) -> Path:
    """Return the name under which a file or folder is written before it is renamed."""
    return place.with_name(place.name + ".tmp")


def _aside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".old")


def put_in_place(folder: Path, new: Path | None = None, *, flush: bool = True) -> None:
    """Create or replace a folder: rename its temporary folder, or the folder `new` next to it, to
    its name. With `flush`, write everything to the disk first, so that it survives a loss of
    power."""
    new, old = new or temporary(folder), _aside(folder)
    if flush:
        sync_tree(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        new.rename(folder)
    except FileNotFoundError:
        if not folder.exists():  # otherwise a reader finished the replacement: see `recover`
            raise
    if flush:
        _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path, is_whole: Callable[[Path], bool]) -> None:
    """Finish a replacement that a crash interrupted between its two renames."""
    old, new = _aside(folder), temporary(folder)
    if old.is_dir() and not folder.exists():
        with suppress(FileNotFoundError):  # another process was faster
            (new if is_whole(new) else old).rename(folder)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and all files in it are on the disk."""
    for place, _, files in os.walk(folder):
        for name in files:
            _sync(Path(place, name))
        _sync(Path(place))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
