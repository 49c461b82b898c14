"""Files that are not trusted: what is opened, and that nothing is waited for."""

import os
import re
from pathlib import Path

import pytest

from turnwise.chat.images import read_image
from turnwise.core.untrusted_files import open_untrusted, path_of, read_untrusted
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, a pipe, and links out of it."""
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "run"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_bytes(b"own")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "linked").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    return folder


def test_a_file_below_a_folder_is_opened(folder: Path, tmp_path: Path) -> None:
    with open_untrusted(folder / "inner" / "file", below=folder) as file:
        assert path_of(file).read_bytes() == b"own"
    (tmp_path / "other").symlink_to(folder)
    assert read_untrusted(tmp_path / "other" / "inner" / "file", 3, tmp_path / "other") == b"own"


@pytest.mark.parametrize(
    "name",
    ["link", "linked/secret", "../secret", "inner/../link", "pipe", "inner", "", "a\0b", "missing"],
)
def test_nothing_else_is_opened_below_it(folder: Path, name: str) -> None:
    with pytest.raises(OSError, match=re.escape(str(folder))):
        open_untrusted(folder / name, below=folder)


def test_a_file_elsewhere_is_not_opened_below_a_folder(folder: Path) -> None:
    with pytest.raises(OSError, match="secret"):
        open_untrusted(folder.parent / "secret", below=folder)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/tty"])
def test_pipes_and_devices_are_refused_without_waiting(folder: Path, name: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        open_untrusted(folder / name)


def test_no_more_bytes_are_read_than_the_limit(folder: Path) -> None:
    with pytest.raises(OSError, match="more than 2 bytes"):
        read_untrusted(folder / "inner" / "file", 2)


def test_what_was_opened_stays_what_it_was(folder: Path) -> None:
    place = folder / "inner" / "file"
    with open_untrusted(place, below=folder) as file:
        place.unlink()
        place.symlink_to(folder.parent / "secret")
        assert path_of(file).read_bytes() == file.read() == b"own"


def test_an_image_that_is_a_pipe_is_a_sentence(folder: Path) -> None:
    with pytest.raises(InputError, match=r"an image: .*pipe cannot be read: not a regular file"):
        read_image(str(folder / "pipe"), "an image")
    image = Image("a" * 32, "png", 1, 1, folder=folder)
    os.mkfifo(folder / image.name)
    with pytest.raises(TrajectoryError, match="not a regular file"):
        image.read()
