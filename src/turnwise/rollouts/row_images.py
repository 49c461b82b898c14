"""Images that a file's rows name, by paths relative to the file, or by URLs that may be fetched.

The name of an image is the value of a key `image`, `images` or `image_url` at any depth, or of a
key `path` or `url` inside such a value. This module does not read images from the disk.
"""

import base64
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from turnwise.core.fetch import fetch
from turnwise.core.images import MAX_BYTES, is_picture
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.problems import Row
from turnwise.trajectory.images import FOLDER

logger = logging.getLogger(__name__)

_NAMES = ("image", "images", "image_url")


def with_own_paths(row: Row, folder: Path) -> Row:
    """Return a row of a file in `folder`, with the relative paths of existing images made absolute.
    The images of a trajectory are in a folder next to its file."""
    if "problem_id" in row and "turns" in row and isinstance(images := row.get("images"), dict):
        own = {"folder": str(folder / FOLDER)}
        return {**row, "images": {key: {**known, **own} for key, known in images.items()}}

    def found(name: str) -> str:
        if name.startswith("data:"):  # too long for a path
            return name
        path = os.path.abspath(os.path.join(folder, name))
        return path if os.path.isfile(path) else name

    return _changed(row, found)


def with_urls(row: Row, seconds: float) -> Row:
    """Return a row in which data: URLs with the fetched images replace its URLs, within `seconds`.
    A URL that cannot be fetched is kept, so that the code that reads the image fails; the reason is
    logged."""
    ends = time.monotonic() + seconds

    def fetched(name: str) -> str:
        if not name.startswith(("http://", "https://")):
            return name
        try:
            data = fetch(name, MAX_BYTES, max(0.1, ends - time.monotonic()))
        except InputError as error:
            logger.warning("an image of a row is not fetched: %s", error)
            return name
        return f"data:image;base64,{base64.b64encode(data).decode()}"

    return _changed(row, fetched)


def holds_images(value: Foreign) -> bool:
    """Return whether a value of a row contains the data of images, not only their names."""
    if isinstance(value, dict | list):
        return any(map(holds_images, value.values() if isinstance(value, dict) else value))
    is_url = isinstance(value, str) and value.startswith("data:")
    return is_url or isinstance(value, bytes) or is_picture(value)


def _changed(row: Row, change: Callable[[str], str]) -> Row:
    """Return a row in which `change` is applied to the names of images."""

    def below(value: Foreign, named: bool) -> Foreign:
        if isinstance(value, str):
            return change(value) if named else value
        if isinstance(value, list):
            return [below(one, named) for one in value]
        if isinstance(value, dict):
            inside = named or value.get("type") in _NAMES
            keys = (*_NAMES, "path", "url") if inside else _NAMES
            return {key: below(one, key in keys) for key, one in value.items()}
        return value

    return {key: below(value, key in _NAMES) for key, value in row.items()}
