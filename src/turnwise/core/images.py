"""Untrusted image files: their type, size and pixels, within limits.

Only a few decoders read them, and only after the header has shown a size within the limits.
"""

import io
from typing import TYPE_CHECKING

from turnwise.core.optional import optional
from turnwise.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("png", "jpeg", "webp", "gif")
MAX_BYTES = 20 << 20  # maximum size of a file
MAX_PIXELS = 1 << 24  # maximum number of pixels, 4096 x 4096; each takes 3 bytes decoded
MAX_RATIO = 100  # maximum ratio of the longer side to the shorter one; processors refuse more
MAX_IMAGES = 256  # maximum number of images in a message


def check_image(data: bytes, what: str) -> tuple[str, int, int]:
    """Decode a file once, and return its type, one of `FORMATS`, and the width and height of its
    picture, the right way up, in pixels.

    Raises:
        InputError: when it is not an image of these formats, is broken, or is beyond the limits;
            the message begins with `what`.
    """
    kind, picture = _decoded(data, what)
    return kind, *picture.size


def decode(data: bytes, what: str) -> "Picture":
    """Return the first picture of a file, in RGB and the right way up; raises as `check_image`
    does."""
    return _decoded(data, what)[1]


def is_picture(value: object) -> bool:
    """Return whether a value is a PIL image, without importing PIL."""
    return any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__)


def encode(picture: "Picture", what: str) -> bytes:
    """Return a PIL image as a PNG file, in RGB; raises as `check_image` does."""
    _check_size(picture, what)
    buffer = io.BytesIO()
    try:  # it may be a file that has not been read so far
        picture.convert("RGB").save(buffer, "PNG")
    except Exception as error:  # as below
        raise InputError(f"{what} is a broken image") from error
    return buffer.getvalue()


def _decoded(data: bytes, what: str) -> "tuple[str, Picture]":
    if len(data) > MAX_BYTES:
        raise InputError(f"{what} has {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    pictures = optional("PIL.Image", "images", "an image")
    turns = optional("PIL.ImageOps", "images", "an image")
    try:
        picture: Picture = pictures.open(io.BytesIO(data), formats=[f.upper() for f in FORMATS])
    except pictures.DecompressionBombError as error:
        raise InputError(f"{what} has too many pixels; at most {MAX_PIXELS:,} are read") from error
    except Exception as error:  # a decoder may raise anything on a broken file
        kinds = ", ".join(FORMATS)
        raise InputError(f"{what} is no image that can be read: it may be {kinds}") from error
    kind = str(picture.format).lower().replace("mpo", "jpeg")  # several JPEG pictures in a file
    _check_size(picture, what)
    try:
        picture.load()
        return kind, turns.exif_transpose(picture).convert("RGB")
    except Exception as error:  # as above
        raise InputError(f"{what} is a broken {kind} file") from error


def _check_size(picture: "Picture", what: str) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise InputError(f"{what} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read")
    if max(width, height) > MAX_RATIO * max(1, min(width, height)):
        raise InputError(
            f"{what} has {width} x {height} pixels: one side is more than {MAX_RATIO} times the "
            "other"
        )
