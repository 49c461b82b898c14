"""Images of messages and prompts: an image is the bytes of its file, identified by their hash.

Nothing here decodes an image.
"""

import base64
import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from turnwise.core.images import FORMATS, MAX_BYTES
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted_files import read_untrusted
from turnwise.errors import TrajectoryError

FOLDER = "images"
"""Folder next to files of trajectories that holds the bytes of their images, each once."""
KINDS = ("image", "image_url", "input_image")
"""Types of a message's parts that are images."""
FILE = re.compile(rf"([0-9a-f]{{32}})\.({'|'.join(FORMATS)})")
"""Pattern of the names of image files: hash and format."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """The file of an image; two images are equal if their bytes are equal.

    Example:
        >>> image = Image.of(b"GIF89a", "gif", 28, 28)
        >>> str(image), image == Image.of(b"GIF89a", "gif", 28, 28)
        ('image:a4ebc5f66162847b445559c37cdf009b', True)
    """

    hash: str
    """32 hexadecimal digits: BLAKE2b of the bytes."""
    format: str = field(compare=False)
    """png, jpeg, webp or gif, which is also the suffix of the file's name."""
    width: int = field(compare=False)
    height: int = field(compare=False)
    """Size in pixels, before the model's processor resizes it."""
    data: bytes = field(default=b"", repr=False, compare=False)
    """The file's bytes; empty if the file is in `folder`."""
    folder: Path | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, data: bytes, format: str, width: int, height: int) -> "Image":
        """Return the image with these bytes. `chat.images.read_image` also checks the bytes."""
        return cls(hash_of(data), format, width, height, data)

    def __str__(self) -> str:
        return f"image:{self.hash}"

    @property
    def name(self) -> str:
        """Name of its file in a folder of images."""
        return f"{self.hash}.{self.format}"

    def read(self) -> bytes:
        """Return the bytes. Raise TrajectoryError (`image_lost`) when the folder's file is gone or
        has changed, or only the hash is known."""
        if self.data:
            return self.data
        if self.folder is None:
            raise TrajectoryError("image_lost", f"the file of {self} is not here")
        try:
            data = read_untrusted(self.folder / self.name, MAX_BYTES)
        except OSError as error:
            why = error.strerror
            raise TrajectoryError("image_lost", f"{self.folder / self.name}: {why}") from error
        if hash_of(data) != self.hash:
            raise TrajectoryError("image_lost", f"{self.folder / self.name} has been changed")
        return data


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def images_in(messages: Iterable[Mapping[str, object]]) -> list[Image]:
    """Return the images of messages, `{"type": "image", "image": Image}`, in their order."""
    given = (part.get("image") for part in image_parts(messages))
    return [image for image in given if isinstance(image, Image)]


def image_parts(messages: Iterable[Mapping[str, object]]) -> Iterator[JsonObject]:
    """Yield the parts of messages that are images, including images that have not been read yet."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            for part in content:
                if isinstance(part, dict) and ("image_url" in part or part.get("type") in KINDS):
                    yield part


def replaced(messages: Iterable[JsonObject], change: Callable[[Any], object]) -> list[JsonObject]:
    """Return a copy of messages in which `change` has replaced each image."""
    made = copy.deepcopy([*messages])
    for part in image_parts(made):
        if "image" in part:
            part["image"] = change(part["image"])
    return made


def restored(messages: list[JsonObject], images: Mapping[str, Image]) -> list[JsonObject]:
    """Return messages from JSON with the images in the place of their hashes."""
    return replaced(messages, lambda key: images.get(str(key), key)) if images else messages


def as_json(value: object) -> str:
    """Return an image in a message as JSON: its hash; for `json.dumps(default=as_json)`."""
    if isinstance(value, Image):
        return value.hash
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def data_url(value: object) -> str:
    """Return an image in a message as a data: URL; for `json.dumps(default=data_url)`."""
    if isinstance(value, Image):
        return f"data:image/{value.format};base64,{base64.b64encode(value.read()).decode()}"
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def image_records(images: Mapping[str, Image], *, whole: bool) -> JsonObject:
    """Return images by hash as JSON, with their bytes if `whole`."""
    names = ("format", "width", "height")
    tree = {key: {name: getattr(image, name) for name in names} for key, image in images.items()}
    for key, image in images.items() if whole else ():
        tree[key]["data"] = base64.b64encode(image.read()).decode()
    return tree


def images_of(tree: JsonObject, folder: Path | None) -> dict[str, Image]:
    """Return the images that `image_records` wrote. If the tree lacks an image's bytes, they are in
    the folder that the image's entry names, or else in `folder`. Raise TrajectoryError
    (`image_lost`) when the key of an image is not the hash of its bytes."""
    images = {}
    for key, known in tree.items():
        image = Image(key, str(known["format"]), int(known["width"]), int(known["height"]))
        data = base64.b64decode(known.get("data", ""))
        if not FILE.fullmatch(image.name) or (data and hash_of(data) != key):
            raise TrajectoryError("image_lost", f"{image.name[:80]!r} is not the name of its bytes")
        own = Path(known["folder"]) if "folder" in known else folder
        images[key] = replace(image, data=data, folder=None if data else own)
    return images


def save_images(folder: Path, images: Iterable[Image]) -> None:
    """Write images into a folder, each once; raise OSError when an image cannot be written."""
    for image in images:
        if not (path := folder / image.name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            # A step and evaluations, maybe of other processes, may write the same image at once.
            new = folder / f"{uuid4().hex}.tmp"
            new.write_bytes(image.read())
            new.replace(path)
