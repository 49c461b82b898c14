"""The worker's own methods, called as a trainer of another system would call them."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import fastapi
import httpx
import psutil
import pytest
import ray
import torch
import uvicorn

from tests.simulated import SimulatedEngine
from turnwise.compat.nemo_rl import VllmAsyncGenerationWorker
from turnwise.compat.nemo_rl.worker import worker_config
from turnwise.config import Config, SamplingConfig
from turnwise.engine import Request, generate
from turnwise.engine.protocol import Chunk, Occupancy
from turnwise.errors import InputError
from turnwise.internals import vllm_server
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7], [11] * 500]


def batch(**more: Any) -> dict[str, Any]:
    width = max(map(len, PROMPTS))
    rows = [prompt + [0] * (width - len(prompt)) for prompt in PROMPTS]
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    return {"input_ids": torch.tensor(rows), "input_lengths": lengths, **more}


async def collected(stream: Any) -> dict[int, dict[str, Any]]:
    return dict([await reply async for reply in stream])


async def test_a_batch_comes_back_row_by_row_and_aligned(engine: WorkerHandle) -> None:
    outputs = await collected(engine.actor.generate_async.remote(batch()))
    assert sorted(outputs) == [0, 1, 2]
    for index, prompt in enumerate(PROMPTS):
        output = outputs[index]
        count, end = int(output["generation_lengths"]), int(output["unpadded_sequence_lengths"])
        assert end == len(prompt) + count
        assert output["output_ids"].shape == output["logprobs"].shape == (1, end)
        assert output["output_ids"][0, : len(prompt)].tolist() == prompt
        assert not output["logprobs"][0, : len(prompt)].any()
        assert (output["logprobs"][0, len(prompt) : end] < 0).all()
        versions = output["weight_versions"][0]
        assert (versions[len(prompt) : end] == 0).all()
        assert (versions[: len(prompt)] == -1).all()
        assert count <= (12 if index == 2 else 16)


async def test_greedy_repeats_itself(engine: WorkerHandle) -> None:
    first = await collected(engine.actor.generate_async.remote(batch(), greedy=True))
    second = await collected(engine.actor.generate_async.remote(batch(), greedy=True))
    for index in range(3):
        assert torch.equal(first[index]["output_ids"], second[index]["output_ids"])


class Held:
    """An engine whose requests end when a test says so."""

    def __init__(self, count: int = 1) -> None:
        self.ready = [asyncio.Event() for _ in range(count)]
        """An event for each request, in the order in which they come."""
        self.asked: list[Request] = []

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        ready = self.ready[len(self.asked)]
        self.asked.append(request)
        await ready.wait()
        yield Chunk([7, 8], [-0.5, -0.5], [3, 3], "stop")


def held(config: Config, engine: Held) -> VllmAsyncGenerationWorker:
    worker = VllmAsyncGenerationWorker(config)
    worker._engine = engine  # type: ignore[assignment]
    return worker


@pytest.mark.parametrize("texts", [False, True], ids=["ids", "texts"])
async def test_rows_are_yielded_as_they_are_ready(
    make_config: Callable[..., Config], texts: bool
) -> None:
    """The engine still samples the other rows. As with `async_engine`."""
    engine = Held(3)
    worker = held(make_config(), engine)
    rows: AsyncIterator[tuple[int, Any]] = (
        worker.generate_text_async({"prompts": ["one", "two", "three"]})
        if texts
        else worker.generate_async(batch())
    )
    for expected in (2, 0, 1):
        engine.ready[expected].set()
        async with asyncio.timeout(60):
            index, _ = await anext(rows)
        assert index == expected
    assert await anext(rows, None) is None


async def test_texts_begin_with_the_bos_and_need_no_template(
    make_config: Callable[..., Config], model_path: str, bare: Any, bare_path: str
) -> None:
    engine = Held()
    engine.ready[0].set()
    model = {"path": model_path, "tokenizer": bare_path, "max_length": 512}
    worker = held(make_config(model=model), engine)
    rows = [row async for row in worker.generate_text_async({"prompts": ["2 + 2 ="]})]
    assert bare.chat_template is None
    assert engine.asked[0].prompt == bare("2 + 2 =")["input_ids"]
    assert engine.asked[0].prompt.ids[0] == bare.bos_token_id
    row = {
        "texts": [bare.decode([7, 8])],
        "token_ids": [[7, 8]],
        "logprobs": [[-0.5, -0.5]],
        "truncated": [False],
    }
    assert rows == [(0, row)]


async def test_a_row_that_fails_spoils_no_other(engine: WorkerHandle) -> None:
    data = batch()
    data["input_ids"][1, 0] = 10**6  # no such token
    replies = [reply async for reply in engine.actor.generate_async.remote(data)]
    rows = [await reply for reply in replies[:2]]
    assert sorted(index for index, _ in rows) == [0, 2]
    with pytest.raises(ray.exceptions.RayTaskError, match=r"1 of 3 rows failed; row 1: .*refused"):
        await replies[2]


async def test_a_prompt_without_room_comes_back_as_it_is(engine: WorkerHandle) -> None:
    data = {"input_ids": torch.full((1, 512), 5), "input_lengths": torch.tensor([512])}
    outputs = await collected(engine.actor.generate_async.remote(data))
    assert torch.equal(outputs[0]["output_ids"], data["input_ids"])
    assert bool(outputs[0]["truncated"]) is False
    assert int(outputs[0]["generation_lengths"]) == 0


async def test_rows_have_their_own_width_and_the_type_of_their_ids(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[5, 6, pad], [5, 6, 7]], dtype=torch.int32)
    engine = Held(2)
    for ready in engine.ready:
        ready.set()
    data = {"input_ids": ids, "input_lengths": torch.tensor([2, 3])}
    rows = {index: row async for index, row in held(make_config(), engine).generate_async(data)}
    for index, prompt in enumerate(([5, 6], [5, 6, 7])):
        row = rows[index]
        assert row["output_ids"].dtype == torch.int32
        assert row["output_ids"].tolist() == [[*prompt, 7, 8]]
        assert row["logprobs"].tolist() == [[0.0] * len(prompt) + [-0.5, -0.5]]
        assert row["weight_versions"].tolist() == [[-1] * len(prompt) + [3, 3]]
        assert row["unpadded_sequence_lengths"].tolist() == [len(prompt) + 2]
    worker = held(make_config(), Held())
    wrong = {"input_ids": ids.flip(1), "input_lengths": torch.tensor([2, 3])}
    with pytest.raises(InputError, match=r"must be right-padded: .* comes 5, which is not"):
        await anext(worker.generate_async(wrong))
    nothing = {"input_ids": torch.zeros(0, 3), "input_lengths": torch.zeros(0)}
    assert [row async for row in worker.generate_async(nothing)] == []


async def test_the_first_call_starts_the_engine(make_config: Callable[..., Config]) -> None:
    worker = Asked(make_config())
    for call in (worker.report_device_id_async, worker.post_init_async):
        with pytest.raises(LookupError, match="model"):
            await call()


def test_a_dictionary_of_nemo_rl_is_a_workers_configuration() -> None:
    theirs = json.loads((Path(__file__).parents[1] / "other_systems.json").read_text())
    generation = theirs["NeMo-RL grpo_math_1B.yaml"]["policy"]["generation"]
    generation |= {"model_name": "m", "max_new_tokens": 64}
    generation["vllm_cfg"] |= {"max_model_len": 512, "precision": "bfloat16"}
    config = worker_config(generation)
    assert (config.model.path, config.model.max_length) == ("m", 512)
    assert (config.model.dtype, config.sampling.max_tokens) == ("bfloat16", 64)
    assert config.engine.vllm_args["gpu_memory_utilization"] == 0.6
    with pytest.raises(InputError, match="backend must be vllm, not sglang"):
        worker_config(generation | {"backend": "sglang"})


async def test_each_row_of_ids_has_its_own_stop_strings(
    engine: WorkerHandle, template: ChatTemplate
) -> None:
    prompt = [5, 6, 7, 8]
    data = {"input_ids": torch.tensor([prompt] * 2), "input_lengths": torch.tensor([4, 4])}
    whole = (await collected(engine.actor.generate_async.remote(data, greedy=True)))[0]
    count = int(whole["generation_lengths"])
    text = template.decode(whole["output_ids"][0, 4 : 4 + count].tolist())
    stops = {"stop_strings": [None, [text[2:4]]]}
    outputs = await collected(engine.actor.generate_async.remote(data | stops, greedy=True))
    assert int(outputs[0]["generation_lengths"]) == count
    assert int(outputs[1]["generation_lengths"]) < count
    assert bool(outputs[1]["truncated"]) is False


async def test_each_row_has_its_own_stop_strings(
    engine: WorkerHandle, template: ChatTemplate
) -> None:
    """Texts in, and of each row its text, ids and log-probs out."""
    prompts = ["What is 1 plus 2?"] * 2
    whole = await collected(engine.actor.generate_text_async.remote({"prompts": prompts[:1]}, True))
    (text,) = whole[0]["texts"]
    stop = text[2:4]
    data = {"prompts": prompts, "stop_strings": [[stop], None]}
    texts = await collected(engine.actor.generate_text_async.remote(data, greedy=True))
    assert texts[1]["texts"] == [text]
    assert text.startswith(texts[0]["texts"][0])
    assert stop in texts[0]["texts"][0]  # a stop string stays in the tokens
    assert len(texts[0]["token_ids"][0]) < len(texts[1]["token_ids"][0])
    for output in texts.values():
        assert len(output["logprobs"][0]) == len(output["token_ids"][0])


async def test_tensors_that_do_not_fit_are_refused(engine: WorkerHandle) -> None:
    for wrong, words in (
        ({"input_lengths": torch.tensor([6, 3])}, r"\[B, T\] and input_lengths \[B\]"),
        ({"input_lengths": torch.tensor([6, 0, 3])}, "between 1 and 500"),
        ({"input_lengths": [6, 3, 500]}, r"needs the tensors input_ids \[B, T\]"),
        ({"stop_strings": ["a", "b", "c"]}, "needs 3 lists of strings, one for each row"),
        ({"stop_strings": [["a"]]}, "needs 3 lists of strings, one for each row"),
    ):
        with pytest.raises(ray.exceptions.RayTaskError, match=words):
            await collected(engine.actor.generate_async.remote({**batch(), **wrong}))


async def test_prompts_that_are_no_list_are_refused(engine: WorkerHandle) -> None:
    for data in ({}, {"prompts": "one"}):
        with pytest.raises(ray.exceptions.RayTaskError, match="needs prompts, a list of texts"):
            await collected(engine.actor.generate_text_async.remote(data))


async def test_it_tells_where_it_is(engine: WorkerHandle) -> None:
    (device,) = await engine.actor.report_device_id_async.remote()
    assert psutil.pid_exists(int(device.rpartition("-")[2]))
    assert await engine.actor.report_dp_openai_server_base_url.remote() is None


async def test_a_health_check_tells_what_it_computes(engine: WorkerHandle) -> None:
    assert await engine.check_health() == Occupancy(0, 0, 0.0)
    long = SamplingConfig(max_tokens=400, ignore_eos=True)
    running = [
        asyncio.create_task(generate(engine, Request([5, 6, 7 + number], long, f"long-{number}")))
        for number in range(3)
    ]
    async with asyncio.timeout(60):
        while (now := await engine.check_health()) is None or now.running < 3:
            await asyncio.sleep(0.01)
    assert (now.running, now.waiting) == (3, 0)
    assert 0.0 < now.cache < 1.0
    await asyncio.gather(*running)
    assert await engine.check_health() == Occupancy(0, 0, 0.0)


async def test_sleep_stops_it_and_the_last_tag_wakes_it(engine: WorkerHandle) -> None:
    """What a CPU can show of them; there is no memory that it gives back."""
    sampling = SamplingConfig(max_tokens=4, ignore_eos=True)
    prompt = [i % 300 for i in range(100)]
    await generate(engine, Request(prompt, sampling, "before"))
    assert (await generate(engine, Request(prompt, sampling, "again"))).cached_tokens > 0
    await engine.actor.sleep_async.remote()
    asleep = asyncio.create_task(generate(engine, Request(prompt, sampling, "asleep")))
    assert not (await asyncio.wait([asleep], timeout=0.5))[0]
    with pytest.raises(InputError, match="takes the tags weights and kv_cache, not kvcache"):
        await engine.wake_up(["kvcache"])
    await engine.actor.wake_up_async.remote(tags=["weights"])
    assert not (await asyncio.wait([asleep], timeout=0.5))[0], "its cache still sleeps"
    await engine.actor.wake_up_async.remote(tags=["kv_cache"])
    completion = await asleep
    assert (len(completion.token_ids), completion.cached_tokens) == (4, 0)
    await engine.actor.reset_prefix_cache_async.remote()
    assert (await generate(engine, Request(prompt, sampling, "reset"))).cached_tokens == 0


class Asked(VllmAsyncGenerationWorker):
    """Says which arguments it was given instead of starting vLLM."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        raise LookupError(llm_kwargs)


@pytest.mark.parametrize("extra", [{}, {"gpu_memory_utilization": 0.8}])
async def test_a_share_of_a_gpu_is_a_share_of_its_memory(
    make_config: Callable[..., Config], extra: dict[str, float]
) -> None:
    """`post_init_async` gives it to the engine that it starts."""
    worker = Asked(make_config(engine={"vllm_args": extra}), fraction_of_gpus=0.25)
    with pytest.raises(LookupError) as asked:
        await worker.post_init_async()
    memory = asked.value.args[0]["gpu_memory_utilization"]
    assert memory == pytest.approx(0.25 * extra.get("gpu_memory_utilization", 0.9))


@pytest.mark.parametrize(("seed", "expected"), [(7, 7), (None, 3)])
async def test_the_seed_is_the_engines(
    make_config: Callable[..., Config], seed: int | None, expected: int
) -> None:
    """Of `VllmAsyncGenerationWorker(config, bundle_indices, fraction_of_gpus, seed)`."""
    worker = Asked(make_config(seed=3), None, 1.0, seed)
    with pytest.raises(LookupError) as asked:
        await worker.post_init_async()
    assert asked.value.args[0]["seed"] == expected


class Ported(VllmAsyncGenerationWorker):
    """A subclass as somebody wrote it for NeMo-RL."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        llm_kwargs["max_model_len"] = 128
        super()._create_engine(llm_kwargs)

    def _setup_vllm_server(self) -> Any:
        thread, base_url, server = super()._setup_vllm_server()
        self.published = thread.is_alive(), base_url, server
        return thread, base_url, server

    def _setup_vllm_openai_api_server(self, app: fastapi.FastAPI) -> fastapi.FastAPI:
        app = super()._setup_vllm_openai_api_server(app)

        @app.get("/mine")
        def mine() -> dict[str, str]:
            return {"thread": threading.current_thread().name}

        @app.middleware("http")
        async def marked(request: fastapi.Request, call_next: Any) -> Any:
            response = await call_next(request)
            response.headers["x-path"] = request.url.path
            return response

        return app

    async def context(self) -> int:
        assert self.llm is not None
        return int(self.llm.model_config.max_model_len)

    async def server(self) -> tuple[bool, str, bool, bool]:
        alive, base_url, server = self.published
        return alive, base_url, isinstance(server, uvicorn.Server), server is self.http_server

    async def has_ended(self) -> bool:
        assert self.server_thread is not None
        self.server_thread.join(30)
        return not self.server_thread.is_alive()


@pytest.fixture(scope="module")
async def ported(
    ray_started: None, make_config: Callable[..., Config]
) -> AsyncIterator[WorkerHandle]:
    config = make_config(serving={"worker_servers": True, "port": 0})
    worker = await WorkerHandle.start(config, name="worker-9", host=Ported)
    yield worker
    await worker.shutdown()


@pytest.fixture
async def http(ported: WorkerHandle) -> AsyncIterator[httpx.AsyncClient]:
    assert ported.base_url is not None
    # Without a proxy's settings: the address is not a loopback one.
    async with httpx.AsyncClient(base_url=ported.base_url, timeout=120, trust_env=False) as client:
        yield client


async def test_create_engine_may_edit_vllms_arguments(ported: WorkerHandle) -> None:
    """`_create_engine(llm_kwargs)` of the subclass."""
    assert await ported.actor.context.remote() == 128


async def test_setup_vllm_server_returns_what_is_published(ported: WorkerHandle) -> None:
    """`_setup_vllm_server`: a thread, the base URL, and uvicorn's server."""
    assert await ported.actor.server.remote() == (True, ported.base_url, True, True)


async def test_a_subclass_adds_routes_and_middleware(http: httpx.AsyncClient) -> None:
    """By `_setup_vllm_openai_api_server`. Middleware sees chats too, which do not pass through
    vLLM's application."""
    root = str(http.base_url).removesuffix("/v1/")
    answer = await http.get(f"{root}/mine")
    assert answer.headers["x-path"] == "/mine"
    assert answer.json()["thread"].startswith("AnyIO"), "a plain function blocks nobody"
    chat = {"model": "any", "messages": [{"role": "user", "content": "1"}], "max_tokens": 2}
    answer = await http.post("/chat/completions", json=chat)
    assert answer.status_code == 200
    assert answer.headers["x-path"] == "/v1/chat/completions"
    assert (await http.get("/nothing")).headers["x-path"] == "/v1/nothing"


async def test_an_application_that_is_not_returned_is_an_error(
    make_config: Callable[..., Config],
) -> None:
    def forgetful(app: fastapi.FastAPI) -> Any:
        return None

    server = OpenAIServer(make_config(), SimulatedEngine(), extend=forgetful)
    with pytest.raises(InputError, match="must return the application, not NoneType"):
        await server.application()


async def test_other_nodes_reach_a_workers_server(
    ported: WorkerHandle, http: httpx.AsyncClient, make_config: Callable[..., Config]
) -> None:
    """It listens on the address by which Ray's nodes reach its node, or on the given one."""
    assert http.base_url.host == ray.util.get_node_ip_address()
    assert (await http.get("/models")).status_code == 200
    assert await ported.actor.report_dp_openai_server_base_url.remote() == ported.base_url
    given = make_config(serving={"worker_servers": True, "host": "127.0.0.1"})
    assert VllmAsyncGenerationWorker(given)._server_config().serving.host == "127.0.0.1"


async def test_a_worker_can_serve_by_itself(ported: WorkerHandle, http: httpx.AsyncClient) -> None:
    """By `serving.worker_servers`, NeMo-RL's `expose_http_server`; the last of these tests, because
    it shuts it down."""
    model = (await http.get("/models")).json()["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
    answer = (await http.post("/completions", json=body)).json()
    told = (await http.get(str(http.base_url).removesuffix("/v1/") + "/metrics")).text
    assert "vllm:generation_tokens_total{" in told, "a server of its own keeps statistics"
    assert answer["usage"]["prompt_tokens"] == 3
    assert await ported.actor.shutdown.remote() is True
    assert await ported.actor.has_ended.remote()


async def test_the_worker_actor_answers_chats_with_status_and_data(
    engine: WorkerHandle,
) -> None:
    """As by verl's server actor: whole, streamed, and refused; requests are vLLM's or plain."""
    question = [{"role": "user", "content": "What is 12 plus 30?"}]

    async def asked(request: Any) -> list[tuple[int, str]]:
        made = engine.actor.chat_completion_generator.remote(request)
        events = [await reply async for reply in made]
        assert all(data.startswith("data: ") and data.endswith("\n\n") for _, data in events)
        return [(status, data.removeprefix("data: ").rstrip()) for status, data in events]

    request = vllm_server.ChatCompletionRequest(
        model="any/name", messages=question, max_tokens=4, stream=False
    )
    ((status, data),) = await asked(request)
    assert status == 200
    choice = json.loads(data)["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert 0 < len(choice["token_ids"]) <= 4

    *chunks, (status, last) = await asked({"messages": question, "max_tokens": 4, "stream": True})
    assert (status, last) == (200, "[DONE]")
    assert {status for status, _ in chunks} == {200}
    deltas = [json.loads(data)["choices"][0] for _, data in chunks]
    assert len(deltas) > 1
    assert deltas[-1]["finish_reason"] in ("length", "stop")

    for wrong, words in (
        ({"messages": question, "temperature": -1}, "temperature"),
        ({"messages": question, "no_such_key": 1}, "no key no_such_key"),
    ):
        for stream in (False, True):
            ((status, data),) = await asked({**wrong, "stream": stream})
            assert status == 400
            error = json.loads(data)["error"]
            assert error["code"] == 400
            assert words in error["message"]
