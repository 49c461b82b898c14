"""Images in messages: convert the forms that users and clients give into the form that we keep.

We keep an image in a message's content as the part `{"type": "image", "image": Image}`. Its `image`
may be given as a PIL image, bytes, a data URL, a path, or the `{"bytes", "path"}` of Hugging Face's
datasets; `{"type": "image_url", "image_url": {"url": ...}}` and Responses' `input_image` are read
in the same way. Images with equal bytes are one `Image`, which is decoded once while any trajectory
has it.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from turnwise.core.images import MAX_BYTES, MAX_IMAGES, check_image, encode, is_picture
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.untrusted_files import read_untrusted
from turnwise.errors import InputError
from turnwise.trajectory import Image, Message
from turnwise.trajectory.images import KINDS, data_url, hash_of

_TEXTS = ("text", "input_text", "output_text")
_MAX_LOOKED_AT = 1000  # maximum number of a tool result's parts that are searched for images
_known: WeakValueDictionary[str, Image] = WeakValueDictionary()  # by hash
_known_lock = Lock()  # requests are read in threads


def read_image(value: Foreign, what: str, *, files: bool = True) -> Image:
    """Return an image that is given in any of the module's forms.

    Args:
        what: Name of the image in error messages.
        files: Whether a text may be a file's path; allow this only for the user's own texts.

    Raises:
        InputError: when the value has an unsupported form, or exceeds the limits of `core.images`.
    """
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):  # of Hugging Face's datasets, or of OpenAI's `image_url`
        given = (value.get(key) for key in ("bytes", "url", "path"))
        value = next((one for one in given if one), None)
    if isinstance(value, str) and value.startswith("data:"):
        data = _of_data_url(value, what)
    elif isinstance(value, str) and "://" in value[:16]:
        raise InputError(
            f"{what} is a URL; URLs are fetched in rows alone, if data.allow_urls allows it: "
            "give the file, or a data: URL"
        )
    elif isinstance(value, Path) or (isinstance(value, str) and files):
        data = _of_file(Path(value).expanduser(), what)
    elif isinstance(value, bytes):
        data = value
    elif is_picture(value):
        data = encode(value, what)
    else:
        kinds = "a PIL image, bytes, a path or a data: URL" if files else "a data: URL"
        raise InputError(f"{what} is no image: it may be {kinds}, not {repr(value)[:60]}")
    if (image := _known.get(hash_of(data))) is None:
        image = Image.of(data, *check_image(data, what))
        with _known_lock:  # another thread may have read it meanwhile
            image = _known.setdefault(image.hash, image)
    return image


def read_parts(message: Message, what: str, *, files: bool = True) -> Message:
    """Return a message whose images have the form that we keep. Raises as `read_image` does, and
    InputError for a part that is neither text nor an image, an assistant's image, or too many."""
    if not isinstance(content := message.get("content"), Sequence) or isinstance(content, str):
        return message
    parts: list[JsonObject] = []
    if (count := sum(_kind(part) in KINDS for part in content)) > MAX_IMAGES:
        raise InputError(f"{what} has {count:,} images; at most {MAX_IMAGES} are read")
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = _kind(part)
        if kind in KINDS:
            if message.get("role") == "assistant":
                raise InputError(f"{what} has an image that an assistant said")
            image = read_image(_given(part), f"an image of {what}", files=files)
            parts.append({"type": "image", "image": image})
        elif kind in _TEXTS:
            parts.append({"type": "text", "text": str(part.get("text") or "")})
        elif kind is None:
            parts.append(part)
        else:
            raise InputError(f"{what} has a part of type {kind}: it may be text or image")
    return {**message, "content": parts}


def with_urls(value: Foreign) -> Foreign:
    """Return a value of a dataset row or of messages so that it can be JSON: images become data
    URLs, and image parts become OpenAI's `image_url` parts. Raise InputError for bytes that are not
    an image."""
    if isinstance(value, Mapping) and not isinstance(value.get("bytes"), bytes):
        if value.get("type") == "image" and "image" in value:
            return {"type": "image_url", "image_url": {"url": with_urls(value["image"])}}
        return {key: with_urls(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_urls(part) for part in value]
    if isinstance(value, Image | bytes | Mapping) or is_picture(value):
        return data_url(read_image(value, "an image of the row"))
    return value


def parts_of(value: object) -> list[JsonObject] | None:
    """Return a tool's result as parts of a message, if there is an image in it; else None.

    The result may be a PIL image, an `Image`, a part with an image, or a list of images, texts and
    parts. A part whose image is given as text counts as an image only if the text is a data URL,
    because results may describe images.
    """
    given: Sequence[Foreign] = value if isinstance(value, list | tuple) else [value]
    if not any(map(_shows, islice(given, _MAX_LOOKED_AT))):  # a list may be very long
        return None
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        if isinstance(part, Image) or is_picture(part)
        else part
        for part in given
    ]
    return parts if all(_kind(part) == "text" or _shows(part) for part in parts) else None


def _shows(part: Foreign) -> bool:
    """Return whether a part of a tool's result is an image."""
    if _kind(part) not in KINDS:
        return isinstance(part, Image) or is_picture(part)
    given = _given(part)
    return given.startswith("data:") if isinstance(given, str) else given is not None


def _kind(part: Foreign) -> object:
    if not isinstance(part, Mapping):
        return None
    return part.get("type", "image_url" if "image_url" in part else None)


def _given(part: Mapping[str, Foreign]) -> Foreign:
    """Return the image of a part, in the form in which it is given."""
    keys = (*KINDS, "url", "path")
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _of_data_url(url: str, what: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InputError(f"{what} is no data: URL in base64")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(f"{what} has more than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{what} is no data: URL in base64") from error


def _of_file(path: Path, what: str) -> bytes:
    try:
        return read_untrusted(path, MAX_BYTES)
    except OSError as error:
        raise InputError(f"{what}: {path} cannot be read: {error.strerror}") from error
