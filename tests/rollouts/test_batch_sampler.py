"""Batch samplers of the user's, as verl's issue, TRL and verifiers had them: what is trained."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from vllm import RequestOutput, SamplingParams

import turnwise
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config
from turnwise.errors import InputError, StepError
from turnwise.rollouts import batch_sampler
from turnwise.rollouts.environment import load_environment, make_rows
from turnwise.rollouts.sampler import TrajectorySampler
from turnwise.rollouts.sampler_llm import LLM
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.samples import make_samples
from turnwise.trajectory import FORCED, ChatTemplate, Trajectory, audit

HERE = __name__
ROWS = [{"question": f"What is {n} plus 1?", "answer": n + 1} for n in (1, 22)]
DOUBT = {"role": "user", "content": "Are you sure?"}
SAID = ("It is 2.<|im_end|>", "Yes, it is.<|im_end|>")
SEEN: list[list[list[dict[str, Any]]]] = []
"""The prompts of each call of a sampler here."""
PARAMS: list[SamplingParams] = []
"""The parameters of each call of `ByTrl`."""


@pytest.fixture(autouse=True)
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch begins when all of a step are there, however slow the machine is."""
    monkeypatch.setattr(batch_sampler, "QUIET_SECONDS", 60.0)
    SEEN.clear()


class AskTwice(turnwise.RolloutSampler):
    """Two rounds of chat; the outputs of the last are the answers."""

    def __call__(
        self, llm: LLM, prompts: list[list[dict[str, Any]]], sampling_params: SamplingParams
    ) -> Sequence[RequestOutput]:
        SEEN.append(prompts)
        asked = []
        for prompt, output in zip(prompts, llm.chat(prompts, sampling_params), strict=True):
            answer = {"role": "assistant", "content": output.outputs[0].text}
            asked.append([*prompt, answer, DOUBT])
        return llm.chat(asked, sampling_params, use_tqdm=False)


def with_results(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> list[list[int]]:
    """Cuts each answer, adds a result, and lets the model go on; token ids are the answers."""
    result = llm.get_tokenizer().encode(" -> 42", add_special_tokens=False)
    rows = []
    for output in llm.generate(prompts, sampling_params):
        kept = [*output.outputs[0].token_ids][:5]
        prompt = {"prompt_token_ids": [*output.prompt_token_ids, *kept, *result]}
        shorter = sampling_params.clone()
        shorter.max_tokens = 4
        (more,) = llm.generate(prompt, shorter)
        assert more.prompt_token_ids == prompt["prompt_token_ids"]
        assert len(more.outputs[0].token_ids) <= 4
        rows.append([*kept, *result, *more.outputs[0].token_ids, *result])
    return rows


class DoubleCheck:
    """An environment of verifiers' first versions."""

    def get_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}]

    def get_rubric(self) -> list[Callable[..., list[float]]]:
        def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            pairs = zip(completions, answer, strict=True)
            return [float(wanted in c[0]["content"]) for c, wanted in pairs]

        return [right]

    def get_reward_weights(self) -> list[float]:
        return [0.5]

    def generate(
        self, prompts: list[list[Any]], llm: LLM, sampling_params: SamplingParams, **_: Any
    ) -> dict[str, list[Any]]:
        params = sampling_params.clone()
        params.skip_special_tokens = False
        states = [{"messages": list(prompt), "ids": [], "mask": []} for prompt in prompts]
        for round_number in range(2):
            outputs = llm.chat([s["messages"] for s in states], sampling_params=params)
            for state, output in zip(states, outputs, strict=True):
                state.setdefault("prompt", list(output.prompt_token_ids))
                before = output.prompt_token_ids[len(state["prompt"]) + len(state["ids"]) :]
                sampled = list(output.outputs[0].token_ids)
                state["ids"] += [*before, *sampled]
                state["mask"] += [0] * len(before) + [1] * len(sampled)
                text = output.outputs[0].text
                state["messages"].append({"role": "assistant", "content": text})
                if round_number == 0:
                    state["messages"].append(DOUBT)
        return {
            "ids": [state["ids"] for state in states],
            "messages": [s["messages"][len(p) :] for s, p in zip(states, prompts, strict=True)],
            "mask": [state["mask"] for state in states],
        }


CHECKED = DoubleCheck()


class ByTrl:
    """An environment as TRL's proposal had it: the ids of the answers."""

    def generate(self, llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> list[Any]:
        PARAMS.append(sampling_params)
        return [o.outputs[0].token_ids for o in llm.chat(prompts, sampling_params)]


def hot(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    params = sampling_params.clone()
    params.temperature = 0.5
    return llm.generate(prompts, params)


def too_few(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    return llm.generate(prompts, sampling_params)[1:]


def invented(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    return [[5, 6, 7] for _ in prompts]


def broken(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    raise KeyError("oops")


async def patient(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    return await asyncio.to_thread(llm.generate, prompts, sampling_params)


CUT: dict[str, threading.Event] = {}


def endless(llm: LLM, prompts: list[Any], sampling_params: SamplingParams) -> Any:
    try:
        return llm.generate(prompts, sampling_params)
    finally:
        CUT["ended"].set()


@pytest.fixture
def sampling(
    make_config: Callable[..., Config], tokenizer: Any, template: ChatTemplate
) -> Callable[..., TrajectorySampler]:
    """Makes a sampler of two of each of two rows, whose engine says `SAID`."""

    def make(
        llm: Any, name: str, rows: Sequence[Any] = ROWS, environment: str = "", **own: Any
    ) -> TrajectorySampler:
        config = make_config(
            rollout={"sampler": f"{HERE}:{name}", "prompts_per_step": len(rows)},
            **({"environment": environment} if environment else {}),
        )
        assert config.rollout.loop == "sampler"
        script = {"script": [template.encode(text) for text in SAID]}
        keys = {"n": 2, "max_tokens": 40, "logits_processor_args": script, **own}
        return TrajectorySampler(llm, rows, keys, config=config, tokenizer=tokenizer)

    return make


@pytest.fixture
def simulated(tokenizer: Any) -> SimulatedEngine:
    latency = Latency(prefill_token=0.0, step=1e-4, step_request=0.0)
    return SimulatedEngine(vocab_size=len(tokenizer), latency=latency)


async def test_a_users_sampler_makes_a_batch_trained_token_by_token(
    engine: WorkerHandle,
    sampling: Callable[..., TrajectorySampler],
    make_config: Callable[..., Config],
    template: ChatTemplate,
) -> None:
    """All prompts of a step in one call; rounds keep their ids; the loss sees the sampled ones."""
    sampler = sampling(engine, "AskTwice")
    trajectories = [trajectory async for trajectory in sampler]
    (prompts,) = SEEN
    asked = [prompt[-1]["content"] for prompt in prompts]
    assert asked == [row["question"] for row in ROWS for _ in range(2)]
    first, last = (template.encode(text) for text in SAID)
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        assert [turn.completion_token_ids for turn in trajectory.turns] == [first, last]
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        roles = [message["role"] for message in trajectory.messages]
        assert roles[-4:] == ["user", "assistant", "user", "assistant"]
        assert trajectory.final_text == "Yes, it is."
        assert trajectory.status == "completed"
        assert trajectory.events == {}
        (sample,) = trajectory.samples()
        assert sum(sample.response_mask) == len(first) + len(last)
    for group in sampler.groups:
        for number, trajectory in enumerate(group.trajectories):
            trajectory.set_outcome(reward=float(number))
        assert [len(group.calls[n]) for n in (0, 1)] == [2, 2]
    batch = make_samples(sampler.groups, make_config(), version=0)
    assert batch.report.first_violation is None
    assert batch.report.tokens_trained == 4 * (len(first) + len(last))
    assert len(batch.samples) == 4


async def test_ids_a_sampler_adds_are_context_and_ids_it_cuts_are_gone(
    simulated: SimulatedEngine, sampling: Callable[..., TrajectorySampler], tokenizer: Any
) -> None:
    """Token ids as answers, which no call of `llm` gave; the engine's tokens, up to the cut."""
    result = tokenizer.encode(" -> 42", add_special_tokens=False)
    trajectories = [t async for t in sampling(simulated, "with_results")]
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        before, after = trajectory.turns
        prompt = trajectory.prompt_token_ids(0)
        assert before.completion_token_ids == simulated.expected(prompt, 40)[:5]
        assert after.added_token_ids == result
        whole = [*prompt, *before.completion_token_ids, *result]
        assert after.completion_token_ids == simulated.expected(whole, 4)
        (sample,) = trajectory.samples()
        kept = len(before.completion_token_ids)
        assert sample.response_mask[len(prompt) :] == (
            [1] * kept + [0] * len(result) + [1] * len(after.completion_token_ids)
        )


async def test_an_environment_with_generate_is_played_in_process(
    engine: WorkerHandle, sampling: Callable[..., TrajectorySampler], template: ChatTemplate
) -> None:
    """verifiers' first form: rows, rubric with weights, ids, messages and masks."""
    address = f"verifiers:{HERE}:CHECKED"
    rows = make_rows(load_environment(address), "train")
    assert rows == CHECKED.get_dataset()
    with pytest.raises(InputError, match=r"CHECKED has no rows in get_eval_dataset\(\)"):
        make_rows(load_environment(address), "eval")
    trajectories = [t async for t in sampling(engine, "CHECKED", rows, address)]
    first, last = (template.encode(text) for text in SAID)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        assert trajectory.reward == 0.5
        assert trajectory.reward_parts["right"] == 0.5
        assert [turn.completion_token_ids for turn in trajectory.turns] == [first, last]
        assert trajectory.turns[1].fork_reason is None
        assert trajectory.messages[-2] == DOUBT


async def test_trls_environment_gives_the_ids_of_its_answers(
    engine: WorkerHandle, sampling: Callable[..., TrajectorySampler], template: ChatTemplate
) -> None:
    """A class with `generate(llm, prompts, sampling_params)`."""
    trajectories = [t async for t in sampling(engine, "ByTrl")]
    sampled = [turn.completion_token_ids for t in trajectories for turn in t.turns]
    assert sampled == [template.encode(SAID[0])] * 4


async def test_a_sampler_gets_the_configuration_and_prompt_logprobs(
    engine: WorkerHandle, sampling: Callable[..., TrajectorySampler]
) -> None:
    """Those of the trainer's distribution, and what other loops record."""
    configured = {"min_p": 0.125, "top_p": 0.5, "prompt_logprobs": True}
    trajectories = [t async for t in sampling(engine, "ByTrl", **configured)]
    assert (PARAMS[-1].min_p, PARAMS[-1].top_p, PARAMS[-1].n) == (0.125, 0.5, 1)
    for trajectory in trajectories:
        (turn,) = trajectory.turns
        assert turn.added_logprobs is not None
        assert len(turn.added_logprobs) == len(turn.added_token_ids)


async def test_an_async_sampler_waits_in_a_thread(
    simulated: SimulatedEngine, sampling: Callable[..., TrajectorySampler]
) -> None:
    trajectories = [t async for t in sampling(simulated, "patient")]
    assert len(trajectories) == 4
    assert all(t.sampled_tokens for t in trajectories)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "hot",
            InputError,
            r"rollout.sampler: temperature=0.5 would make the tokens off-policy",
        ),
        ("too_few", InputError, r"too_few must return 4 RequestOutputs with one output each"),
        (
            "invented",
            StepError,
            r"4 sampler_silent: the sampler .*invented returned ids for p",
        ),
        ("broken", StepError, r"4 sampler_error: the sampler .*broken failed: KeyError: 'oops'"),
        ("no_such", InputError, r"rollout.sampler: .* has no no_such"),
        ("HERE", InputError, r"HERE must be a function \(llm, prompts, sampling_params\), or an"),
    ],
)
async def test_a_sampler_that_cannot_be_used_is_one_sentence(
    simulated: SimulatedEngine,
    sampling: Callable[..., TrajectorySampler],
    name: str,
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        _ = [t async for t in sampling(simulated, name)]


async def test_a_dead_engine_fails_the_batch_and_leaving_ends_requests(
    sampling: Callable[..., TrajectorySampler], tokenizer: Any
) -> None:
    """An engine that dies fails the batch; a sampler that is abandoned keeps no request."""
    CUT["ended"] = threading.Event()
    slow = Latency(prefill_token=0.0, step=0.01, step_request=0.0)
    llm = SimulatedEngine(vocab_size=len(tokenizer), latency=slow, mean_tokens=10**9)
    llm.hang()
    stream = aiter(sampling(llm, "endless"))
    first = asyncio.ensure_future(anext(stream))
    while await llm.num_in_flight() < 4:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    await stream.aclose()
    assert await asyncio.to_thread(CUT["ended"].wait, 60)
    while await llm.num_in_flight():
        await asyncio.sleep(0.01)
    dead = SimulatedEngine(vocab_size=len(tokenizer))
    dead.die()
    with pytest.raises(StepError, match="4 engine_error: engine is dead"):
        _ = [t async for t in sampling(dead, "endless")]


def test_the_key_of_a_sampler_is_its_loop(make_config: Callable[..., Config]) -> None:
    """It sets the loop; another loop, and a loop without it, are mistakes."""
    rollout = {"sampler": "a:b"}
    assert make_config(rollout=rollout).rollout.loop == "sampler"
    assert make_config(rollout={"sampler": "a.b"}).rollout.sampler == "a:b"
    for keys, said in (
        ({**rollout, "loop": "single_turn"}, "loop single_turn does not use sampler: set loop to"),
        ({"loop": "sampler"}, "loop sampler needs sampler: package.module:name, a RolloutSampler"),
        ({"sampler": "a"}, "sampler must be package.module:name, a RolloutSampler, not 'a'"),
    ):
        with pytest.raises(InputError, match=said):
            make_config(rollout=keys)


def test_a_masked_id_is_not_trained() -> None:
    """A mask of 0 on sampled ids makes them context, as a forced token is."""
    trajectory = Trajectory("p")
    turn = trajectory.add_turn([1, 2], [3, 4, 5, 6], [-0.1] * 4, [7, 7, 7, FORCED], "length")
    turn.streams["mask"] = np.array([1, 0, 1, 1], np.float32)
    assert (turn.finish_reason, turn.path_length) == ("length", 6)
    assert audit(trajectory).first_violation is None
    assert audit(trajectory).masked == {"not_chosen": 1}
    (sample,) = trajectory.samples()
    assert sample.token_ids == [1, 2, 3, 4, 5, 6]
    assert sample.response_mask == [0, 0, 1, 0, 1, 0]
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
