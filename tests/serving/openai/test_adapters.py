"""Several adapters beside the model, chosen by requests: exact for each, by every API."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.adapters import adapter_config, adapter_tensors, merged, write_adapter
from tests.serving.openai.test_server import fetched
from tests.weights.trainer import PROMPT, Model
from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Request, Route, generate
from turnwise.errors import InputError
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import audit

GREEDY = SamplingConfig(max_tokens=12, temperature=0.0, ignore_eos=True)
QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
RANKS = {"": 0, "polite": 4, "terse": 12}


@pytest.fixture(scope="module")
def adapters(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(
            folder / name,
            adapter_tensors(model_path, rank, seed=rank),
            adapter_config(model_path, rank),
        )
        for name, rank in RANKS.items()
        if rank
    }


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config], adapters: dict[str, str]) -> Config:
    return make_config(serving={"port": 0, "adapters": adapters})


@pytest.fixture(scope="module")
async def engine(ray_started: None, config: Config) -> AsyncIterator[WorkerHandle]:
    engine = await WorkerHandle.start(config, name="adapted")
    yield engine
    await engine.shutdown()


@pytest.fixture(scope="module")
async def server(config: Config, engine: WorkerHandle) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(config, engine)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(scope="module")
async def client(server: OpenAIServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def http(server: OpenAIServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as client:
        yield client


async def test_adapters_in_one_batch_sample_as_their_merged_models(
    engine: WorkerHandle, model_path: str
) -> None:
    completions = await asyncio.gather(
        *(
            generate(engine, Request(PROMPT, GREEDY, f"a-{n}", route=Route(adapter=n)))
            for n in RANKS
        )
    )
    model = Model(model_path)
    for (name, rank), completion in zip(RANKS.items(), completions, strict=True):
        if rank:
            tensors = adapter_tensors(model_path, rank, seed=rank)
            model.take(merged(model.original, tensors, adapter_config(model_path, rank)))
        assert completion.token_ids == model.greedy(PROMPT, 12), name
    assert len({tuple(c.token_ids) for c in completions}) == 3


async def test_log_probs_are_those_of_the_merged_model(
    engine: WorkerHandle, model_path: str
) -> None:
    sampling = SamplingConfig(max_tokens=32, ignore_eos=True)
    model, worst = Model(model_path), {}
    for name, rank in RANKS.items():
        completion = await generate(
            engine, Request(PROMPT, sampling, f"l-{name}", route=Route(adapter=name))
        )
        if rank:
            tensors = adapter_tensors(model_path, rank, seed=rank)
            model.take(merged(model.original, tensors, adapter_config(model_path, rank)))
        expected = model.logprobs(PROMPT + completion.token_ids, len(PROMPT))
        pairs = zip(completion.logprobs, expected, strict=True)
        worst[name] = max(abs(a - b) for a, b in pairs)
    assert max(worst.values()) < 1e-4, worst


async def test_no_request_reads_what_another_adapter_cached(engine: WorkerHandle) -> None:
    prompt = [7, *PROMPT * 3]
    cached = []
    for turn, name in enumerate(["", "polite", "terse", "polite"]):
        completion = await generate(
            engine, Request(prompt, GREEDY, f"c-{turn}", route=Route(adapter=name))
        )
        cached.append(completion.cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] >= 96


async def test_an_unknown_adapter_is_refused_by_the_engine(engine: WorkerHandle) -> None:
    with pytest.raises(InputError, match=r"no adapter 'rude' \(this engine has: polite, ters"):
        await generate(engine, Request(PROMPT, GREEDY, "u-1", route=Route(adapter="rude")))


async def ask(server: OpenAIServer, client: AsyncOpenAI, api: str, model: str) -> tuple[str, str]:
    """Ask by one of the APIs; return the text and the model that the answer names."""
    if api == "chat":
        chat = await client.chat.completions.create(
            model=model,
            messages=[QUESTION],
            temperature=0,  # type: ignore[list-item]
        )
        return str(chat.choices[0].message.content), chat.model
    if api == "completions":
        made = await client.completions.create(model=model, prompt=PROMPT, temperature=0)
        return made.choices[0].text, made.model
    if api == "responses":
        response = await client.responses.create(
            model=model, input=str(QUESTION["content"]), temperature=0
        )
        return response.output_text, str(response.model)
    import anthropic  # seconds

    base_url = server.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as other:
        message = await other.messages.create(
            model=model,
            messages=[QUESTION],  # type: ignore[list-item]
            max_tokens=16,
            extra_body={"temperature": 0},
        )
        return "".join(getattr(block, "text", "") for block in message.content), message.model


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages"])
async def test_requests_choose_an_adapter_by_their_model(
    server: OpenAIServer, client: AsyncOpenAI, api: str
) -> None:
    """By `serving.adapters`."""
    answers = [
        await ask(server, client, api, name) for name in (server.model_name, "polite", "terse")
    ]
    assert [model for _, model in answers] == [server.model_name, "polite", "terse"]
    assert len({text for text, _ in answers}) == 3
    refused: tuple[type[Exception], ...] = (NotFoundError,)
    if api == "messages":
        import anthropic  # seconds

        refused = (anthropic.NotFoundError,)
    with pytest.raises(refused, match="`rude` does not exist"):
        await ask(server, client, api, "rude")


async def test_models_are_listed_with_their_base(
    server: OpenAIServer, client: AsyncOpenAI, adapters: dict[str, str]
) -> None:
    listed = {model.id: model.to_dict() for model in (await client.models.list()).data}
    assert listed["polite"]["parent"] == listed["terse"]["parent"] == server.model_name
    assert {"polite", "terse", server.model_name} <= listed.keys()


async def test_a_session_keeps_its_adapter_and_its_turns_record_it(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    opened = (await http.post("/sessions", json={"id": "kept"})).json()
    url, messages = f"{opened['base_url']}/chat/completions", [QUESTION]
    for model in ("terse", None, server.model_name):
        asked = {"messages": messages, "max_tokens": 8} | ({"model": model} if model else {})
        answer = (await http.post(url, json=asked)).json()
        messages = [*messages, answer["choices"][0]["message"], QUESTION]
    trajectory = await fetched(http, "kept")
    assert [turn.adapter for turn in trajectory.turns] == ["terse", "terse", ""]
    assert len(trajectory.branches()) == 1
    assert audit(trajectory).violations == 0


async def test_a_training_session_is_sampled_by_the_policy_alone(
    http: httpx.AsyncClient, server: OpenAIServer
) -> None:
    opened = (await http.post("/sessions", json={"id": "trained", "training": True})).json()
    url = f"{opened['base_url']}/chat/completions"
    refused = await http.post(url, json={"messages": [QUESTION], "model": "polite"})
    assert refused.status_code == 400
    assert "model='polite' would make the tokens of this training session" in refused.text
    kept = await http.post(url, json={"messages": [QUESTION], "model": server.model_name})
    assert kept.status_code == 200


@pytest.mark.slow
async def test_an_adapter_of_another_model_is_refused_at_the_start(
    ray_started: None,
    make_config: Callable[..., Config],
    model_path: str,
    tmp_path: Path,
) -> None:
    tensors = adapter_tensors(model_path, 4)
    name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
    tensors[name] = tensors[name][:-8].clone()
    path = write_adapter(tmp_path / "other", tensors, adapter_config(model_path, 4))
    with pytest.raises(InputError, match=r"adapters.other: .* does not fit the model: .*->"):
        await WorkerHandle.start(make_config(serving={"adapters": {"other": path}}), name="w")


@pytest.mark.slow
async def test_an_adapter_folder_samples_on_top_of_its_base_model(
    ray_started: None,
    make_config: Callable[..., Config],
    adapters: dict[str, str],
    model_path: str,
) -> None:
    rank = RANKS["terse"]
    model = Model(model_path)
    tensors = adapter_tensors(model_path, rank, seed=rank)
    model.take(merged(model.original, tensors, adapter_config(model_path, rank)))
    config = make_config(model={"path": adapters["terse"], "max_length": 512})
    engine = await WorkerHandle.start(config, name="policy")
    try:
        completion = await generate(engine, Request(PROMPT, GREEDY, "e-1"))
    finally:
        await engine.shutdown()
    assert completion.token_ids == model.greedy(PROMPT, 12)
    assert set(completion.weight_versions) == {0}


def test_training_refuses_adapters_that_do_not_fit_its_updates(
    make_config: Callable[..., Config], adapters: dict[str, str]
) -> None:
    from turnwise.run.checks import check_adapters

    with pytest.raises(InputError, match=r"serving.adapters: training replaces the weights"):
        check_adapters(make_config(serving={"adapters": adapters}))
    with pytest.raises(InputError, match=r"model.adapter: training does not start from an adapter"):
        check_adapters(make_config(model={"path": adapters["terse"]}))
