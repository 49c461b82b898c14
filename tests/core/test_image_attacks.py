"""Files that attack whoever reads images: refused in one sentence, or read as they are meant."""

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image as Pictures

from tests.vision import encoded, picture
from turnwise.chat.images import read_image, read_parts
from turnwise.core.images import MAX_BYTES, check_image, decode
from turnwise.errors import InputError


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, body: bytes | None = None) -> bytes:
    """Return a grey PNG file of this size; its pixels are 0 if `body` has no others."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width + 1) * height)) if body is None else body
    parts = [chunk(b"IHDR", header), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def cut(format: str) -> bytes:
    data = encoded(picture(), format)
    return data[: len(data) * 2 // 3]


ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a bomb of 25 million pixels": (lambda: png(5000, 5000), "has 5000 x 5000 pixels; at most"),
    "a bomb that only its header names": (
        lambda: png(50_000, 50_000, body=b"x"),
        "has too many pixels; at most 16,777,216",
    ),
    "1 x 100,000 pixels": (lambda: png(1, 100_000), "one side is more than 100 times the other"),
    "100,000 x 1 pixels": (lambda: png(100_000, 1), "one side is more than 100 times the other"),
    "no pixels": (lambda: png(0, 0), "is no image that can be read"),
    "a file of 21 MB": (lambda: b"\x89PNG" + bytes(MAX_BYTES), "at most 20,971,520 are read"),
    "an SVG": (
        lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "it may be png, jpeg, webp, gif",
    ),
    "a PDF": (lambda: b"%PDF-1.7\n1 0 obj", "it may be png, jpeg, webp, gif"),
    "an EPS, which a program would draw": (
        lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "it may be png, jpeg, webp, gif",
    ),
    "a BMP": (lambda: encoded(picture(), "BMP"), "it may be png, jpeg, webp, gif"),
    "a TIFF": (lambda: encoded(picture(), "TIFF"), "it may be png, jpeg, webp, gif"),
    "a text": (lambda: b"just words", "it may be png, jpeg, webp, gif"),
    "nothing": (lambda: b"", "it may be png, jpeg, webp, gif"),
    "a cut PNG": (lambda: cut("PNG"), "is a broken png file"),
    "a cut JPEG": (lambda: cut("JPEG"), "is a broken jpeg file"),
    "a cut WebP": (lambda: cut("WEBP"), "broken webp file|no image that can be read"),
    "a cut GIF": (lambda: cut("GIF"), "is a broken gif file"),
    "pixels that are not compressed": (lambda: png(9, 9, body=b"no zlib"), "is a broken png file"),
    "a text of 100 MB in a PNG": (
        lambda: png(9, 9, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100 << 20)))),
        "is a broken png file|no image that can be read",
    ),
}


@pytest.mark.parametrize(("make", "why"), ATTACKS.values(), ids=ATTACKS)
def test_an_attack_is_refused_in_one_sentence(make: Callable[[], bytes], why: str) -> None:
    with pytest.raises(InputError, match=f"^an image .*({why})"):
        read_image(make(), "an image")


def test_a_million_tiny_images_are_refused_before_one_is_read() -> None:
    part = {"type": "image", "image": "/nowhere.png"}
    with pytest.raises(InputError, match="has 1,000,000 images; at most 256 are read"):
        read_parts({"role": "user", "content": [part] * 1_000_000}, "a message")


def test_a_picture_that_would_be_decoded_late_is_refused_before() -> None:
    with pytest.raises(InputError, match="has 5000 x 5000 pixels"):
        read_image(Pictures.open(io.BytesIO(png(5000, 5000))), "an image")
    with pytest.raises(InputError, match="an image is a broken image"):
        read_image(Pictures.open(io.BytesIO(cut("JPEG"))), "an image")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_is_upright_and_so_is_its_size(orientation: int) -> None:
    upright = picture(84, 56)
    turns = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL's inverse transpositions
    turn = turns[orientation]
    stored = upright if turn is None else upright.transpose(Pictures.Transpose(turn))
    exif = Pictures.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    stored.save(buffer, "PNG", exif=exif)
    image = read_image(buffer.getvalue(), "an image")
    assert (image.width, image.height) == (84, 56)
    assert decode(image.read(), "it").tobytes() == upright.tobytes()


def test_a_broken_orientation_turns_nothing_or_is_refused() -> None:
    data = encoded(picture(), "JPEG")
    broken = data[:2] + b"\xff\xe1\x00\x10Exif\x00\x00MM\x00*\xff\xff\xff\xff" + data[2:]
    with suppress(InputError):  # and nothing else
        assert check_image(broken, "an image") == ("jpeg", 56, 84)


def test_of_a_film_the_first_picture_is_read() -> None:
    frames = [picture(seed=seed) for seed in range(9)]
    for format in ("GIF", "WEBP", "PNG"):
        buffer = io.BytesIO()
        frames[0].save(buffer, format, save_all=True, append_images=frames[1:], lossless=True)
        shown = decode(buffer.getvalue(), "a film")
        assert shown.size == (56, 84)
        if format != "GIF":  # which has 256 colours
            assert shown.tobytes() == frames[0].tobytes()


def test_two_pictures_of_a_stereo_camera_are_a_jpeg() -> None:
    buffer = io.BytesIO()
    picture().save(buffer, "MPO", save_all=True, append_images=[picture(seed=1)])
    assert read_image(buffer.getvalue(), "an image").format == "jpeg"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "F", "I"])
def test_pictures_of_any_mode_are_read(mode: str) -> None:
    grey = picture().convert("L")
    made = grey.convert(mode) if mode in ("F", "I", "LA") else picture().convert(mode)
    assert read_image(made, "an image").width == 56


def test_equal_files_are_decoded_once_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(picture(seed=77))
    first = read_image(data, "an image")
    monkeypatch.setattr("turnwise.chat.images.check_image", lambda *_: pytest.fail("decoded"))
    assert read_image(bytes(bytearray(data)), "another") is first


def test_a_path_object_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(encoded(picture()))
    assert read_image(tmp_path / "it.png", "an image", files=False).width == 56
    with pytest.raises(InputError, match="it may be a data: URL"):
        read_image(str(tmp_path / "it.png"), "an image", files=False)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "ftp://example.com/cat.png",
    ],
)
def test_no_url_in_a_message_is_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("looked up"))
    for kind, image in (("image", url), ("image_url", {"url": url}), ("image", {"path": url})):
        message = {"role": "user", "content": [{"type": kind, kind: image}]}
        with pytest.raises(
            InputError, match=r"is a URL; URLs are fetched in rows alone.*allow_urls"
        ):
            read_parts(message, "a message")
