"""The next prompt: a turn is continued, or the conversation is rendered, or it is refused."""

from typing import Any, Literal, cast

import pytest

from turnwise.chat.messages import Conversation
from turnwise.chat.prompts import (
    RefusedParameter,
    echoed_prompt,
    next_prompt,
    response_room,
    spliced_prompt,
    whole_prompt,
    with_objects,
)
from turnwise.config import SamplingConfig
from turnwise.errors import TrajectoryError
from turnwise.trajectory import ChatTemplate, Trajectory

QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
AGAIN = {"role": "user", "content": "And 1 more?"}


def conversation(answer: str) -> list[dict[str, Any]]:
    return [QUESTION, {"role": "assistant", "content": answer}, AGAIN]


async def after(
    template: ChatTemplate,
    completion: list[int],
    answer: str,
    history: Literal["exact", "template"] = "exact",
) -> tuple[list[int], str | None]:
    return await next_prompt(
        template,
        prompt_token_ids=template.render([QUESTION]),
        completion_token_ids=completion,
        new_messages=[AGAIN],
        conversation=conversation(answer),
        tools=None,
        history=history,
    )


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_a_turn_is_continued_by_its_own_ids(
    template: ChatTemplate, history: Literal["exact", "template"]
) -> None:
    """Its tokens are not those that the same text would become."""
    completion = [token for letter in "42." for token in template.encode(letter)]
    completion.append(template.tokenizer.eos_token_id)
    ids, fork_reason = await after(template, completion, "42.", history)
    assert fork_reason is None
    begun = [*template.render([QUESTION]).tolist(), *completion]
    assert ids[: len(begun)] == begun
    assert template.decode_all(ids) == template.decode_all(template.render(conversation("42.")))


async def test_a_changed_history_is_rendered_when_the_caller_asks(
    template: ChatTemplate,
) -> None:
    completion = [*template.encode("42."), template.tokenizer.eos_token_id]
    exact, _ = await after(template, completion, "43.")
    ids, fork_reason = await after(template, completion, "43.", "template")
    assert ids == template.render(conversation("43.")) != exact
    assert fork_reason == "history_rewritten"


class Broken(ChatTemplate):
    """Refuses every conversation, or leaves all but its first two messages out."""

    drops = False

    def render_text(self, messages: Any, **options: Any) -> str:
        if self.drops:
            return super().render_text(messages[:2], **options)
        raise ValueError("roles must alternate")


async def test_a_conversation_that_the_template_cannot_take_is_refused(tokenizer: Any) -> None:
    template, broken = ChatTemplate(tokenizer), Broken(tokenizer)
    completion = [*template.encode("42."), tokenizer.eos_token_id]
    asked: dict[str, Any] = {
        "prompt_token_ids": template.render([QUESTION]),
        "completion_token_ids": completion,
        "new_messages": [AGAIN],
        "conversation": conversation("42."),
        "tools": None,
    }
    with pytest.raises(TrajectoryError, match="ValueError: roles must alternate") as refused:
        await next_prompt(broken, **asked)
    assert refused.value.reason == "template_refuses"
    broken.drops = True
    with pytest.raises(TrajectoryError, match="leaves out, or moves") as refused:
        await next_prompt(broken, **asked)
    assert refused.value.reason == "message_dropped"


def test_a_message_may_bring_the_ids_that_it_was_sampled_as(template: ChatTemplate) -> None:
    prompt = template.render([QUESTION]).tolist()
    completion = [*template.encode("42."), template.tokenizer.eos_token_id]
    messages = conversation("42.")
    assert echoed_prompt(template, Conversation(messages), refuse_dropped=True) is None
    messages[1] |= {"prompt_token_ids": prompt, "generation_token_ids": completion}
    echoed = echoed_prompt(template, Conversation(messages), refuse_dropped=True)
    spliced = spliced_prompt(template, Conversation(conversation("42.")), [*prompt, *completion])
    assert echoed is not None
    assert echoed.token_ids == spliced
    assert spliced[: len(prompt) + len(completion)] == [*prompt, *completion]
    messages[1]["prompt_token_ids"] = "1 2 3"
    with pytest.raises(RefusedParameter, match="must be a list of token ids") as refused:
        echoed_prompt(template, Conversation(messages), refuse_dropped=True)
    assert refused.value.parameter == "prompt_token_ids"


def test_the_room_of_a_response_counts_from_the_first_prompt() -> None:
    trajectory = Trajectory("problem")
    assert response_room(trajectory, [1] * 5, None, 10) == 10
    trajectory.add_turn([1, 2, 3, 4, 5], [6, 7], [0.0, 0.0], [0, 0], "stop")
    path = [1, 2, 3, 4, 5, 6, 7]
    assert response_room(trajectory, [*path, 8, 9], None, 10) == 6
    assert response_room(trajectory, [*path, *[8] * 9], None, 10) == -1


def test_each_conversation_of_a_trajectory_has_its_own_room() -> None:
    """Another chat, a sub-agent, or the other player of a game begins with its own prompt."""
    trajectory = Trajectory("problem")
    trajectory.add_turn([*range(10)], [50, 51], [0.0, 0.0], [0, 0], "stop")
    long = [0, 1, *range(100, 198)]  # begins as the first conversation does
    assert response_room(trajectory, long, "new_conversation", 50) == 50
    assert response_room(trajectory, [7, 7, 7, 7], "new_session", 50) == 50
    assert response_room(trajectory, long, None, 50) == 50  # a loop that rendered a second one
    trajectory.add_turn(long, [60], [0.0], [0], "stop", fork_reason="new_conversation")
    assert response_room(trajectory, [*long, 60, 61, 62], None, 50) == 47
    # A conversation whose history was rewritten is the same one.
    rewritten = [*long, 63, 64]
    assert response_room(trajectory, rewritten, "history_changed", 50) == 48
    trajectory.add_turn(rewritten, [65], [0.0], [0], "stop", fork_reason="history_changed")
    assert response_room(trajectory, [*rewritten, 65, 66], None, 50) == 46
    assert response_room(trajectory, [*range(10), 50, 51, 52], None, 50) == 47
    # A second continuation of the same turn, which begins as the first one does.
    trajectory.add_turn([*range(10), 50, 51, 52, 53], [54], [0.0], [0], "stop")
    again = [*range(10), 50, 51, 52, 55]
    assert response_room(trajectory, again, None, 50) == 46
    assert trajectory.add_turn(again, [56], [0.0], [0], "stop").fork_reason == "branched"
    assert response_room(trajectory, [*again, 56], None, 50) == 45


def test_sampling_within_a_room_keeps_all_but_its_limits() -> None:
    sampling = SamplingConfig(max_tokens=20, min_tokens=10, temperature=0.5)
    assert sampling.within(20) is sampling
    assert sampling.within(8) == SamplingConfig(max_tokens=8, min_tokens=8, temperature=0.5)
    assert sampling.within(15).min_tokens == 10


def test_a_conversation_renders_with_any_arguments_of_its_calls(
    template: ChatTemplate,
) -> None:
    """Objects for a template that takes them; empty ones where a text is none and the template
    cannot take texts."""
    wants = "{% for c in messages[1].tool_calls %}{% for k, v in c.function.arguments.items() %}"
    wants += "{{ k }}={{ v }};{% endfor %}{% endfor %}-"
    objects = ChatTemplate(template.tokenizer, chat_template=wants)
    for arguments, shown in (('{"a": 1}', "a=1;-"), ('{"a": ', "-"), ("", "-"), (None, "-")):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        asked = Conversation([{"role": "user", "content": "?"}, said])
        assert objects.decode_all(whole_prompt(objects, asked)) == shown
    refusing = ChatTemplate(template.tokenizer, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TrajectoryError, match="the chat template refuses the messages: no"):
        whole_prompt(refusing, Conversation([{"role": "user", "content": "?"}]))


class Shows:
    """A template that prints its messages as they reach it."""

    between_parts = ""

    def render(self, messages: Any, **_: Any) -> Any:
        raise ValueError(repr(messages))

    render_first = render


def test_a_template_that_raises_is_refused_by_its_code() -> None:
    asked = Conversation([QUESTION], None)
    with pytest.raises(TrajectoryError, match="the chat template refuses") as caught:
        whole_prompt(cast(ChatTemplate, Shows()), asked)
    assert caught.value.reason == "template_refuses"


def test_reasoning_reaches_the_template_by_both_names() -> None:
    answer = {"role": "assistant", "content": "42.", "reasoning": "30 and 12"}
    with pytest.raises(TrajectoryError) as caught:
        whole_prompt(cast(ChatTemplate, Shows()), Conversation([QUESTION, answer, AGAIN], None))
    assert "'reasoning_content': '30 and 12'" in str(caught.value)
    assert "tool_calls" not in str(caught.value)


def test_a_message_without_calls_gets_none() -> None:
    assert with_objects(QUESTION) == QUESTION
    assert with_objects({**QUESTION, "tool_calls": []}) == {**QUESTION, "tool_calls": []}


def test_the_tokens_around_a_text_are_added_when_asked(template: ChatTemplate) -> None:
    asked = Conversation([QUESTION], None)
    text = template.render_text([QUESTION], tools=None, add_generation_prompt=True)
    ids = whole_prompt(template, asked, special=True).tolist()
    assert ids == template.encode(text, add_special_tokens=True)
