"""Answers of an environment's process: a value of the type, or the failure of a trajectory."""

import asyncio
import json
import math
import socket
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.core.test_untrusted import json_values
from turnwise.config import RolloutConfig
from turnwise.core.untrusted import HEADER, MAX_BYTES, framed
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import remote_episode as answers
from turnwise.rollouts.problems import Problem
from turnwise.rollouts.remote_episode import EnvironmentProcesses, RemoteEpisode

KINDS: list[TypeAdapter[Any]] = [
    answers.PROMPT,
    answers.PREVIEW,
    answers.OPENED,
    answers.CALLED,
    answers.MOVED,
    answers.DONE,
    answers.REWARDED,
    answers.METRICS,
    answers.CLOSED,
]
PROCESSES = EnvironmentProcesses(dict, RolloutConfig())
REASONS = {"environment_error", "environment_timeout", "reward_error", "close_error"}


async def asked(kind: TypeAdapter[Any], sent: bytes, times: int = 1) -> Any:
    """Return the answer of a process that has sent these bytes, and ended."""
    talk, theirs = socket.socketpair()
    control, server = socket.socketpair()
    episode = RemoteEpisode(PROCESSES, Problem("rows:1", {}), RolloutConfig())
    await episode.connect(talk, control)
    with theirs, server:
        asking = [asyncio.create_task(episode.ask(kind, "reward")) for _ in range(times)]
        await asyncio.sleep(0)
        theirs.setblocking(False)
        with suppress(BlockingIOError, BrokenPipeError):
            theirs.sendall(sent)
        theirs.close()
        server.close()
        try:
            return (await asyncio.gather(*asking))[0]
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            episode.kill()
            await asyncio.wait_for(episode._reading, 30.0)


def frame(tree: object) -> bytes:
    return framed(json.dumps(tree).encode())


def error(**changes: object) -> dict[str, object]:
    return {"input": False, "reason": "x", "message": "m", "cause": "", **changes}


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60), st.sampled_from(KINDS))
def test_no_bytes_end_a_run(sent: bytes, kind: TypeAdapter[Any]) -> None:
    for whole in (sent, framed(sent)):
        with pytest.raises(TrajectoryError) as raised:
            asyncio.run(asked(kind, whole))
        assert raised.value.reason in {answers.REPLY, "environment_crashed"}


@settings(deadline=None, max_examples=200)
@given(json_values, st.sampled_from(KINDS), st.sampled_from(["value", "error", "reply"]))
def test_no_json_ends_a_run(value: Any, kind: TypeAdapter[Any], place: str) -> None:
    reply = {"id": value} if place == "reply" else {"id": 1, place: value}
    try:
        got = asyncio.run(asked(kind, frame(reply)))
    except TrajectoryError as failed:
        reason = failed.reason
    else:
        reason = answers.REPLY
        if kind is answers.METRICS:
            assert all(math.isfinite(number) for number in got.values())
    assert reason in REASONS | {answers.REPLY}


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (answers.REWARDED, [1.0, [1.0], {}, {}], "valid dictionary"),
        (answers.REWARDED, {"final": "a", "turns": [], "parts": {}, "players": {}}, "final: "),
        (answers.REWARDED, {"final": 1, "turns": ["b"], "parts": {}, "players": {}}, "turns.0: "),
        (
            answers.REWARDED,
            {"final": math.inf, "turns": [], "parts": {}, "players": {}},
            "final: Input should be a finite",
        ),
        (answers.REWARDED, {"final": 10**400, "turns": [], "parts": {}, "players": {}}, "final: "),
        (answers.METRICS, {str(n): 1 for n in range(1_001)}, "at most 1000"),
        (answers.METRICS, {"n" * 201: 1}, "at most 200"),
        (answers.CALLED, {"text": 3, "outcome": "ok", "error": None}, "text: "),
        (answers.CALLED, {"text": "", "outcome": "so many", "error": None}, "outcome: "),
        (answers.MOVED, {"": [{"content": "no role"}]}, "0.role: Field required"),
        (answers.MOVED, {"": "text"}, "valid list"),
        (answers.MOVED, "text", "valid dictionary"),
        (answers.DONE, 1, "valid boolean"),
    ],
)
async def test_a_wrong_value_costs_its_trajectory(
    kind: TypeAdapter[Any], value: Any, words: str
) -> None:
    with pytest.raises(TrajectoryError, match=words) as raised:
        await asked(kind, frame({"id": 1, "value": value}))
    assert raised.value.reason == answers.REPLY


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (frame(17), "wrong answer"),
        (frame([1, {"value": True}]), "wrong answer"),
        (frame({"value": True}), "wrong answer"),
        (frame({"id": True, "value": True}), "wrong answer"),
        (frame({"id": 7, "value": True}), "answered the request 7, which nobody waits for"),
        (frame({"id": 1, "value": "\ud800"}), "not readable JSON"),
        (framed(b"{x"), "not readable JSON"),
        ((2**31).to_bytes(HEADER, "big") + b"x" * 100, f"more than {MAX_BYTES:,} bytes"),
        (frame({"id": 1, "error": error(reason=3)}), "error.reason: "),
        (frame({"id": 1, "error": error(message="m" * 200_000)}), "error.message: "),
    ],
)
async def test_a_wrong_message_ends_the_process_and_all_that_wait(sent: bytes, words: str) -> None:
    with pytest.raises(TrajectoryError, match=words) as raised:
        await asked(answers.DONE, sent, times=3)
    assert raised.value.reason == answers.REPLY


async def test_an_answer_comes_once() -> None:
    sent = frame({"id": 1, "value": False})
    assert await asked(answers.DONE, sent) is False
    with pytest.raises(TrajectoryError, match="request 1, which nobody waits for"):
        await asked(answers.DONE, sent * 2, times=2)


async def test_an_error_is_of_the_trajectory_whatever_it_says() -> None:
    for wrong in (
        error(input=True),
        error(reason="prompt_too_long"),
        error(reason="a new metric 3"),
    ):
        with pytest.raises(TrajectoryError, match=r"m$") as raised:
            await asked(answers.DONE, frame({"id": 1, "error": wrong}))
        assert raised.value.reason == "environment_error"
    failure = error(reason="reward_error", cause="t")
    with pytest.raises(TrajectoryError) as raised:
        await asked(answers.DONE, frame({"id": 1, "error": failure}))
    assert raised.value.reason == "reward_error"
    assert str(raised.value.__cause__) == "t"


def test_only_a_process_of_one_question_blames_the_user() -> None:
    reply: Any = {"id": 1, "error": error(input=True)}
    with pytest.raises(InputError, match=r"^m$"):
        answers.value_of(reply, answers.PROMPT, alone=True)
    with pytest.raises(TrajectoryError):
        answers.value_of(reply, answers.PROMPT)
