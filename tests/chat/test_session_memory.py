"""Memory of a session: linear in its turns, although each request sends the whole conversation."""

import gc
import json
import tracemalloc
from typing import Any

import pytest

from turnwise.chat.messages import Answer, Conversation
from turnwise.chat.prompts import NextPrompt
from turnwise.chat.session_store import SessionStore
from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Completion

FEW, MANY = 10, 100
SAMPLED, ADDED = 100, 250
"""Tokens of an answer, and of the messages before the next one."""


def bytes_per_turn(turns: int, *, forked: bool) -> tuple[float, float]:
    """Hold a conversation by requests of JSON; return memory as measured, and as estimated."""
    store = SessionStore(SamplingConfig())
    path = list(range(1_000, 1_100))
    texts: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it?"}]
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for turn in range(turns):
        asked = Conversation(json.loads(json.dumps(texts)))  # strings of its own, as over HTTP
        text = f"answer {turn} " + "a" * 400
        sampled = [10_000 + turn * SAMPLED + i for i in range(SAMPLED)]

        def read(said: Answer = (text, ()), request: Conversation = asked) -> Answer:
            return said

        covered = 0 if forked else max(0, len(texts) - 1)
        with store.request("agent", None) as session:
            session.record(
                path,
                Completion(sampled, [-0.01 * i for i in range(SAMPLED)], [turn] * SAMPLED, "stop"),
                asked=asked,
                answer=read,
                prompt=NextPrompt(None, "history_changed" if forked else None, covered),
            )
        path = [*path, *sampled, *(300 + i for i in range(ADDED))]
        texts.append({"role": "assistant", "content": text, "unknown": "u" * 300})
        texts.append({"role": "user", "content": f"result {turn} " + "r" * 1_000})
    del asked, read, sampled, path, texts, text
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / turns, session.size / turns


@pytest.mark.parametrize("forked", [False, True])
def test_a_long_conversation_takes_as_much_a_turn_as_a_short_one(forked: bool) -> None:
    """A turn whose history was rewritten shares the messages that are the same."""
    few, estimated_few = bytes_per_turn(FEW, forked=forked)
    many, estimated_many = bytes_per_turn(MANY, forked=forked)
    assert many < 1.2 * few
    assert many < 30_000
    assert estimated_many < 1.2 * estimated_few
    assert 0.7 < estimated_many / many < 1.5
