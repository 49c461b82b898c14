"""The real vLLM engine, in its own process, through `WorkerHandle`."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.plain_scoring import token_logprobs
from tests.serving.test_fleet import engine_process
from turnwise.config import Config, SamplingConfig
from turnwise.engine import Completion, Request, generate
from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError
from turnwise.serving.channel import ChannelError
from turnwise.serving.worker_handle import WorkerHandle

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def reference(model_path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def reference_logprobs(model: Any, completion: Completion, sampling: SamplingConfig) -> list[float]:
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, len(PROMPT) :] = True
    with torch.no_grad():
        values: list[float] = token_logprobs(model, ids, mask, sampling).tolist()
    return values


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_tokens=24),
        SamplingConfig(max_tokens=24, temperature=0.7),
        SamplingConfig(max_tokens=24, temperature=1.3, top_k=5),
        SamplingConfig(max_tokens=24, top_p=0.6),
        SamplingConfig(max_tokens=24, min_p=0.2),
        SamplingConfig(max_tokens=24, temperature=0.8, top_k=50, top_p=0.7, min_p=0.05),
        SamplingConfig(max_tokens=24, temperature=0.004),
        SamplingConfig(max_tokens=24, temperature=0.0, top_k=3, top_p=0.5),
    ],
    ids=["plain", "cold", "hot-top-k", "top-p", "min-p", "all", "coldest", "greedy"],
)
async def test_logprobs_are_those_that_the_trainer_computes(
    engine: WorkerHandle, reference: Any, sampling: SamplingConfig
) -> None:
    """The engine is the section `engine`, in verl `rollout.name=vllm`."""
    before = time.time()
    completion = await generate(engine, Request(PROMPT, sampling, "logprobs"))
    assert completion.queued is None
    assert completion.first_token_at is not None
    assert before < completion.first_token_at < time.time()
    expected = reference_logprobs(reference, completion, sampling)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert completion.weight_versions == [0] * len(completion.token_ids)


async def test_greedy_takes_the_most_likely_token(engine: WorkerHandle, reference: Any) -> None:
    sampling = SamplingConfig(temperature=0, max_tokens=8)
    completion = await generate(engine, Request(PROMPT, sampling, "greedy"))
    ids = list(PROMPT)
    with torch.no_grad():
        for token in completion.token_ids:
            assert int(reference(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


async def test_prompt_logprobs_come_on_request(engine: WorkerHandle, reference: Any) -> None:
    plain = await generate(engine, Request(PROMPT, SamplingConfig(max_tokens=1), "without"))
    assert plain.prompt_logprobs is None
    scored = await generate(
        engine, Request(PROMPT, SamplingConfig(max_tokens=1, prompt_logprobs=True), "with")
    )
    assert scored.prompt_logprobs is not None
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        expected = token_logprobs(reference, ids, mask, SamplingConfig()).tolist()
    assert scored.prompt_logprobs[0] is None
    assert scored.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


async def test_limits_are_kept(engine: WorkerHandle, tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    with_end, without = [7, 8, eos, 9, 10, 11], [7, 8, 11, 10, 9, 12]

    async def finish(said: list[int] = with_end, **changes: Any) -> Completion:
        script = {"script": [said]}
        sampling = SamplingConfig(max_tokens=6, logits_processor_args=script, **changes)
        return await generate(engine, Request(PROMPT, sampling, f"limits-{changes}"))

    stopped = await finish()
    assert (stopped.token_ids, stopped.finish_reason) == ([7, 8, eos], "stop")
    ignored = await finish(ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ([7, 8, eos, 9, 10, 11], "length")
    by_id = await finish(stop_token_ids=[8])
    assert (by_id.token_ids, by_id.finish_reason) == ([7, 8], "stop")
    stop = [tokenizer.decode([8])]
    assert (await finish(without, stop=stop)).token_ids == [7, 8]
    at_least = await finish(without, stop=stop, min_tokens=5)
    assert at_least.token_ids[:5] == without[:5]
    # A forced end that min_tokens bans leaves no token, which is an error and no sample.
    with pytest.raises(TrajectoryError, match="no token has a probability"):
        await finish(min_tokens=5)


async def test_a_stop_string_ends_the_turn_and_stays_in_it(
    engine: WorkerHandle, tokenizer: Any
) -> None:
    ids = tokenizer.encode("one <tool_call>x</tool_call> more", add_special_tokens=False)
    sampling = SamplingConfig(stop=["</tool_call>"], logits_processor_args={"script": [ids]})
    completion = await generate(engine, Request(PROMPT, sampling, "stop-string"))
    assert completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids) == "one <tool_call>x</tool_call>"


async def test_a_seed_repeats_a_request_among_others(engine: WorkerHandle) -> None:
    sampling = SamplingConfig(max_tokens=16)
    alone = await generate(engine, Request(PROMPT, sampling, "seed-alone", 7))
    crowd = await asyncio.gather(
        *(
            generate(engine, Request(PROMPT, sampling, f"seed-{i}", seed))
            for i, seed in enumerate([7, 8, 9])
        )
    )
    assert crowd[0].token_ids == alone.token_ids
    assert len({tuple(c.token_ids) for c in crowd}) == 3


async def test_a_shared_prefix_is_computed_once(engine: WorkerHandle) -> None:
    prompt = [i % 300 for i in range(200)]
    await generate(engine, Request(prompt, SamplingConfig(max_tokens=1), "prefix-1"))
    again = await generate(engine, Request(prompt, SamplingConfig(max_tokens=1), "prefix-2"))
    assert again.cached_tokens >= 160
    await engine.reset_prefix_cache()
    fresh = await generate(engine, Request(prompt, SamplingConfig(max_tokens=1), "prefix-3"))
    assert fresh.cached_tokens == 0


async def begun(engine: WorkerHandle, request_id: str) -> asyncio.Task[Completion]:
    """A request of 400 tokens that the engine is computing, or has just computed."""
    sampling = SamplingConfig(max_tokens=400, ignore_eos=True)
    running = asyncio.create_task(generate(engine, Request(PROMPT, sampling, request_id)))
    while not (await engine.num_in_flight() or running.done()):
        await asyncio.sleep(0.01)
    return running


async def test_an_aborted_request_returns_what_it_has(engine: WorkerHandle) -> None:
    for attempt in range(20):  # an abort may come before the first token, or after the last one
        running = await begun(engine, f"to-abort-{attempt}")
        await asyncio.sleep(0.002 * attempt**2)
        await engine.pause("abort")
        await engine.resume()
        completion = await running
        assert len(completion.token_ids) == len(completion.logprobs)
        if completion.finish_reason == "abort" and completion.token_ids:
            assert len(completion.token_ids) < 400
            return
        assert len(completion.token_ids) in (0, 400)
    pytest.fail("no abort cut a request short")


async def test_a_cancelled_caller_frees_the_engine(engine: WorkerHandle) -> None:
    for attempt in range(20):
        running = await begun(engine, f"to-cancel-{attempt}")
        await engine.pause("keep")  # so that only the cancellation can end it
        try:
            computing = bool(await engine.num_in_flight())
            if running.cancel() and computing:
                with pytest.raises(asyncio.CancelledError):
                    await running
                async with asyncio.timeout(60):
                    while await engine.num_in_flight():
                        await asyncio.sleep(0.01)
                return
        finally:
            await engine.resume()
        await asyncio.wait([running])  # the pause came after its last token
    pytest.fail("no request was cancelled before its end")


async def test_a_pause_freezes_requests_and_a_resume_goes_on(engine: WorkerHandle) -> None:
    for attempt in range(20):
        running = await begun(engine, f"to-pause-{attempt}")
        await engine.pause("keep")
        done, _ = await asyncio.wait([running], timeout=0.5)
        computing = bool(await engine.num_in_flight())
        assert not (done and computing)
        await engine.resume()
        completion = await running
        assert len(completion.token_ids) == 400
        if computing:  # otherwise the pause came after its last token
            return
    pytest.fail("no pause froze a request")


async def test_a_pause_that_waits_lets_requests_finish(engine: WorkerHandle) -> None:
    running = await begun(engine, "to-finish")
    await engine.pause("wait")
    await engine.resume()
    assert len((await running).token_ids) == 400


async def test_sleep_and_wake_up_leave_the_engine_as_it_was(engine: WorkerHandle) -> None:
    sampling = SamplingConfig(temperature=0, max_tokens=8)
    before = await generate(engine, Request(PROMPT, sampling, "awake"))
    await engine.sleep()
    await engine.wake_up()
    await engine.check_health()
    after = await generate(engine, Request(PROMPT, sampling, "awake-again"))
    assert after.token_ids == before.token_ids


async def test_a_prompt_that_the_engine_refuses_is_a_sentence(engine: WorkerHandle) -> None:
    with pytest.raises(InputError, match="worker-0 refused too-long"):
        await generate(engine, Request([5] * 600, SamplingConfig(max_tokens=1), "too-long"))
    await engine.check_health()


def test_a_completion_without_a_logprob_is_an_error() -> None:
    with pytest.raises(EngineError, match="2 tokens with 1 log-probs"):
        Completion([1, 2], [-0.5], [0, 0], "stop")
    with pytest.raises(EngineError, match="weight versions for 1 of them"):
        Completion([1, 2], [-0.5, -0.5], [0], "stop")


async def test_a_model_that_vllm_cannot_serve_is_a_sentence(
    ray_started: None, make_config: Callable[..., Config]
) -> None:
    config = make_config(engine={"vllm_args": {"no_such_argument": 1}})
    with pytest.raises(InputError, match="no_such_argument"):
        await WorkerHandle.start(config)


async def test_progress_has_a_deadline_and_whole_requests_have_none(
    ray_started: None, make_config: Callable[..., Config]
) -> None:
    """Requests wait in the queue, and take, longer than request_timeout; an engine that
    samples nothing for so long is named, and so is one that died."""
    seconds = 2.5
    config = make_config(engine={"request_timeout": seconds, "max_num_seqs": 1})
    engine = await WorkerHandle.start(config, name="worker-7")
    endless = SamplingConfig(max_tokens=400, ignore_eos=True)
    try:
        started = time.monotonic()
        patient = [generate(engine, Request(PROMPT, endless, f"long-{n}")) for n in range(3)]
        paused = asyncio.create_task(engine.pause("keep"))
        ended = []
        for completion in asyncio.as_completed(patient):
            if paused is not None:
                await paused
                await asyncio.sleep(1.3 * seconds)  # nothing is expected of a paused engine
                await engine.resume()
                paused = None
            ended.append((await completion, time.monotonic() - started))
        assert [len(completion.token_ids) for completion, _ in ended] == [400] * 3
        assert ended[-1][1] > 1.3 * seconds
        core = (await engine_process(engine)).pid
        os.kill(core, signal.SIGSTOP)
        try:
            why = r"worker-7, with request slow waiting, sampled no token within 2\.5 s \(engine\."
            with pytest.raises(DeadlineError, match=why):
                await generate(engine, Request(PROMPT, endless, "slow"))
        finally:
            os.kill(core, signal.SIGCONT)
        await engine.pause("keep")  # so that "doomed" does not end before the engine does
        running = asyncio.create_task(generate(engine, Request(PROMPT, endless, "doomed")))
        async with asyncio.timeout(60):
            while not await engine.num_in_flight():
                await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the process of worker-7 died"):
            async with asyncio.timeout(60):
                await running
        with pytest.raises(EngineError, match="worker-7"):
            await engine.check_health()
    finally:
        await engine.shutdown()


async def test_calls_in_flight_fail_at_once_when_the_engine_dies(
    ray_started: None, make_config: Callable[..., Config]
) -> None:
    """vLLM never answers them: a weight update would wait for its deadline, and the run with it."""
    engine = await WorkerHandle.start(make_config(), name="worker-8")
    calls = (
        *(("pause", "keep"), ("pause", "wait"), ("resume",), ("sleep",), ("wake_up",)),
        *(("reset_prefix_cache",), ("check_health",), ("device_ids",)),
    )
    try:
        core = (await engine_process(engine)).pid
        os.kill(core, signal.SIGSTOP)
        running = [asyncio.create_task(engine._call(*call)) for call in calls]
        await asyncio.sleep(1.0)  # they are in flight, and cannot be answered
        assert not any(call.done() for call in running)
        os.kill(core, signal.SIGKILL)
        async with asyncio.timeout(60):  # half of request_timeout
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for call, outcome in zip(calls, outcomes, strict=True):
            assert isinstance(outcome, EngineError), (call, outcome)
            assert "worker-8 died during" in str(outcome)
    finally:
        await engine.shutdown()


async def test_an_engine_answers_over_a_new_channel_after_a_lost_one(
    engine: WorkerHandle,
) -> None:
    sampling = SamplingConfig(max_tokens=400, ignore_eos=True)
    running = asyncio.create_task(generate(engine, Request([5, 6, 7], sampling, "cut")))
    async with asyncio.timeout(120):
        while not await engine.num_in_flight():
            await asyncio.sleep(0.01)
        channel = engine._channel
        assert channel is not None
        assert channel._transport is not None
        channel._transport.abort()
        with pytest.raises(ChannelError, match="closed its channel"):
            await running
        while await engine.num_in_flight():  # nobody reads it any more
            await asyncio.sleep(0.01)
        await engine.check_health()
        assert engine._channel not in (None, channel)
        again = await generate(engine, Request([5, 6, 7], sampling, "again"))
    assert len(again.token_ids) == 400
