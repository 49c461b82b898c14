"""Images in messages: forms, limits, ids, bridges and digests."""

import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.vision import asked, encoded, make_qwen_vl, picture, vision_config
from turnwise.chat.images import read_image, read_parts
from turnwise.chat.messages import Conversation, plain
from turnwise.chat.prompts import next_prompt
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.chat.vision import ModelImages
from turnwise.config import Config
from turnwise.core.images import check_image
from turnwise.errors import InputError, TrajectoryError
from turnwise.trajectory import ChatTemplate


@pytest.fixture(scope="module")
def seeing(vision_path: str) -> ChatTemplate:
    config = vision_config(vision_path)
    return load_template(config.model, config.sampling, config.engine, load_tokenizer(config.model))


def read(*parts: Any, role: str = "user") -> dict[str, Any]:
    return read_parts(asked(*parts, role=role), "a message")


def test_one_image_has_many_forms(tmp_path: Path) -> None:
    data = encoded(picture())
    (tmp_path / "image.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    forms = [picture(), data, url, tmp_path / "image.png", str(tmp_path / "image.png")]
    forms += [{"bytes": data, "path": None}, {"bytes": None, "path": str(tmp_path / "image.png")}]
    images = [read_image(form, "an image") for form in forms]
    assert len({*images}) == 1
    assert (images[0].format, images[0].width, images[0].height) == ("png", 56, 84)
    assert images[0].read() == data
    part = {"type": "image_url", "image_url": {"url": url}}
    (kept,) = read_parts({"role": "user", "content": [part]}, "a message", files=False)["content"]
    assert kept == {"type": "image", "image": images[0]}


def test_threads_that_read_equal_bytes_at_once_get_one_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting = Barrier(2, timeout=30)

    def checked(data: bytes, what: str) -> tuple[str, int, int]:
        meeting.wait()  # neither thread knows the image yet
        return check_image(data, what)

    monkeypatch.setattr("turnwise.chat.images.check_image", checked)
    data = encoded(picture(seed=99))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: read_image(data, "an image"), range(2))
    assert first is second


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("http://169.254.169.254/latest", "is a URL"),
        (b"<svg/>", "is no image that can be read"),
        (encoded(picture())[:200], "is a broken png file"),
        (encoded(picture(1, 101)), "more than 100 times"),
        ("/nowhere.png", "cannot be read"),
        ("data:image/png;base64,%%", "is no data: URL"),
        (7, "it may be a PIL image"),
    ],
)
def test_what_is_no_image_is_refused_in_one_sentence(value: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_image(value, "an image")


def test_a_path_is_read_only_where_the_text_is_the_users_own() -> None:
    with pytest.raises(InputError, match="it may be a data: URL"):
        read_image("/etc/passwd", "an image", files=False)


def test_ids_of_an_image_are_those_of_the_models_processor(seeing: ChatTemplate) -> None:
    from transformers import AutoProcessor

    message = read("Look: ", picture(), " and ", picture(28, 28, 1), "?")
    ids = seeing.render([message])
    processor = AutoProcessor.from_pretrained(seeing.tokenizer.name_or_path)
    text = seeing.render_text([message])
    both = processor(text=[text], images=[picture(), picture(28, 28, 1)])
    assert ids.tolist() == list(both["input_ids"][0])
    marker = seeing.images.marker
    spans = [one for each in ids.images for one in range(each.start, each.end)]
    assert spans == [at for at, token in enumerate(ids.tolist()) if token == marker]
    assert seeing.render_first([message], None) == ids
    assert (seeing.render_first([message], None)).images == ids.images


async def test_a_bridge_keeps_images_and_adds_new_ones(seeing: ChatTemplate) -> None:
    first = read("What is it?", picture())
    prompt, completion = seeing.render([first]), seeing.encode("a cat<|im_end|>")
    more = [read(picture(84, 56, 2), "and this?")]
    ids, why = await next_prompt(
        seeing,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        new_messages=more,
        conversation=[first, {"role": "assistant", "content": "a cat"}, *more],
        tools=None,
    )
    assert why is None
    assert ids[: len(prompt)] == prompt
    assert ids == seeing.render([first, {"role": "assistant", "content": "a cat"}, *more])
    assert [each.image for each in ids.images] == [
        first["content"][1]["image"],
        more[0]["content"][0]["image"],
    ]


def test_a_text_that_holds_the_marker_is_refused(seeing: ChatTemplate) -> None:
    with pytest.raises(TrajectoryError, match="holds the marker"):
        seeing.render([read("<|image_pad|>", picture())])


def test_a_model_of_text_refuses_images(template: ChatTemplate) -> None:
    with pytest.raises(InputError, match="takes text alone"):
        template.with_images([1], [read(picture())])


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_an_image_that_nobody_has_read_is_no_marker_alone(seeing: ChatTemplate, kind: str) -> None:
    message = {"role": "user", "content": [{"type": "image", kind: picture()}]}
    for given in (message, {**message, "content": [{"type": kind, kind: {"url": "data:,"}}]}):
        with pytest.raises(InputError, match="an image that has not been read"):
            seeing.with_images([1], [given])


def test_a_question_whether_a_model_takes_images_is_answered(
    seeing: ChatTemplate, make_config: Callable[..., Config]
) -> None:
    assert seeing.images is not None
    assert seeing.images.takes_images
    assert not ModelImages(make_config().model).takes_images


def test_conversations_differ_by_their_images() -> None:
    one, same, other = (Conversation([read("?", picture(seed=seed))]) for seed in (0, 0, 1))
    assert one.digests == same.digests != other.digests
    as_text = Conversation([{"role": "user", "content": str(plain(one.messages[0])["content"])}])
    assert as_text.digests != one.digests
    assert plain(one.messages[0])["content"] == one.messages[0]["content"]


def test_an_assistant_says_no_image() -> None:
    with pytest.raises(InputError, match="an assistant said"):
        read(picture(), role="assistant")


def test_the_tiny_model_is_the_same_each_time(tmp_path: Path, vision_path: str) -> None:
    made = make_qwen_vl(tmp_path / "again")
    name = "model.safetensors"
    assert Path(made, name).read_bytes() == Path(vision_path, name).read_bytes()
