"""Plain callables as logits processors: of all requests, and of those that choose them."""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from tests.engine.callables import BANNED
from turnwise.config import Config, EngineConfig, ModelConfig, SamplingConfig, ServingConfig
from turnwise.engine import Request, generate, worker_extensions
from turnwise.engine.function_processor import FunctionProcessor
from turnwise.engine.logits_adapter import CallableProcessors, take_failure, take_forced
from turnwise.engine.logits_processors import EXTRA_ARG, SETTINGS, plain_calls
from turnwise.engine.vllm_start import engine_arguments
from turnwise.engine.worker_extensions import combined
from turnwise.errors import InputError, StepError, TrajectoryError, TurnwiseError
from turnwise.internals import vllm
from turnwise.rollouts.sampler import TrajectorySampler
from turnwise.serving.colocated.host import ActorPlacement
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.training.samples import make_samples
from turnwise.trajectory import FORCED, audit
from turnwise.weights import WORKER_EXTENSION

HERE = "tests.engine.callables"
PROMPT = [30, 31, 32, 33]


def named(name: str) -> str:
    return f"{HERE}:{name}"


def chosen(*names: Any, **options: Any) -> SamplingConfig:
    values = {"max_tokens": 8, "ignore_eos": True, **options}
    processors = [named(n) if isinstance(n, str) and ":" not in n else n for n in names]
    return SamplingConfig(**values, logits_processors=processors)


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config]) -> Config:
    return make_config(
        serving={"port": 0},
        engine={
            "logits_processors": ["tests.forced_tokens:ForcedTokens", named("ban")],
            "metrics": False,
            "logits_processors_allowed": rf"{HERE}:(?!secret)\w+".replace(".", r"\."),
            "vllm_args": {"worker_extension_cls": f"{HERE}.Counter"},
        },
    )


@pytest.fixture(scope="module")
async def worker(ray_started: None, config: Config) -> AsyncIterator[WorkerHandle]:
    worker = await WorkerHandle.start(config)
    yield worker
    await worker.shutdown()


@pytest.fixture(scope="module")
async def client(worker: WorkerHandle, config: Config) -> AsyncIterator[AsyncOpenAI]:
    server = OpenAIServer(config, worker)
    await server.start()
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client
    await server.stop()


async def test_without_statistics_an_engine_has_none_to_show(worker: WorkerHandle) -> None:
    """`engine.metrics: false` keeps vLLM from counting."""
    await generate(worker, Request(PROMPT, chosen(), "uncounted"))
    assert await worker.metrics() == []


async def test_an_engine_that_computes_a_long_step_is_healthy(worker: WorkerHandle) -> None:
    """A step of a large model on a CPU takes longer than a health check may."""
    slow = asyncio.create_task(generate(worker, Request(PROMPT, chosen("computes"), "slow")))
    async with asyncio.timeout(60):
        while not await worker.num_in_flight():
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):  # the step takes 12 s
        await worker.check_health()
    assert len((await slow).token_ids) == 8


def processed(model: Any, ids: list[int], banned: Callable[[int], Any]) -> torch.Tensor:
    """Log-probs [V] of the token after `ids`, without the banned ones."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].float()
    logits[[token for token in range(len(logits)) if banned(token)]] = -torch.inf
    return logits.log_softmax(-1)


async def test_callables_change_the_samples_and_their_logprobs(
    worker: WorkerHandle, model_path: str
) -> None:
    """`engine.logits_processors` and those of one request, with `(input_ids, scores)` or three
    parameters; a class, with a state for each request; log-probs."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    samplings = [chosen("even", max_tokens=24), chosen(max_tokens=24), chosen("repeat_prompt")]
    counting = [{"qualname": named("Count"), "args": [200], "kwargs": {"step": 3}}]
    samplings += [chosen(*counting), chosen("Count"), chosen("Count", "even", max_tokens=1)]
    completions = await asyncio.gather(  # in one batch: each row has its own
        *(generate(worker, Request(PROMPT, s, f"a5-{i}")) for i, s in enumerate(samplings))
    )
    even, plain, again, by_three, by_one, both = completions
    for completion, banned in ((even, lambda t: t % 2 or t == BANNED), (plain, BANNED.__eq__)):
        assert not any(banned(token) for token in completion.token_ids)
        ids = list(PROMPT)
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            expected = processed(model, ids, banned)[token]
            assert logprob == pytest.approx(float(expected), abs=1e-4)
            ids.append(token)
    assert any(token % 2 for token in plain.token_ids)
    assert again.token_ids == PROMPT * 2
    assert again.logprobs == [0.0] * 8
    assert by_three.token_ids == [200 + 3 * i for i in range(8)]
    assert by_three.weight_versions == [FORCED] * 8
    assert even.weight_versions == plain.weight_versions == [0] * 24
    assert by_one.token_ids == [100 + i for i in range(8)]
    assert both.token_ids == [100]


async def test_a_forced_result_stands_in_the_answer_and_is_not_trained(
    worker: WorkerHandle, config: Config, tokenizer: Any
) -> None:
    """`FunctionProcessor` on the real engine: the call and what follows are samples."""

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    call, rest = ids("Let me see. <call>add(30, 46)</call>"), ids(" It is 76.<|im_end|>")
    result = [*ids("<result>"), *ids("76"), *ids("</result>")]
    script = [*call, *[1] * len(result), *rest]  # the engine would sample ones
    keys = {
        **{"n": 2, "max_tokens": len(script), "logits_processors": [named("calculator")]},
        "logits_processor_args": {"script": [script]},
    }
    single = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"loop": "single_turn"})}
    )
    sampler = TrajectorySampler(worker, ["30 + 46?"], keys, config=single, tokenizer=tokenizer)
    trajectories = [trajectory async for trajectory in sampler]
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert audit(trajectory).first_violation is None
        (turn,) = trajectory.turns
        assert turn.completion_token_ids == script[: len(call)] + result + rest
        (sample,) = trajectory.samples()
        masks = [[1] * len(call), [0] * len(result), [1] * len(rest)]
        assert sample.response_mask[-len(script) :] == [one for part in masks for one in part]
        assert sample.token_ids[-len(script) :] == [*call, *result, *rest]
        assert "<result>76</result> It is 76." in trajectory.final_text
    samples = make_samples(sampler.groups, config, version=0).report
    assert samples.tokens_sampled == samples.masked["no_signal"] == 2 * len([*call, *rest])


def test_a_written_call_gets_its_result_or_its_error(tokenizer: Any) -> None:
    """Keywords, text without a call, errors, and results that hold special tokens."""
    functions: dict[str, Callable[..., object]] = {
        "add": lambda a, b=1: a + b,
        "end": lambda: "<|im_end|>",
        "fail": list[int]().pop,
    }
    first = FunctionProcessor(tokenizer, functions, "<call>", "</call>", "[", "]", timeout=60.0)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def answered(said: str) -> str:
        processor, ids = first.clone(), list[int]()
        for token in tokenizer.encode(said, add_special_tokens=False):
            assert processor(ids, torch.zeros(len(tokenizer))).isfinite().all()
            ids.append(token)
        start = len(ids)
        # Each place twice, as where vLLM computes a prompt in parts.
        while processor(ids, torch.zeros(len(tokenizer))).isinf().any():
            logits_V = processor(ids, torch.zeros(len(tokenizer)))
            (token,) = logits_V.isfinite().nonzero().flatten().tolist()
            assert processor.forced
            ids.append(token)
        assert not processor.forced
        assert end not in ids[start:]
        return str(tokenizer.decode(ids[start:], skip_special_tokens=False))

    assert answered("So <call>add(2, b=3)</call>") == "[5]"
    assert answered("<call> add(-2) </call>") == "[-1]"
    assert answered("no call</call>") == answered("<call>add(1)") == ""
    assert answered("<call>end()</call>") == "[<|im_end|>]"
    assert answered("<call>sub(1, 2)</call>").startswith("[Error: there is no function sub; func")
    assert answered("<call>add(1</call>").startswith("[Error: write one call such as name(1, 2), ")
    assert answered("<call>add(x)</call>").startswith("[Error: write one call")
    assert answered(f"<call>add({'1' * 9000})</call>").startswith("[Error: write one call")
    assert answered("<call>add(a=1, a=2)</call>").startswith("[Error: write one call")
    assert answered("<call>fail()</call>").startswith("[Error: IndexError: pop from empty list")
    with pytest.raises(InputError, match="start_tag and end_tag must not be empty"):
        FunctionProcessor(tokenizer, {}, "", "")
    with pytest.raises(InputError, match="x in function_map is not callable"):
        FunctionProcessor(tokenizer, {"x": 3})  # type: ignore[dict-item]


def test_a_subclass_may_find_and_evaluate_calls_itself(tokenizer: Any) -> None:
    """`check_marker` and `evaluate_expression`; with `floats`, 3 times 302 is 906.0."""

    class Doubling(FunctionProcessor):
        def check_marker(self, token_ids: list[int]) -> str | None:
            found = super().check_marker(token_ids)
            return None if found is None else found.replace("times", "multiply")

        def evaluate_expression(self, expression: str) -> object:
            return f"{expression} = {super().evaluate_expression(expression)}"

    functions = {"multiply": lambda a, b: a * b}
    first = Doubling(tokenizer, functions, "<call>", "</call>", "[", "]", floats=True)
    ids = list(tokenizer.encode("<call>times(3, b=302)</call>", add_special_tokens=False))
    start = len(ids)
    while (logits_V := first(ids, torch.zeros(len(tokenizer)))).isinf().any():
        ids.append(int(logits_V.argmax()))
    assert tokenizer.decode(ids[start:]) == "[multiply(3, b=302) = 906.0]"


def test_blocks_of_the_cache_fit_a_cpu(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    """ChatLearn's `block_size` of 16 becomes 32."""
    for given, taken in ((16, 32), (48, 64), (64, 64)):
        engine = EngineConfig(vllm_args={"block_size": given})
        made = engine_arguments(ModelConfig(path=model_path), engine, False)
        assert made["block_size"] == taken
        assert (f"has {taken} tokens" in caplog.text) == (given != taken)
        caplog.clear()


def test_processors_share_the_engines_tokenizer_loaded_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an argument of a class or factory; a preempted request goes on; who forces says so."""
    loaded: list[object] = []
    monkeypatch.setattr(
        vllm, "cached_tokenizer_from_config", lambda model: loaded.append(model) or tokenizer
    )
    settings = {SETTINGS: {"always": [], "allowed": "tests[.].*"}}
    given = SimpleNamespace(additional_config=settings, model_config="the model")
    processors = CallableProcessors(given, "cpu", False)
    assert loaded == []
    spell = {"qualname": named("Spells"), "kwargs": {"word": "cab"}}
    params = [
        SamplingParams(extra_args={EXTRA_ARG: {"request": f"r{n}", "processors": [one]}})
        for n, one in enumerate([spell, named("Boosts"), named("calculator"), named("even")])
    ]
    added = [(row, one, PROMPT, []) for row, one in enumerate(params)]
    processors.update_state(BatchUpdate(4, removed=[], added=added, moved=[]))
    logits_4V = processors.apply(torch.zeros(4, len(tokenizer)))
    assert loaded == ["the model"]
    first = tokenizer.encode("cab", add_special_tokens=False)[0]
    assert logits_4V[0].isfinite().nonzero().flatten().tolist() == [first]
    assert logits_4V[2].isfinite().all()
    taken = [take_forced(request) for request in ("r0", "r0", "r1", "r2", "r3")]
    assert taken == [[0], [], [0], [], None]
    row = processors._rows[0]
    processors.update_state(BatchUpdate(3, removed=[0], added=[], moved=[]))
    back = [(0, params[0], PROMPT, [5, 6])]
    processors.update_state(BatchUpdate(4, removed=[], added=back, moved=[]))
    assert processors._rows[0].steps is row.steps
    processors.apply(torch.zeros(4, len(tokenizer)))
    assert take_forced("r0") == [2]


async def test_a_worker_extension_of_the_users_stands_beside_ours(worker: WorkerHandle) -> None:
    """`collective_rpc` calls it, and weight updates still work; an error is its caller's."""
    assert await worker.collective_rpc("count_up") == [1]
    assert await worker.collective_rpc("count_up", args=(2,)) == [3]
    assert await worker.collective_rpc("count_up", kwargs={"by": 4}) == [7]
    (answer,) = await worker.collective_rpc("report_device_id")
    assert answer["device"]
    for method, why in (("break_down", "on purpose"), ("no_such", "no_such")):
        with pytest.raises(TurnwiseError, match=f"{method} failed: .*{why}"):
            await worker.collective_rpc(method)
    await worker.check_health()
    scheduler = Scheduler(ServingConfig(), 60.0)
    scheduler.add("worker-0", worker)
    assert await scheduler.collective_rpc("count_up", args=(10,)) == [17]


def test_a_worker_extension_that_does_not_fit_is_one_sentence(
    make_config: Callable[..., Config],
) -> None:
    """A class that is not there, one with our names, and arguments with a key of ours."""
    assert combined("", "a.b:C") == combined("a.b.C", "") == combined("a.b.C", "a.b.C") == "a.b.C"
    with pytest.raises(InputError, match=r"worker_extension_cls: no_such cannot be imported"):
        combined(WORKER_EXTENSION, "no_such.Class")
    with pytest.raises(InputError, match=f"worker_extension_cls: {HERE}.add is not a class"):
        combined(WORKER_EXTENSION, f"{HERE}:add")
    name = combined(WORKER_EXTENSION, f"{HERE}.Clash").rpartition(".")[2]
    with pytest.raises(InputError, match=r"Clash\.check_update is a name that Turnwise uses"):
        getattr(worker_extensions, name)
    good = combined(WORKER_EXTENSION, f"{HERE}.Counter").rpartition(".")[2]
    made = getattr(worker_extensions, good)
    assert made is getattr(worker_extensions, good)
    assert {"count_up", "check_update"} <= set(dir(made))
    for key, own in (("seed", "seed"), ("weight_transfer_config", "weights.transport")):
        with pytest.raises(InputError, match=f"vllm_args.{key} has its own key: set {own} instead"):
            make_config(engine={"vllm_args": {key: 1}})


@pytest.mark.parametrize(
    ("name", "reason", "said"),
    [
        ("broken", "logits_processor_error", r"callables:broken failed: KeyError: 'oops' \(.*:\d+"),
        ("leaves", "logits_processor_error", r"callables:leaves failed: .*SystemExit"),
        ("returns_nothing", "logits_processor_error", r"returned NoneType instead of logits \["),
        ("nothing_left", "no_token", "no token has a probability"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_callable_that_fails_ends_its_request_alone(
    worker: WorkerHandle, name: str, reason: str, said: str, temperature: float
) -> None:
    """One sentence names the function; the engine and the requests beside it go on."""
    beside = asyncio.create_task(
        generate(
            worker, Request(PROMPT, chosen("Count", max_tokens=40), f"beside-{name}-{temperature}")
        )
    )
    sampling = chosen(name, temperature=temperature, top_k=5 if temperature else 0)
    with pytest.raises(TrajectoryError, match=said) as caught:
        await generate(worker, Request(PROMPT, sampling, f"{name}-{temperature}"))
    assert caught.value.reason == reason
    assert (await beside).token_ids == [100 + i for i in range(40)]
    await worker.check_health()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:system", "os:system is refused: it does not match"),
        (f"x{HERE}:even", "does not match"),
        (f"{HERE}:even.__call__", "a logits processor is package.module:name, not"),
        (f"{HERE}:secret", "does not match"),
        (f"{HERE}:no_such", "has no no_such"),
        (f"{HERE}:NOT_CALLABLE", "NOT_CALLABLE is not callable"),
        (f"{HERE}:time", "is a module: name the class or function in it, as time:"),
    ],
)
async def test_only_names_that_match_are_imported(
    worker: WorkerHandle, client: AsyncOpenAI, name: str, said: str
) -> None:
    """The engine checks by itself, whatever stands before it, and so does `turnwise serve`."""
    with pytest.raises((InputError, TrajectoryError), match=said):
        await generate(worker, Request(PROMPT, chosen(name), f"refused {name}"))
    with pytest.raises(openai.APIStatusError, match=said) as caught:
        await client.completions.create(
            model="m", prompt=PROMPT, extra_body={"logits_processors": [name]}
        )
    assert caught.value.status_code in (400, 422)


async def test_a_request_chooses_its_own_over_http(
    client: AsyncOpenAI, tokenizer: Any, worker: WorkerHandle
) -> None:
    """Chat and completions, whole and streamed; vLLM's older spelling; failures; sessions."""
    count = {"qualname": f"{HERE}.Count", "kwargs": {"start": 300}}
    expected = tokenizer.decode([300 + i for i in range(6)])
    common: dict[str, Any] = {"model": "m", "max_tokens": 6}
    body = {"logits_processors": [count], "ignore_eos": True}
    told = {"messages": [{"role": "user", "content": "Count."}]}
    completion = await client.completions.create(**common, prompt=PROMPT, extra_body=body)
    assert completion.choices[0].text == expected
    chat = await client.chat.completions.create(**common, **told, extra_body=body, logprobs=True)
    assert chat.choices[0].message.content == expected
    assert [t.logprob for t in chat.choices[0].logprobs.content] == [0.0] * 6
    streamed = await client.chat.completions.create(**common, **told, extra_body=body, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in streamed if chunk.choices]
    assert "".join(parts) == expected
    plain = await client.completions.create(**common, prompt=PROMPT)
    assert plain.choices[0].text != expected
    with pytest.raises(openai.UnprocessableEntityError, match="callables:broken failed: KeyError"):
        await client.completions.create(
            **common,
            prompt=PROMPT,
            extra_body={"logits_processors": [named("broken")], "ignore_eos": True},
        )
    with pytest.raises(openai.BadRequestError, match="cannot be set by clients"):
        await client.completions.create(
            **common, prompt=PROMPT, extra_body={"vllm_xargs": {"turnwise": ["os:system"]}}
        )
    root = str(client.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(base_url=root) as http:
        opened = (await http.post("/sessions", json={"training": True})).json()
    training = client.with_options(base_url=opened["base_url"])
    with pytest.raises(openai.BadRequestError, match=r"logits_processors=.* would make the tokens"):
        await training.chat.completions.create(**common, **told, extra_body=body)


async def test_processors_change_trajectories_and_failures_drop_them(
    worker: WorkerHandle, config: Config, tokenizer: Any
) -> None:
    """By `sampling.logits_processors`; a failure is counted by its reason."""

    def sampler(name: str) -> TrajectorySampler:
        chosen = {"n": 3, "logits_processors": [named(name)]}
        return TrajectorySampler(worker, ["Hello."], chosen, config=config, tokenizer=tokenizer)

    trajectories = [trajectory async for trajectory in sampler("even")]
    ids = [i for t in trajectories for turn in t.turns for i in turn.completion_token_ids]
    assert len(trajectories) == 3
    assert len(ids) > 3
    assert not any(i % 2 for i in ids)
    with pytest.raises(StepError, match=r"3 of 3 .*\(3 logits_processor_error: .*callables:leaves"):
        [trajectory async for trajectory in sampler("leaves")]


def test_by_default_none_may_be_chosen_and_nothing_is_imported() -> None:
    """The check needs no import of what it refuses."""
    with pytest.raises(InputError, match=r"engine\.logits_processors_allowed is not set"):
        plain_calls(["antigravity:geohash"], None)
    with pytest.raises(InputError, match="does not match"):
        plain_calls(["antigravity.geohash"], "tests[.].*")
    assert "antigravity" not in sys.modules
    for nonsense in ("x", [3], [{"args": []}], [{"qualname": "a:b", "code": 1}], ["a:b"] * 17):
        with pytest.raises(InputError):
            plain_calls(nonsense, ".*")


def test_the_engines_process_checks_names_by_itself() -> None:
    """What reaches vLLM past every other check is refused where it would be imported."""
    settings = {SETTINGS: {"always": [], "allowed": "tests[.].*"}}
    processors = CallableProcessors(SimpleNamespace(additional_config=settings), "cpu", False)
    chosen = ["antigravity:geohash", {"qualname": "tests.engine.callables:run", "args": ["id"]}]
    params = [
        *(
            SamplingParams(extra_args={EXTRA_ARG: {"request": f"r{n}", "processors": [one]}})
            for n, one in enumerate(chosen, 1)
        ),
        SamplingParams(),
    ]
    added = [(row, one, PROMPT, []) for row, one in enumerate(params)]
    processors.update_state(BatchUpdate(3, removed=[], added=added, moved=[]))
    logits_3V = processors.apply(torch.zeros(3, 4))
    assert logits_3V.tolist() == [[-math.inf] * 4, [-math.inf] * 4, [0.0] * 4]
    assert "run is refused: tests.engine.callables imports it and does not" in take_failure("r2")
    assert "antigravity:geohash is refused" in take_failure("r1")
    assert take_failure("r1") == ""
    assert "antigravity" not in sys.modules


def test_workers_in_actors_apply_processors_too(model_path: str) -> None:
    """vLLM has one argument for what its executor and its processors need."""
    placement = ActorPlacement("host:1", "space", ("rank 0",), b"", 1, 2.0, 3.0)
    engine = EngineConfig(logits_processors=[named("ban")]).model_copy(
        update={"vllm_args": {"additional_config": placement}}
    )
    given = engine_arguments(ModelConfig(path=model_path), engine, False)["additional_config"]
    assert isinstance(given, ActorPlacement)
    assert given == placement | {SETTINGS: {"always": [named("ban")], "allowed": None}}
    assert (given.names, given.call_timeout) == (("rank 0",), 3.0)
    processors = CallableProcessors(SimpleNamespace(additional_config=given), "cpu", False)
    added = [(0, SamplingParams(), PROMPT, [])]
    processors.update_state(BatchUpdate(1, removed=[], added=added, moved=[]))
    logits_V = processors.apply(torch.zeros(1, BANNED + 1))[0]
    assert logits_V.tolist() == [0.0] * BANNED + [-math.inf]


def test_configured_names_are_checked_before_anything_starts(
    make_config: Callable[..., Config],
) -> None:
    """Tokens sampled against the pattern, and the pattern itself."""
    with pytest.raises(InputError, match="logits_processors_allowed does not match 'a:b'"):
        make_config(sampling={"logits_processors": ["a:b"]})
    with pytest.raises(InputError, match="is not a valid regular expression"):
        make_config(engine={"logits_processors_allowed": "("})
    config = make_config(
        sampling={"logits_processors": ["a:b", {"qualname": "a:c", "args": [1]}]},
        engine={"logits_processors_allowed": "a:[bc]"},
    )
    assert config.sampling.logits_processors[0] == "a:b"
    assert math.isclose(config.sampling.temperature, 1.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
        (named("NOT_CALLABLE"), "NOT_CALLABLE is not callable"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_an_error_at_the_start(name: str, said: str) -> None:
    """In one sentence, before vLLM starts anything."""
    with pytest.raises(InputError, match=f"engine.logits_processors: .*{said}"):
        engine_arguments(ModelConfig(path="x"), EngineConfig(logits_processors=[name]), False)
