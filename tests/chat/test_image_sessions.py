"""Images in sessions: exact prompts, forks with their reason, ids that clients send, and memory."""

import base64
import json
from typing import Any

import pytest

from tests.vision import asked, encoded, picture, vision_config
from turnwise.chat.images import read_parts, with_urls
from turnwise.chat.messages import Conversation
from turnwise.chat.prompts import (
    RefusedParameter,
    echoed_prompt,
    response_room,
    spliced_prompt,
    whole_prompt,
)
from turnwise.chat.session import Session
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate, Message, Prompt, Trajectory, audit

SAID: Message = {"role": "assistant", "content": "a cat"}


@pytest.fixture(scope="module")
def seeing(vision_path: str) -> ChatTemplate:
    config = vision_config(vision_path)
    return load_template(config.model, config.sampling, config.engine, load_tokenizer(config.model))


def sent(*parts: Any, role: str = "user") -> Message:
    """A message as a request has it, read from its JSON."""
    message = json.loads(json.dumps(with_urls(asked(*parts, role=role))))
    return read_parts(message, "messages[0]", files=False)


def record(session: Session, template: ChatTemplate, messages: list[Message]) -> list[int]:
    """Answer a request with `SAID`, and return its prompt."""
    conversation = Conversation(messages)
    prompt = session.next_prompt(conversation, template)
    ids = prompt.token_ids or whole_prompt(template, conversation)
    tokens = template.encode("a cat<|im_end|>")
    count = len(tokens)
    session.record(
        ids,
        Completion(tokens, [-0.1] * count, [0] * count, "stop"),
        asked=conversation,
        answer=lambda: ("a cat", ()),
        prompt=prompt,
    )
    session.read_answers()
    return ids


def test_a_sessions_turns_keep_their_images_and_get_new_ones(seeing: ChatTemplate) -> None:
    session = Session("s")
    first = [sent("What?", picture())]
    prompt = record(session, seeing, first)
    assert [one.image for one in prompt.images] == [first[0]["content"][1]["image"]]
    # The tool's result has an image, and the client sends the first one again.
    result = sent("closer:", picture(28, 28, 1), role="tool") | {"tool_call_id": "c"}
    second = record(session, seeing, [sent("What?", picture()), SAID, result])
    assert second[: len(prompt)] == prompt
    assert len(second.images) == 2
    trajectory = session.finish()
    assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
    assert [len(turn.images) for turn in trajectory.turns] == [1, 1]
    report = audit(trajectory)
    assert (report.first_violation, report.bridged) == (None, 1)
    again = Trajectory.from_json(json.dumps(session.describe()["trajectory"]))
    assert again == trajectory
    assert "data" not in json.dumps(session.describe()["trajectory"]["images"])


def test_a_changed_image_forks_with_its_reason(seeing: ChatTemplate) -> None:
    session = Session("s")
    record(session, seeing, [sent("What?", picture())])
    more = sent("Sure?")
    record(session, seeing, [sent("What?", picture(seed=1)), SAID, more])
    record(session, seeing, [sent("Who?", picture()), SAID, more])
    record(session, seeing, [sent("What?"), SAID, more])
    record(session, seeing, [sent("What?", picture(28, 28)), SAID, more, SAID, more])
    record(session, seeing, [sent("What?", picture()), SAID, more])
    trajectory = session.finish()
    new = "new_conversation"
    assert [turn.fork_reason for turn in trajectory.turns] == [
        *(None, "image_changed", new, new, "image_changed", None)
    ]
    assert audit(trajectory).first_violation is None
    assert [len(turn.images) for turn in trajectory.turns] == [1, 1, 1, 0, 1, 0]


def test_the_memory_of_an_image_counts_once(seeing: ChatTemplate) -> None:
    large = picture(200, 200)
    size = len(encoded(large))
    session = Session("s")
    record(session, seeing, [sent("What?", large)])
    assert size < session.size < size + 50_000
    before = session.size
    record(session, seeing, [sent("What?", large), SAID, sent("Sure?")])
    record(session, seeing, [sent("Who?", large)])  # another branch
    assert session.size < before + size
    first, _, third = (turn.images for turn in session.trajectory.turns)
    assert first[0].image.data is third[0].image.data


def test_ids_are_spliced_with_their_images_and_refused_without(seeing: ChatTemplate) -> None:
    asking = sent("What? ", picture(), picture(28, 28, 1))
    prompt, completion = seeing.render([asking]), seeing.encode("a cat<|im_end|>")
    more = sent(picture(84, 56, 2), " and this?")
    whole = [asking, SAID, more]
    required = Prompt.joined(prompt, completion)
    ids = spliced_prompt(seeing, Conversation(whole), required)
    expected = seeing.render(whole)
    assert ids == expected
    assert ids.images == expected.images
    assert len(ids.images) == 3
    said = {**SAID, "prompt_token_ids": prompt.tolist(), "generation_token_ids": completion}
    with pytest.raises(RefusedParameter, match="not served beside images"):  # JSON has ids alone
        echoed_prompt(seeing, Conversation([asking, said, more]), refuse_dropped=True)
    for others in ([sent("What? ", picture())], [sent("What? ", picture(84, 56), picture())]):
        with pytest.raises(RefusedParameter, match="required_prefix_token_ids: the"):
            spliced_prompt(seeing, Conversation([*others, SAID, more]), required)


def test_response_room_counts_from_the_prompt_of_the_same_image(
    seeing: ChatTemplate,
) -> None:
    session = Session("s", max_response_tokens=50)
    prompt = record(session, seeing, [sent("What?", picture())])
    following = Conversation([sent("What?", picture()), SAID, sent("Sure?")])
    ids = session.next_prompt(following, seeing).token_ids
    assert ids is not None
    assert session.room(ids, None) == 50 - (len(ids) - len(prompt))
    other = seeing.render([sent("What?", picture(seed=1))])
    assert len(other) == len(prompt)
    assert response_room(session.trajectory, other, "new_conversation", 50) == 50


def test_rendering_turns_the_arguments_of_calls_into_objects(
    seeing: ChatTemplate,
) -> None:
    function = {"name": "zoom", "arguments": '{"x": 1}'}
    call = {"id": "c", "type": "function", "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
    messages = [sent("What?", picture()), said, sent(picture(28, 28), role="tool")]
    ids = whole_prompt(seeing, Conversation(messages))
    assert '"arguments": {"x": 1}' in seeing.decode_all(ids)


PARTS = """\
{%- for message in messages %}{{- message.role | capitalize + ':' }}
{%- for part in message.content %}{%- if part.type == 'image' %}{{- '<|image_pad|>' }}
{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""
"""A template in the manner of SmolVLM's and LLaVA's, to which a text that is no part is nothing."""


def test_a_template_of_parts_shows_texts_and_is_continued(seeing: ChatTemplate) -> None:
    template = ChatTemplate(seeing.tokenizer, chat_template=PARTS, images=seeing.images)
    session = Session("s")
    first = record(session, template, [{"role": "user", "content": "What?"}])
    assert template.decode_all(first) == "User:What?<|im_end|>\nAssistant:"
    more = [{"role": "user", "content": "What?"}, SAID, sent("this:", picture())]
    second = record(session, template, more)
    assert template.decode_all(second).startswith(
        "User:What?<|im_end|>\nAssistant:a cat<|im_end|>\nUser:this:<|image_pad|>"
    )
    third = [*more, SAID, {"role": "user", "content": "Sure?"}]
    assert record(session, template, third)[: len(second)] == second
    assert [turn.fork_reason for turn in session.finish().turns] == [None] * 3
    assert template.render([{"role": "user", "content": "What?"}]) == first


def test_notations_of_clients_are_one_message() -> None:
    url = f"data:image/png;base64,{base64.b64encode(encoded(picture())).decode()}"
    text = {"type": "text", "text": "What?"}
    forms: list[list[Any]] = [
        [text, {"type": "image_url", "image_url": {"url": url}}],
        [text, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}],
        ["What?", {"image_url": url}],
        [
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "image_url": url, "detail": "auto"},
        ],
    ]
    messages = [
        read_parts({"role": "user", "content": form}, "messages[0]", files=False) for form in forms
    ]
    assert len({Conversation([message]).digests[0] for message in messages}) == 1
    assert all(message == messages[0] for message in messages)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "input_image", "file_id": "f-1"}, "no image: it may be a data: URL, not None"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "it may be a data: URL"),
        ({"type": "image_url", "image_url": {"path": "/etc/passwd"}}, "it may be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is a URL"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "is a URL"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "a part of type video_url"),
    ],
)
def test_what_a_client_may_not_send_is_refused(part: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_parts({"role": "user", "content": [part]}, "messages[0]", files=False)


def test_rows_have_images_as_data_urls_for_agents() -> None:
    image = picture()
    row = {
        "prompt": [asked("What?", image)],
        "image": {"bytes": encoded(image), "path": None},
        "images": [image, encoded(image)],
        "answer": 7,
        "sound": {"path": "a.wav"},
    }
    shown: Any = json.loads(json.dumps(with_urls(row)))
    url = shown["image"]
    assert url.startswith("data:image/png;base64,")
    assert shown["images"] == [url, url]
    assert shown["prompt"][0]["content"][1] == {"type": "image_url", "image_url": {"url": url}}
    assert (shown["answer"], shown["sound"]) == (7, {"path": "a.wav"})
    with pytest.raises(InputError, match="an image of the row is no image"):
        with_urls({"image": b"nothing"})
