"""Chats without HTTP: callbacks that submit the next turn, and the coroutine."""

from collections.abc import Callable
from typing import Any

import pytest

from examples.calculator.conversations import TOOL_SCHEMA
from turnwise.config import Config, ServingConfig
from turnwise.errors import InputError
from turnwise.serving.chat_scheduler import ChatScheduler
from turnwise.serving.remote_worker import RemoteWorker
from turnwise.serving.scheduler import Scheduler
from turnwise.trajectory import ChatTemplate, audit

QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
CALL = (
    '<tool_call>\n{"name":"calculate",  "arguments": {"operation":"+","a":12, "b": 30}}\n'
    "</tool_call><|im_end|>"
)


@pytest.fixture
async def chats(
    engine: RemoteWorker, make_config: Callable[..., Config], tokenizer: Any
) -> ChatScheduler:
    scheduler = Scheduler(ServingConfig(), 60.0)
    scheduler.add("worker-0", engine)
    return ChatScheduler(make_config(), scheduler, tokenizer)


async def test_a_callback_gets_the_completion_and_may_submit_the_next_turn(
    chats: ChatScheduler, template: ChatTemplate
) -> None:
    script = [template.encode(CALL), template.encode("The answer is 42.<|im_end|>")]
    options = {
        "tools": [TOOL_SCHEMA],
        "max_tokens": 48,
        "logits_processor_args": {"script": script},
    }
    finished: dict[str, str] = {}

    def on_completion(completion: Any, info: dict[str, Any], exception: Exception | None) -> None:
        assert exception is None
        message = completion.choices[0].message
        info["messages"].append(
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        if not message.tool_calls:
            finished[info["session"]] = message.content
            return
        assert completion.choices[0].finish_reason == "tool_calls"
        call = message.tool_calls[0]
        info["messages"].append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        chats.submit_chat_completions(info["messages"], on_completion, info, **options)

    for index in range(8):
        info = {"session": f"s{index}", "group": "g", "messages": [QUESTION]}
        chats.submit_chat_completions(info["messages"], on_completion, info, **options)
    await chats.wait()
    assert finished == {f"s{index}": "The answer is 42." for index in range(8)}
    for index in range(8):
        session = chats.sessions.get(f"s{index}")
        assert session is not None
        trajectory = session.finish()
        assert audit(trajectory).first_violation is None
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        assert len(trajectory.branches()) == 1


async def test_a_failure_reaches_the_callback(chats: ChatScheduler) -> None:
    told: list[Exception | None] = []
    chats.submit_chat_completions([QUESTION], lambda c, i, e: told.append(e), no_such_key=1)
    chats.submit_chat_completions(
        [{"role": "user", "content": "1 2 3 " * 500}], lambda c, i, e: told.append(e)
    )
    await chats.wait()
    assert [type(error) for error in told] == [InputError, InputError]
    assert "no sampling key no_such_key" in str(told[0])
    assert "leaves no room in the context of 512" in str(told[1])


async def test_a_turn_never_exceeds_what_the_context_holds(chats: ChatScheduler) -> None:
    messages = [{"role": "user", "content": "1 " * 240}]
    completion = await chats.chat_completion(
        messages, max_tokens=512, ignore_eos=True, session="full"
    )
    assert completion.usage is not None
    assert completion.usage.total_tokens == 512
    assert completion.choices[0].finish_reason == "length"
