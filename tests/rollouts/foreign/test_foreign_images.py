"""Images of OpenEnv's observations, and in the messages of verifiers' environments."""

import base64
from typing import Any

import pytest

from tests.rollouts.foreign.plain_openenv import plain_server
from tests.rollouts.foreign.test_openenv import both, play, served
from tests.vision import asked, encoded, picture
from turnwise.compat.openenv import OpenEnv
from turnwise.compat.verifiers import VerifiersEnvironments
from turnwise.errors import InputError
from turnwise.rollouts.environment import read_messages
from turnwise.trajectory import Image, Trajectory

SEEN: list[list[dict[str, Any]]] = []


def base64_of(seed: int = 0) -> str:
    return base64.b64encode(encoded(picture(seed=seed))).decode()


def described(**observation: Any) -> list[Any]:
    """Return an observation as texts and images."""
    shown = OpenEnv({}, "ws://nowhere:1").describe(observation)
    if isinstance(shown, str):
        return [shown]
    (message,) = read_messages([{"role": "user", "content": shown}], "the reply")
    return [
        part.get("image", part.get("text")) for part in message["content"] if part.get("text") != ""
    ]


IMAGE = Image.of(encoded(picture()), "png", 56, 84)


def test_fields_that_are_images_are_shown_after_the_text() -> None:
    assert described(goal="Click.", screenshot=base64_of()) == ["Click.", IMAGE]
    url = f"data:image/png;base64,{base64_of()}"
    assert described(metadata={"a": 1}, pixels=url) == [IMAGE]
    both_of_them = described(behavior="walk", visual_observations=[base64_of(), base64_of(1)])
    assert (both_of_them[0], len({*both_of_them})) == ("walk", 3)
    assert described(text="none", screenshot=None) == ["none"]


def test_what_only_looks_like_an_image_stays_a_text() -> None:
    assert described(pixels=[[[0, 0, 0]]])[0] == '{"pixels": [[[0, 0, 0]]]}'
    assert described(words=["a", "b"]) == ['{"words": ["a", "b"]}']
    assert described(words=["a", base64_of()])[0].startswith('{"words": ["a", "iVBOR')


@pytest.mark.parametrize(
    "broken",
    [
        base64_of()[:80],
        "data:image/svg+xml;base64,PHN2Zy8+",
        [base64_of(), base64_of()[:80]],
        "iVBORw0KGgo is how it begins",
    ],
)
def test_a_broken_image_costs_its_trajectory(broken: Any) -> None:
    with pytest.raises(InputError, match="an image of the reply"):  # as what its `step` returns
        described(goal="Click.", screenshot=broken)


def test_images_of_a_tool_are_shown_after_its_texts() -> None:
    block = {"type": "image", "data": base64_of(), "mimeType": "image/png"}
    content = [block, {"type": "text", "text": "Here."}]
    assert described(tool_name="look", result={"content": content}) == ["Here.", IMAGE]
    assert described(tool_name="look", result={"content": [block]}) == [IMAGE]
    block["data"] = "PHN2Zy8+"
    with pytest.raises(InputError, match="an image of the reply"):
        described(tool_name="look", result={"content": content})


class Watching(OpenEnv):
    """Every answer of the model is an action, and the picture the reply."""

    def action(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"message": message["content"]}


@both
async def test_the_first_observation_and_each_reply_have_their_picture(which: str) -> None:
    row = {"prompt": "What do you see?"}
    async with served(which, "camera") as url, play(url, row) as episode:
        (message,) = episode.problem
        assert [part["type"] for part in message["content"]] == ["text"] * 3 + ["image"]
        text = "".join(part.get("text", "") for part in message["content"])
        assert text == "What do you see?\n\nLook."
        first = message["content"][-1]["image"]
        assert (first.width, first.height) == (56, 84)
        watching = Watching(row, url)
        await watching.setup()
        reply = await watching.step({"role": "assistant", "content": "left"})
        assert reply is not None
        (said,) = read_messages(reply, "step")
        assert said["content"][0] == {"type": "text", "text": "left"}
        assert said["content"][1]["image"] != first
        await watching.close()


async def test_a_row_with_an_image_of_its_own_keeps_it() -> None:
    async with plain_server("echo") as server:
        row = {"prompt": [asked("Like this?", picture(seed=3))]}
        async with play(server.url, row) as episode:
            kinds = [part["type"] for part in episode.problem[0]["content"]]
            assert kinds == ["text", "image", "text", "text"]


def graded(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    SEEN.extend(completions)
    return [1.0] * len(prompts)


class Rubric:
    """An environment of verifiers' first versions, whose prompts have parts `image_url`."""

    def get_rubric(self) -> list[Any]:
        return [graded]


def test_messages_of_verifiers_have_data_urls() -> None:
    SEEN.clear()
    url = f"data:image/png;base64,{base64_of()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    made = VerifiersEnvironments(f"{__name__}:Rubric")({"prompt": prompt})
    asked_ = read_messages(made.problem, "prompt")
    assert asked_[0]["content"][1] == {"type": "image", "image": IMAGE}
    trajectory = Trajectory("rows:1")
    answer = {"role": "assistant", "content": "A cat."}
    tool = {"role": "tool", "content": [{"type": "image", "image": IMAGE}]}
    trajectory.messages = [*asked_, answer, tool]
    assert made.reward(trajectory).total == 1.0
    (seen,) = SEEN
    assert seen == [answer, {"role": "tool", "content": [part]}]
    assert trajectory.messages[2]["content"][0]["image"] == IMAGE
