"""Beam search on the real engine, compared with the model's own log-probs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from turnwise.config import Config, SamplingConfig
from turnwise.engine import Request, generate
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.sampler import TrajectorySampler
from turnwise.run.checks import check_sampled
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import Trajectory

TEXT = "What is 3 plus 4?"


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(rollout={"loop": "single_turn"}, environment="not.there:Nothing")


@pytest.fixture
def search(engine: WorkerHandle, config: Config, tokenizer: Any) -> Callable[..., Any]:
    async def search(**sampling: Any) -> list[Trajectory]:
        sampling = {"use_beam_search": True, "temperature": 0.5, **sampling}
        sampler = TrajectorySampler(engine, [TEXT], sampling, config=config, tokenizer=tokenizer)
        found = [trajectory async for trajectory in sampler]
        return sorted(found, key=lambda trajectory: trajectory.sample_index)

    return search


@pytest.fixture(scope="module")
def reference(model_path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def logprobs_of(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    return values


async def test_beam_search_finds_the_likeliest_answers_through_vllm(
    search: Callable[..., Any], reference: Any, tokenizer: Any
) -> None:
    """One step is exact, and of several each answer has the model's own log-probs."""
    first = await search(n=5, max_tokens=1, ignore_eos=True)
    prompt = first[0].prompt_token_ids(0)
    likeliest = logprobs_of(reference, prompt)[-1].topk(5).indices.tolist()
    assert [t.turns[0].completion_token_ids for t in first] == [[token] for token in likeliest]
    answers = await search(n=4, max_tokens=6)
    totals = []
    for trajectory in answers:
        (turn,) = trajectory.turns
        ids = turn.completion_token_ids
        assert 0 < len(ids) <= 6
        stopped = ids[-1] == tokenizer.eos_token_id
        assert turn.finish_reason == ("stop" if stopped else "length")
        rows = logprobs_of(reference, [*prompt, *ids])[len(prompt) - 1 :]
        expected = [float(rows[place, token]) for place, token in enumerate(ids)]
        assert turn.logprobs == pytest.approx(expected, abs=1e-3)
        assert len(set(turn.weight_versions)) == 1
        assert min(turn.weight_versions) >= 0
        totals.append(sum(turn.logprobs) / (len(prompt) + len(ids) - stopped))
    assert len({tuple(t.turns[0].completion_token_ids) for t in answers}) == 4
    assert totals == sorted(totals, reverse=True)


async def test_a_beam_of_one_is_the_greedy_answer(
    search: Callable[..., Any], engine: WorkerHandle
) -> None:
    (answer,) = await search(n=1, max_tokens=5, ignore_eos=True)
    greedy = SamplingConfig(temperature=0, max_tokens=5, ignore_eos=True)
    alone = await generate(engine, Request(answer.prompt_token_ids(0), greedy, "greedy-beam"))
    assert answer.turns[0].completion_token_ids == alone.token_ids


async def test_stop_strings_cut_what_a_beam_search_finds(
    search: Callable[..., Any], tokenizer: Any
) -> None:
    (whole,) = await search(n=1, max_tokens=6, ignore_eos=True)
    ids = whole.turns[0].completion_token_ids
    end = tokenizer.decode(ids[2:3])
    (cut,) = await search(n=1, max_tokens=6, ignore_eos=True, stop=[end])
    turn = cut.turns[0]
    place = next(n for n in range(1, 7) if end in tokenizer.decode(ids[:n]))
    assert (turn.completion_token_ids, turn.finish_reason) == (ids[:place], "stop")
    (cut,) = await search(n=1, max_tokens=6, ignore_eos=True, stop_token_ids=[ids[2]])
    turn = cut.turns[0]
    kept = ids[: ids.index(ids[2]) + 1]
    assert (turn.completion_token_ids, turn.finish_reason) == (kept, "stop")


async def test_more_beams_than_log_probs_raise_one_clear_error(
    search: Callable[..., Any],
) -> None:
    with pytest.raises(InputError, match="logprobs"):
        await search(n=11, max_tokens=2)


async def test_what_a_beam_search_found_is_not_trained_and_no_agents(
    make_config: Callable[..., Config], tokenizer: Any, engine: WorkerHandle
) -> None:
    row = {"question": "What is 3 plus 4?", "answer": 7}
    for loop, key in (("agent", "tests.plain_agents:calculator"), ("sampler", "not.there:sampler")):
        config = make_config(
            sampling={"n": 2, "use_beam_search": True}, rollout={"loop": loop, loop: key}
        )
        with pytest.raises(
            InputError, match=r"sampling\.use_beam_search: answers that a search fo"
        ):
            check_sampled(config)
        runner = Runner(config, tokenizer)
        with pytest.raises(InputError, match="agents, chat schedulers and samplers sample"):
            await runner.run_group(engine, Problem("rows:1", row), config.sampling, "agents")
