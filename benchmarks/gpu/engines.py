"""Lines that need vLLM: one engine beside a trainer, and whole runs."""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from benchmarks.gpu.device import GIB, Place, require
from benchmarks.gpu.training import configuration, make_rank, samples, take_step
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Completion, Engine, Request, generate
from turnwise.training import Sample
from turnwise.training.batching import plan_micro_batches
from turnwise.training.rank import TrainerRank
from turnwise.trajectory import Prompt
from turnwise.weights import WORKER_EXTENSION
from turnwise.weights.sync import check_canary
from turnwise.weights.transport import make_sender

PROMPT = 32


def engine(place: Place) -> Iterator[str]:
    """One engine in this process, and a trainer of the same model beside it."""
    with asyncio.Runner() as runner:
        steps = _engine(place)
        while (figure := runner.run(anext(steps, None))) is not None:
            yield figure


async def _engine(place: Place) -> AsyncIterator[str]:
    from turnwise.engine.vllm_engine import VllmEngine

    _environment()
    used = place.used()
    config = configuration(
        place,
        model={"max_length": 1024},
        engine={} if place.gpu else {"kv_cache_gib": 0.0625},
        serving={"port": 0},
        training={"learning_rate": 1e-3},
    )
    settings = config.engine
    if place.gpu:
        settings = settings.model_copy(update={"vllm_args": {"gpu_memory_utilization": 0.4}})
    llm = VllmEngine(config.model, settings, worker_extension=WORKER_EXTENSION)
    try:
        sampling = SamplingConfig(max_tokens=place.size(128, 8), ignore_eos=True)
        prompts = [[(7 * n + i) % 500 + 2 for i in range(PROMPT)] for n in range(place.size(64, 4))]

        async def sample(name: str) -> list[Completion]:
            asked = (
                generate(llm, Request(Prompt(p), sampling, f"{name}-{n}"))
                for n, p in enumerate(prompts)
            )
            return await asyncio.gather(*asked)

        await sample("warm")
        clock = asyncio.get_running_loop().time
        started = clock()
        completions = await sample("timed")
        tokens = sum(len(c.token_ids) for c in completions)
        yield f"{tokens / (clock() - started):,.0f} tokens/s, {len(prompts)} requests"

        rank = make_rank(place, config)
        differences = _differences(rank, prompts, completions)
        mean, largest = float(differences.mean()), float(differences.max())
        require(mean < 0.02 and largest < 0.2, f"mean {mean:.2g}, largest {largest:.2g}")
        yield f"mean {mean:.2g}, largest {largest:.2g}"

        expected = {name: (t.shape, rank._scorer.dtype) for name, t in rank._sent()}
        await llm.prepare_refit_info(expected)
        for transport in ("ipc", "disk"):
            take_step(rank, samples(place))
            started = clock()
            figure = await _update(place, llm, rank, transport)
            yield f"{clock() - started:.2f} s, {figure}"

        greedy = SamplingConfig(max_tokens=8, temperature=0.0, ignore_eos=True)
        before = await generate(llm, Request(Prompt(prompts[0]), greedy, "before"))
        awake = place.used()
        await llm.sleep()
        freed = awake - place.used()
        await llm.wake_up()
        after = await generate(llm, Request(Prompt(prompts[0]), greedy, "after"))
        require(after.token_ids == before.token_ids, "other tokens after a sleep")
        took = awake - used
        require(not place.gpu or freed > 0.5 * took, f"{freed} bytes are free of {took}")
        yield f"{freed / GIB:.1f} GiB free" if place.gpu else "a CPU's engine keeps its memory"

        yield await _served(config, llm, prompts[0])
    finally:
        await llm.shutdown()


def _environment() -> None:
    os.environ.update(VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
    if not torch.cuda.is_available():
        os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


def _differences(
    rank: TrainerRank, prompts: list[list[int]], completions: list[Completion]
) -> torch.Tensor:
    """Return the distances of the engine's log-probs from the trainer's."""
    made = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        new = len(completion.token_ids)
        mask = [0] * len(prompt) + [1] * new
        ids, zeros = [*prompt, *completion.token_ids], [0.0] * len(mask)
        made.append(Sample.of(ids, mask, zeros, [m - 1 for m in mask], 1.0, number))
    ((share,),) = plan_micro_batches(made, 1, 1, 8192, rank.layouts)
    scored = dict(rank.forward("policy", share))
    ours = torch.tensor([value for number in sorted(scored) for value in scored[number]])
    return (ours - torch.tensor([v for c in completions for v in c.logprobs])).abs()


async def _update(place: Place, llm: Engine, rank: TrainerRank, transport: str) -> str:
    """Update the engine's weights to the trainer's; return the canary's difference."""
    rank._sender = make_sender(
        transport,
        rank._sent(),
        rank._scorer.dtype,
        device=place.device,
        folder=place.folder / "weights",
        timeout=60.0,
    )
    try:
        published = rank.publish()
        devices = await llm.check_update(published)
        sending = asyncio.to_thread(rank.send, devices)
        await asyncio.gather(sending, llm.update_weights(published, "keep", 60.0))
        mean, largest = await check_canary(
            llm, published.prompt, published.logprobs, 0.2, published.version
        )
    finally:
        rank._sender.close()
    return f"canary off by {mean:.2g} on average, {largest:.2g} at most"


async def _served(config: Config, llm: Engine, prompt: list[int]) -> str:
    """Answer a request over HTTP."""
    from turnwise.serving.openai.server import OpenAIServer

    server = OpenAIServer(config, llm, port=0)
    url = await server.start()
    try:
        body = {"model": server.model_name, "prompt": prompt, "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer none"},
        )
        answer = await asyncio.to_thread(
            lambda: json.loads(urllib.request.urlopen(request, timeout=60).read())
        )
        used = answer["usage"]
        require(used["prompt_tokens"] == len(prompt), f"the usage is {used}")
        return f"{used['completion_tokens']} tokens over HTTP"
    finally:
        await server.stop()


def apart(place: Place) -> Iterator[str]:
    """Train the example's model for two steps, with an engine in a process of its own."""
    yield _run(place, "apart", {})


def colocated(place: Place) -> Iterator[str]:
    """Train it with the engine in the trainer's process; the trainer's tensors are offloaded."""
    yield _run(place, "colocated", {"colocated": True, "offload": ["params", "optimizer"]})


def _run(place: Place, name: str, training: dict[str, Any]) -> str:
    import turnwise
    from examples.calculator.prepare import prepare

    prepare(place.folder / "data", train=32, heldout=8)
    vllm_args = {"gpu_memory_utilization": 0.3} if place.gpu else {}
    result = turnwise.train(
        config={
            "name": name,
            "output_dir": str(place.folder / "runs"),
            "environment": "examples.calculator.environment:Calculator",
            "model": {
                "path": str(place.folder / "data" / "model"),
                "dtype": "bfloat16" if place.gpu else "float32",
                "max_length": 1024,
            },
            "data": {"path": str(place.folder / "data" / "train.jsonl")},
            "rollout": {"prompts_per_step": 8},
            "sampling": {"n": 8, "max_tokens": 48},
            "engine": {"kv_cache_gib": 0.25, "vllm_args": vllm_args},
            "training": {"steps": 2, "learning_rate": 1e-4, **training},
        },
        progress=False,
    )
    trained = [step for step in result.metrics if step.get("logprob_diff_mean") is not None]
    require(trained, "no step had a group with different rewards")
    last = trained[-1]
    require(result.exactness.violations == 0, f"violations: {result.exactness}")
    speed, canary = last["rollout_tokens_per_s"], last["canary_diff_max"]
    figure = f"{speed:,.0f} tokens/s, canary off by {canary:.2g}, "
    return f"{figure}engine and trainer by {last['logprob_diff_mean']:.2g}"
