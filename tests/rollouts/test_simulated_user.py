"""The simulated user: its model's view, retries, budgets, deadlines; and a masked trajectory."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import turnwise
from tests.scripted import DROP, HANG, Scripted
from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Problem, Runner
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, audit


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_the_users_model_sees_the_roles_swapped(scripted: Scripted) -> None:
    scripted.script = ["<think>It is polite.</think>\nOrder 7.", "Thanks."]
    request = {"temperature": 0.7, "chat_template_kwargs": {"enable_thinking": False}}
    user = turnwise.SimulatedUser(
        scripted.url, "m", "You want order 7.", opening="Where is it?", request=request
    )
    assert await user.answer(said("<think>Which?</think>Which order?")) == "Order 7."
    assert await user.answer(said("Stall them.\n</think>\n\nIt is on its way.")) == "Thanks."
    assert scripted.asked[1] == {
        "path": "/v1/chat/completions",
        "model": "m",
        **request,
        "messages": [
            {"role": "system", "content": "You want order 7."},
            {"role": "user", "content": "Hello! How can I help you?"},
            {"role": "assistant", "content": "Where is it?"},
            {"role": "user", "content": "Which order?"},
            {"role": "assistant", "content": "Order 7."},
            {"role": "user", "content": "It is on its way."},
        ],
    }
    assert user.ended_by is None
    assert (user.calls, user.tokens) == (2, 200)


async def test_its_model_may_write_the_first_message(scripted: Scripted) -> None:
    scripted.script = ["Where is order 7?"]
    user = turnwise.SimulatedUser(scripted.url, "m", "You want order 7.")
    assert await user.open() == "Where is order 7?"
    assert [m["role"] for m in scripted.asked[0]["messages"]] == ["system", "user"]
    assert user.messages[-1] == {"role": "assistant", "content": "Where is order 7?"}


async def test_it_ends_the_conversation_with_its_stop_phrase(scripted: Scripted) -> None:
    scripted.script = ["No, DONE soon.", "Then I am ##DONE##."]
    user = turnwise.SimulatedUser(scripted.url, "m", "", stop="##DONE##")
    assert await user.answer(said("Here it is.")) == "No, DONE soon."
    assert await user.answer(said("Here it is.")) is None
    assert await user.answer(said("Anything else?")) is None
    assert len(scripted.asked) == 2
    assert user.messages[-1]["content"] == "Then I am ##DONE##."
    assert user.metrics() == {
        "user_calls": 2,
        "user_tokens": 200,
        "user_stopped": True,
        "user_out_of_budget": False,
    }


@pytest.mark.parametrize("budget", [{"max_calls": 2}, {"max_tokens": 150}])
async def test_a_budget_ends_the_conversation(scripted: Scripted, budget: Any) -> None:
    scripted.script = ["one", "two", "three"]
    user = turnwise.SimulatedUser(scripted.url, "m", "", **budget)
    answers = [await user.answer(said("?")) for _ in range(4)]
    assert answers == ["one", "two", None, None]
    assert user.ended_by == "budget"
    assert user.metrics()["user_out_of_budget"]
    assert len(scripted.asked) == 2


async def test_what_may_pass_is_tried_again(scripted: Scripted) -> None:
    scripted.script = [429, 503, DROP, "At last."]
    user = turnwise.SimulatedUser(scripted.url, "m", "", timeout=120)
    assert await user.answer(said("?")) == "At last."
    assert len(scripted.asked) == 4
    assert user.calls == 1


@pytest.mark.parametrize(
    ("script", "attempts", "words"),
    [
        ([500] * 2, 2, "500"),
        ([404], 1, r"answered 404: .*not today \(404\)"),
        ([""], 1, r"answered without a text \(finish_reason stop\)"),
        (["<think>I never"], 1, r"answered without a text"),
    ],
)
async def test_what_stays_wrong_is_one_sentence(
    scripted: Scripted, script: list[Any], attempts: int, words: str
) -> None:
    scripted.script = list(script)
    user = turnwise.SimulatedUser(scripted.url, "m", "", retries=1)
    with pytest.raises(
        TrajectoryError, match=f"the simulated user m at {scripted.url} .*{words}"
    ) as (failure):
        await user.answer(said("?"))
    assert failure.value.reason == "simulated_user_error"
    assert len(scripted.asked) == attempts


async def test_a_server_that_is_not_there_is_named(scripted: Scripted) -> None:
    scripted.server_close()
    user = turnwise.SimulatedUser(scripted.url, "m", "", retries=0)
    with pytest.raises(TrajectoryError, match=r"cannot be reached: .+"):
        await user.answer(said("?"))


async def test_a_server_that_hangs_has_a_deadline(scripted: Scripted) -> None:
    scripted.script = [HANG]
    user = turnwise.SimulatedUser(scripted.url, "m", "", timeout=0.2, retries=0)
    with pytest.raises(
        TrajectoryError, match=r"did not answer within 0.2 s \(timeout\)"
    ) as failure:
        await user.answer(said("?"))
    assert failure.value.reason == "simulated_user_timeout"


async def test_the_key_is_that_of_the_named_variable(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-you")
    monkeypatch.setenv("USER_KEY", "secret")
    scripted.script = ["a", "b", 401]
    with_key = turnwise.SimulatedUser(scripted.url, "m", "", api_key_variable="USER_KEY")
    without = turnwise.SimulatedUser(scripted.url, "m", "")
    assert await with_key.answer(said("?")) == "a"
    assert await without.answer(said("?")) == "b"
    with pytest.raises(TrajectoryError) as failure:
        await with_key.answer(said("?"))
    assert scripted.keys == ["Bearer secret", None, "Bearer secret"]
    assert "secret" not in f"{failure.value}{with_key}"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"base_url": "localhost:8000/v1"}, "base_url must begin with http:// or https://"),
        ({"stop": ""}, "stop must be a phrase"),
        ({"max_calls": 0}, "max_calls must be at least 1, not 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"retries": -1}, "retries must be at least 0"),
        (
            {"api_key_variable": "NO_SUCH_KEY"},
            "the environment variable NO_SUCH_KEY is not set",
        ),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"^(SimulatedUser|the simulated user): {words}"):
        turnwise.SimulatedUser(
            **{"base_url": "http://h/v1", "model": "m", "instructions": "", **wrong}
        )


@pytest.fixture(scope="module")
async def served(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}, sampling={"max_tokens": 32}), engine)
    await server.start()
    yield server
    await server.stop()


USER_TURNS = ["Add 30 to it.<|im_end|>", "DONE<|im_end|>"]


class Desk(turnwise.Environment):
    """A conversation with a user whom the same engine plays."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = row["question"]
        self.user = turnwise.SimulatedUser(
            row["base_url"],
            "any",
            "Be brief.",
            opening=self.problem,
            stop="DONE",
            timeout=110,
            request=row["request"],
        )

    async def step(self, message: dict[str, Any]) -> str | None:
        return await self.user.answer(message)

    def reward(self, trajectory: Any) -> float:
        return float(self.user.ended_by == "stop")

    def metrics(self, trajectory: Any) -> dict[str, float]:
        return self.user.metrics()


async def test_what_it_says_is_masked_and_the_trajectory_is_exact(
    served: OpenAIServer,
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
) -> None:
    policy = ["The answer is 12.<|im_end|>", "The answer is 42.<|im_end|>"]
    script = {"script": [template.encode(turn) for turn in policy]}
    flat = [token for turn in USER_TURNS for token in [*template.encode(turn), -1]]
    row = {
        "question": "What is 5 + 7?",
        "base_url": served.base_url,
        "request": {"vllm_xargs": {"script": flat}},
    }
    runner = Runner(make_config(rollout={"loop": "tool_calling"}), tokenizer, Desk)
    sampling = SamplingConfig(n=2, max_tokens=32, logits_processor_args=script)
    group = await runner.run_group(engine, Problem("desk:1", row), sampling, "users")
    assert group.causes == {}
    for trajectory in group.trajectories:
        assert [message["content"] for message in trajectory.messages] == [
            "What is 5 + 7?",
            "The answer is 12.",
            "Add 30 to it.",
            "The answer is 42.",
        ]
        assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
        assert trajectory.metrics["user_calls"] == 2.0
        assert trajectory.metrics["user_tokens"] > 0
        assert audit(trajectory).first_violation is None
        (branch,) = trajectory.branches()
        trained = [
            token for token, bit in zip(branch.token_ids, branch.response_mask, strict=True) if bit
        ]
        assert trained == [token for turn in policy for token in template.encode(turn)]
        assert "Add 30 to it." in template.decode(branch.token_ids)
