"""Files of images that are not trusted: their type, size and pixels, within limits.

Only a few decoders read them, and none before the header has shown a size within the limits.
"""

import io
from typing import TYPE_CHECKING, NamedTuple

from turnwise.core.optional import optional
from turnwise.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("png", "jpeg", "webp", "gif")
MAX_BYTES = 20 << 20  # maximum size of a file
MAX_PIXELS = 1 << 24  # maximum number of pixels, 4096 x 4096; each takes 3 bytes decoded
MAX_RATIO = 100  # maximum ratio of the longer side to the shorter one; processors refuse others


class Header(NamedTuple):
    """The beginning of a file: its type and size."""

    format: str  # one of `FORMATS`
    width: int  # pixels
    height: int


def check_image(data: bytes, what: str) -> Header:
    """Decode a file once, and return what its header says.

    Raises:
        InputError: that begins with `what`, when it is no image of these formats, is broken, or is
            beyond the limits.
    """
    picture, header = _opened(data, what)
    _load(picture, what)
    return header


def decode(data: bytes, what: str) -> "Picture":
    """Return the first picture of a file, in RGB and the right way up; raises as `check_image`."""
    from PIL import ImageOps

    picture, _ = _opened(data, what)
    _load(picture, what)
    return ImageOps.exif_transpose(picture).convert("RGB")


def _opened(data: bytes, what: str) -> "tuple[Picture, Header]":
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    pictures = optional("PIL.Image", "images", "an image")
    try:
        picture: Picture = pictures.open(io.BytesIO(data), formats=[f.upper() for f in FORMATS])
    except Exception as error:  # a decoder may raise anything on a broken file
        kinds = ", ".join(FORMATS)
        raise InputError(f"{what} is no image that can be read: it may be {kinds}") from error
    (width, height), name = picture.size, str(picture.format).lower()
    if width * height > MAX_PIXELS:
        raise InputError(f"{what} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read")
    if max(width, height) > MAX_RATIO * max(1, min(width, height)):
        raise InputError(
            f"{what} has {width} x {height} pixels: one side is more than {MAX_RATIO} times the "
            "other"
        )
    return picture, Header(name, width, height)


def _load(picture: "Picture", what: str) -> None:
    try:
        picture.load()
    except Exception as error:  # as above
        raise InputError(f"{what} is a broken {str(picture.format).lower()} file") from error
