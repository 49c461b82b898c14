"""A batch of prompts in, finished trajectories out."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import turnwise
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.engine.protocol import Request
from turnwise.errors import EngineError, InputError, StepError
from turnwise.rollouts.sampler import TrajectorySampler

QUICK = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
ROWS = [{"question": f"What is {n} plus 1?", "answer": n + 1} for n in (1, 22, 333)]


@pytest.fixture
def llm(tokenizer: Any) -> SimulatedEngine:
    return SimulatedEngine(vocab_size=len(tokenizer), latency=QUICK)


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(rollout={"loop": "single_turn"}, sampling={"n": 2, "max_tokens": 12})


async def test_a_batch_is_sampled_in_three_lines(
    llm: SimulatedEngine, config: Config, tokenizer: Any
) -> None:
    """Rows of the environment, with its reward; n of each; groups in the prompts' order."""
    sampler = turnwise.TrajectorySampler(llm, ROWS, {"n": 4}, config=config, tokenizer=tokenizer)
    trajectories = [trajectory async for trajectory in sampler]
    places = sorted((t.problem_id, t.sample_index) for t in trajectories)
    assert places == [(f"prompt:{p}", i) for p in (1, 2, 3) for i in range(4)]
    assert all(t.reward == 0.0 and t.sampled_tokens > 0 for t in trajectories)
    assert [group.problem_id for group in sampler.groups] == ["prompt:1", "prompt:2", "prompt:3"]
    assert [len(group.trajectories) for group in sampler.groups] == [4, 4, 4]
    asked = {t.problem_id: t.messages[0]["content"] for t in trajectories}
    assert asked == {f"prompt:{place}": row["question"] for place, row in enumerate(ROWS, 1)}


async def test_texts_and_messages_are_answered_with_tools(
    llm: SimulatedEngine, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """No environment is needed."""

    def double(x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    prompts = ["Hello.", [{"role": "user", "content": "Twice 4?"}]]
    config = make_config(sampling={"n": 1, "max_tokens": 12}, environment="not.there:Nothing")
    sampler = TrajectorySampler(llm, prompts, config=config, tools=[double], tokenizer=tokenizer)
    asked = {t.messages[0]["content"]: t async for t in sampler}
    assert set(asked) == {"Hello.", "Twice 4?"}
    prompt = tokenizer.decode(asked["Hello."].turns[0].added_token_ids)
    assert "Double a number" in prompt


async def test_a_base_model_continues_texts(
    llm: SimulatedEngine, make_config: Callable[..., Config], bare: Any
) -> None:
    """Without a chat template a text is a prompt after its BOS, in the default loop, too."""
    config = make_config(sampling={"n": 2, "max_tokens": 12}, environment="not.there:Nothing")
    sampler = TrajectorySampler(llm, ["2 + 2 ="], config=config, tokenizer=bare)
    trajectories = [trajectory async for trajectory in sampler]
    expected = bare("2 + 2 =")["input_ids"]
    assert expected[0] == bare.bos_token_id
    assert [t.prompt_token_ids(0) for t in trajectories] == [expected] * 2
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2 ="}]
    with pytest.raises(InputError, match="has no chat template, and without one a prompt is one"):
        _ = [t async for t in TrajectorySampler(llm, [chat], config=config, tokenizer=bare)]


async def test_trajectories_come_one_by_one_and_leaving_ends_the_rest(
    llm: SimulatedEngine, config: Config, tokenizer: Any
) -> None:
    """Nothing goes on behind the loop's back."""
    slow = TrajectorySampler(llm, ROWS, {"n": 8}, config=config, tokenizer=tokenizer)
    stream = aiter(slow)
    first = await anext(stream)
    assert first.status != "running"
    await stream.aclose()
    for _ in range(20):
        await asyncio.sleep(0)
    assert await llm.num_in_flight() == 0


class OneBadRow:
    """A loop that finds its row unusable, as `rollout.call_tool` does."""

    async def run(self, environment: Any, context: Any) -> None:
        if context.row["answer"] == 2:
            await asyncio.sleep(0.05)  # the other rows sample, and none of them has finished
            raise InputError("this row cannot be used")
        await context.sample(await context.first_prompt(list(context.problem)))


async def test_an_error_ends_all_other_rows(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    latency = Latency(prefill_token=0.0, step=0.01, step_request=0.0)
    llm = SimulatedEngine(vocab_size=len(tokenizer), latency=latency, mean_tokens=10**9)
    loop = f"{__name__}:OneBadRow"
    config = make_config(rollout={"loop": loop}, sampling={"n": 2, "max_tokens": 2000})
    sampler = TrajectorySampler(llm, ROWS * 5, config=config, tokenizer=tokenizer)
    before = asyncio.all_tasks()
    with pytest.raises(InputError, match="this row cannot be used"):
        _ = [trajectory async for trajectory in sampler]
    assert await llm.num_in_flight() == 0
    left = [task for task in asyncio.all_tasks() - before if "SimulatedEngine" not in repr(task)]
    assert left == []


async def test_failures_are_counted_and_most_of_them_are_an_error(
    config: Config, tokenizer: Any
) -> None:
    """None is lost in silence."""

    class Failing(SimulatedEngine):
        def stream(self, request: Request) -> Any:
            raise EngineError("it is broken")

    sampler = TrajectorySampler(Failing(), ROWS, config=config, tokenizer=tokenizer)
    with pytest.raises(StepError, match=r"6 of 6 trajectories failed \(6 engine_error: it is bro"):
        [t async for t in sampler]
    assert [group.dropped["engine_error"] for group in sampler.groups] == [2, 2, 2]


def test_what_cannot_be_sampled_is_refused(
    llm: SimulatedEngine, config: Config, tokenizer: Any
) -> None:
    """Before anything is sampled."""
    with pytest.raises(InputError, match="sampling_params has no heat"):
        TrajectorySampler(llm, ROWS, {"heat": 1}, config=config, tokenizer=tokenizer)
    with pytest.raises(InputError, match="rows have the tools of their environment"):
        TrajectorySampler(llm, ROWS, config=config, tools=[print], tokenizer=tokenizer)
    with pytest.raises(AttributeError, match="has no attribute 'Sampler'"):
        _ = turnwise.Sampler


async def test_a_loop_that_needs_a_server_says_so(
    llm: SimulatedEngine, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    keys = {"agent": "not.there:agent", "chat_scheduler": "not.there:Scheduler"}
    for loop, wanted in (("agent", "needs the OpenAI server"), ("chat_scheduler", "ChatBackend")):
        config = make_config(rollout={"loop": loop, loop: keys[loop]})
        sampler = TrajectorySampler(llm, ROWS[:1], config=config, tokenizer=tokenizer)
        with pytest.raises(InputError, match=wanted):
            _ = [trajectory async for trajectory in sampler]
