"""Images in messages: the forms in which users and clients give them, and the one that we keep.

A part of a message's content is `{"type": "image", "image": Image}` from here on. Its `image` may
be given as a PIL image, bytes, a data URL, a path, or the `{"bytes", "path"}` of Hugging Face's
datasets; `{"type": "image_url", "image_url": {"url": ...}}` and Responses' `input_image` are the
same. While an image is held somewhere, its bytes are neither decoded nor kept a second time.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from turnwise.core.images import MAX_BYTES, check_image
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError
from turnwise.trajectory import Image, Message
from turnwise.trajectory.images import hash_of

_IMAGES = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts: ours, and those of chat completions and Responses."""
_held: "WeakValueDictionary[str, Image]" = WeakValueDictionary()  # all images in use, by hash


def read_image(value: object, what: str, *, files: bool = True) -> Image:
    """Return an image that is given in any form.

    Args:
        what: Its name in errors.
        files: Whether a text may be the path of a file: only where the text is the user's own.

    Raises:
        InputError: when it has another form, or is beyond the limits of `core.images`.
    """
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):  # of Hugging Face's datasets, or of OpenAI's `image_url`
        given = (value.get(key) for key in ("bytes", "url", "path"))
        value = next((one for one in given if one), None)
    if isinstance(value, str) and value.startswith("data:"):
        data = _of_data_url(value, what)
    elif isinstance(value, str) and "://" in value[:16]:
        raise InputError(f"{what} is a URL, and none is fetched: give the file, or a data: URL")
    elif isinstance(value, str | Path) and files:
        data = _of_file(Path(value).expanduser(), what)
    elif isinstance(value, bytes):
        data = value
    elif callable(save := getattr(value, "save", None)):  # a PIL image
        buffer = io.BytesIO()
        save(buffer, format="PNG")
        data = buffer.getvalue()
    else:
        kinds = "a PIL image, bytes, a path or a data: URL" if files else "a data: URL"
        raise InputError(f"{what} is no image: it may be {kinds}, not {repr(value)[:60]}")
    digest = hash_of(data)
    if (image := _held.get(digest)) is None:
        image = _held[digest] = Image(digest, *check_image(data, what), data)
    return image


def read_parts(message: Message, what: str, *, files: bool = True) -> Message:
    """Return a message whose images have the form that we keep; raises as `read_image`, and
    InputError for a part that is neither text nor an image."""
    if not isinstance(content := message.get("content"), Sequence) or isinstance(content, str):
        return message
    parts: list[JsonObject] = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind = part.get("type", "image_url" if "image_url" in part else None)
        if kind in _IMAGES:
            if message.get("role") == "assistant":
                raise InputError(f"{what} has an image that an assistant said")
            name = f"an image of {what}"
            keys = ("image_url" if kind == "input_image" else kind, "url", "path")
            given = next((part[key] for key in keys if key in part), None)
            parts.append({"type": "image", "image": read_image(given, name, files=files)})
        elif kind in _TEXTS and isinstance(text := part.get("text"), str):
            parts.append({"type": "text", "text": text})
        elif kind is None:
            parts.append(part)
        else:
            raise InputError(f"{what} has a part of type {kind}: it may be text or image")
    return {**message, "content": parts}


def with_urls(value: object) -> object:
    """Return a value of a row or of messages with its images as data URLs, in messages as OpenAI's
    `image_url` parts, so that it can be JSON; InputError for bytes that are no image."""
    if isinstance(value, Mapping) and value.keys() != {"bytes", "path"}:
        if value.get("type") == "image" and "image" in value:
            return {"type": "image_url", "image_url": {"url": with_urls(value["image"])}}
        return {key: with_urls(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_urls(part) for part in value]
    if not isinstance(value, Image | bytes | Mapping) and not callable(getattr(value, "save", None)):
        return value
    image = read_image(value, "an image of the row")
    return f"data:image/{image.format};base64,{base64.b64encode(image.read()).decode()}"


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
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: {path} cannot be read: {error}") from error
