"""The opener of files that others may have written, or whose names others give.

It opens regular files only, and never waits: a pipe or a device might never end. Below a folder it
follows no link, at any depth, so that nothing leads out of the folder. It checks the open file, not
the path, so that nothing can replace the file after the check.
"""

import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO


def open_untrusted(path: Path, below: Path | None = None) -> BinaryIO:
    """Open a file for reading. It must lie below the folder `below` if that is given; the folder
    itself may be a link.

    Raises:
        OSError: when it is not a regular file or, with `below`, lies elsewhere or behind a link.

    Example:
        with open_untrusted(run / "trajectories" / name, below=run) as file:
            line = file.readline(1 << 20)
    """
    try:
        file = open(path, "rb", opener=lambda *_: _descriptor(path, below))  # noqa: SIM115
    except ValueError as error:  # a null character in a name
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        error.filename = str(path)  # not only the part of it that was opened
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_untrusted(path: Path, limit: int, below: Path | None = None) -> bytes:
    """Return the bytes of a file that `open_untrusted` opens; raise OSError if there are more than
    `limit`."""
    with open_untrusted(path, below) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return data


def path_of(file: BinaryIO) -> Path:
    """Return a path that leads to the open file itself, for packages that open files by path."""
    return Path(file.name if sys.platform == "win32" else f"/dev/fd/{file.fileno()}")


def _descriptor(path: Path, below: Path | None) -> int:
    names = () if below is None else path.relative_to(below).parts
    if below is not None and (not names or ".." in names):
        raise ValueError(f"not below {below}")
    if sys.platform == "win32":  # where only administrators make links
        return os.open(path, os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    if below is None:
        return os.open(path, flags)
    place = os.open(below, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            outer, folder = place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            place = os.open(name, folder, dir_fd=outer)
            os.close(outer)
        return os.open(names[-1], flags | os.O_NOFOLLOW, dir_fd=place)
    finally:
        os.close(place)
