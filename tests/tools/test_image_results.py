"""Images in the results of tools: the forms, the limits, and what remains text."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from tests.core.test_image_attacks import ATTACKS
from tests.vision import encoded, picture
from turnwise.chat.images import read_image
from turnwise.tools import Tool
from turnwise.tools.toolbox import Toolbox, ToolResult

PICTURE = read_image(picture(), "it")
AS_PART = {"type": "image", "image": PICTURE}


async def result_of(value: object, max_chars: int = 100) -> ToolResult:
    parameters = {"type": "object", "properties": {}}
    tool = Tool("look", "Look.", parameters, lambda _: value)
    return await Toolbox([tool], timeout=60.0, max_chars=max_chars).call("look", "{}")


@pytest.mark.parametrize(
    "value",
    [
        picture(),
        PICTURE,
        AS_PART,
        [picture()],
        {"type": "image", "image": encoded(picture())},
        {"type": "image", "image": {"bytes": encoded(picture()), "path": None}},
    ],
    ids=["PIL", "Image", "part", "list", "bytes", "datasets"],
)
async def test_a_tool_may_return_an_image_in_many_forms(value: object) -> None:
    result = await result_of(value)
    assert result == ToolResult("[image left out]", "ok", parts=[AS_PART])
    assert result.parts is not None
    assert result.parts[0]["image"].read() == PICTURE.read()


async def test_texts_and_images_keep_their_order() -> None:
    result = await result_of(("Before", picture(), {"type": "text", "text": "after"}))
    assert result.text == "Before\n[image left out]\nafter"
    assert result.parts == [
        {"type": "text", "text": "Before"},
        AS_PART,
        {"type": "text", "text": "after"},
    ]


async def test_the_texts_of_a_result_share_its_limit() -> None:
    result = await result_of(["abc", picture(), "defgh", "ijk"], max_chars=5)
    assert result.outcome == "truncated"
    assert result.parts is not None
    texts = [part["text"] for part in result.parts if "text" in part]
    assert texts == ["abc", "de", "", "\n[6 more characters left out]"]


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "image", "id": 3}],
        [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "x"}],
        {"type": "image", "url": "http://169.254.169.254/"},
        [{"type": "audio", "data": "x"}, "y"],
        ["a", "b"],
        {"image": None},
    ],
)
async def test_descriptions_of_images_stay_text(value: Any) -> None:
    result = await result_of(value)
    assert (result.outcome, result.parts) == ("ok", None)
    assert json.loads(result.text) == value


async def test_a_file_is_read_where_the_tool_names_it_as_a_path(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(encoded(picture()))
    result = await result_of({"type": "image", "image": tmp_path / "it.png"})
    assert result.parts == [AS_PART]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_image_that_cannot_be_read_is_an_error_of_its_call(attack: str) -> None:
    data = ATTACKS[attack][0]()
    if data:
        result = await result_of(["see", {"type": "image", "image": data}], max_chars=1000)
        assert (result.outcome, result.parts) == ("error", None)
        assert result.text.startswith("Error: look failed: InputError: an image of the result ")


async def test_many_tiny_images_are_an_error_of_their_call() -> None:
    tiny = Pictures.new("L", (1, 1))
    result = await result_of([tiny] * 100_000)
    assert "the result has 100,000 images; at most 256 are read" in result.text


async def test_other_parts_beside_an_image_are_text_all_together() -> None:
    result = await result_of([{"type": "audio", "data": "x"}, picture()])
    assert result.parts is None
    assert result.text.startswith('[{"type": "audio", "data": "x"}, "<PIL.')
