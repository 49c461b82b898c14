"""Chats without HTTP: callbacks that submit the next turn, streams, and classes of users."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from examples.calculator.three_rounds import FOLLOW_UPS, ThreeRounds, on_completion
from examples.calculator.tool import TOOL_SCHEMA
from tests.simulated import Latency, SimulatedEngine
from turnwise.compat.verl import LLMServerManager
from turnwise.compat.verl.chat_scheduler import ChatBackend, ChatCompletionScheduler
from turnwise.compat.verl.data_proto import DataProto
from turnwise.compat.verl.loop import load_chat_scheduler
from turnwise.config import Config, ServingConfig, parse_config
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollouts import Runner
from turnwise.rollouts.data import load_training
from turnwise.serving.scheduler import Scheduler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, Trajectory, audit

QUESTION = {"role": "user", "content": "What is 12 plus 30?"}
CALL = (
    '<tool_call>\n{"name":"calculate",  "arguments": {"operation":"+","a":12, "b": 30}}\n'
    "</tool_call><|im_end|>"
)
ANSWER = "The answer is 42.<|im_end|>"


@pytest.fixture(scope="module")
async def backend(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[ChatBackend]:
    """Chats on one worker's actor."""
    config = make_config(sampling={"n": 2, "max_tokens": 48})
    backend = ChatBackend(config, engine)
    await backend.start()
    yield backend
    await backend.stop()


@pytest.fixture
def chats(backend: ChatBackend) -> ChatCompletionScheduler:
    return backend.instance


def scripted(template: ChatTemplate, *turns: str) -> dict[str, Any]:
    """Makes the model say these turns."""
    flat = [token for turn in turns for token in [*template.encode(turn), -1]]
    return {"vllm_xargs": {"script": flat}}


def trajectory_of(backend: ChatBackend, session: str) -> Trajectory:
    found = backend.sessions.get(session)
    assert found is not None
    return found.finish()


async def test_a_callback_may_submit_the_next_turn(
    backend: ChatBackend, chats: ChatCompletionScheduler, template: ChatTemplate
) -> None:
    """The order and names of verl, and x-request-id with its prefix or without."""
    options = {"tools": [TOOL_SCHEMA], "extra_body": scripted(template, CALL, ANSWER)}
    finished: dict[int, Any] = {}

    async def callback(completions: Any, info: dict[str, Any], exception: Exception | None) -> None:
        assert exception is None
        choice = completions.choices[0]
        info["ids"].append(completions.id)
        info["messages"].append(choice.message)
        if not choice.message.tool_calls:
            finished[info["index"]] = info
            return
        assert choice.finish_reason == "tool_calls"
        call = choice.message.tool_calls[0]
        info["messages"].append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        previous = completions.id.removeprefix("chatcmpl-" if info["index"] % 2 else "")
        await chats.submit_chat_completions(
            callback,
            info,
            model="any/name",
            messages=info["messages"],
            extra_headers={"X-Request-Id": previous},
            **options,
        )

    infos = [{"index": index, "messages": [QUESTION], "ids": []} for index in range(4)]
    async with asyncio.TaskGroup() as group:
        for info in infos:
            submitted = chats.submit_chat_completions(
                callback=callback,
                callback_additional_info=info,
                model="any/name",
                messages=info["messages"],
                **options,
            )
            group.create_task(submitted)
    assert {index: info["messages"][-1].content for index, info in finished.items()} == {
        index: "The answer is 42." for index in range(4)
    }
    for info in infos:
        session = backend.sessions.of_request(None, info["ids"][0])
        assert session is backend.sessions.of_request(None, info["ids"][1])
        trajectory = session.finish()
        assert audit(trajectory).first_violation is None
        assert [turn.fork_reason for turn in trajectory.turns] == [None, None]
        assert len(trajectory.branches()) == 1


async def test_no_chat_is_sampled_by_vllms_application(
    backend: ChatBackend,
    chats: ChatCompletionScheduler,
    template: ChatTemplate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*request: Any, **options: Any) -> None:
        raise AssertionError("vLLM's application was asked")

    monkeypatch.setattr(backend._app.state.engine_client, "generate", missing)
    asked = {"model": "any/name", "tools": [TOOL_SCHEMA], "temperature": 0.5}
    asked |= scripted(template, ANSWER, ANSWER)
    first: Any = await chats.chat_completion(messages=[QUESTION], **asked)
    messages = [QUESTION, first.choices[0].message, QUESTION]  # with their ids
    for options in ({}, {"logprobs": True}, {"n": 2}, {"stop": ["zzz"]}, {"seed": 1}):
        answer: Any = await chats.chat_completion(messages=messages, **asked, **options)
        assert len(answer.choices) == options.get("n", 1)


async def test_the_turns_after_x_request_id_stay_on_their_worker(
    engine: WorkerHandle, make_config: Callable[..., Config], template: ChatTemplate
) -> None:
    """By the id of the completion before, and by no more of them than are remembered."""
    fleet = Scheduler(ServingConfig(known_sessions=2), 60.0)
    for name in ("worker-0", "worker-1"):
        fleet.add(name, engine)
    backend = ChatBackend(make_config(), fleet)
    await backend.start()
    try:
        chats = backend.instance
        made: list[Any] = []
        for _ in range(3):
            made.append(await chats.chat_completion(messages=[QUESTION], max_tokens=4))
        assert len(fleet._router.sessions) == 2
        for _ in range(3):
            messages = [QUESTION, made[2].choices[0].message, QUESTION]
            headers = {"x-request-id": made[2].id}
            await chats.chat_completion(messages=messages, extra_headers=headers, max_tokens=4)
        assert fleet.events["sticky"] == 3
    finally:
        await backend.stop()


async def test_each_choice_has_its_tokens_and_may_be_continued(
    backend: ChatBackend, chats: ChatCompletionScheduler
) -> None:
    """`n` answers are `n` branches, each exact."""
    made: Any = await chats.chat_completion(
        messages=[QUESTION],
        n=3,
        max_completion_tokens=8,
        seed=5,
        logprobs=True,
        extra_headers={"x-session-id": "choices"},
    )
    turns = trajectory_of(backend, "choices").turns
    assert len(made.choices) == len(turns) == 3
    for choice in made.choices:
        (turn,) = [t for t in turns if t.completion_token_ids == choice.token_ids]
        assert choice.message.generation_token_ids == turn.completion_token_ids
        assert choice.message.generation_log_probs == turn.logprobs
        assert choice.message.weight_versions == turn.weight_versions
        assert [c.logprob for c in choice.logprobs.content] == pytest.approx(turn.logprobs)
    second = made.choices[1]
    await chats.chat_completion(
        messages=[QUESTION, second.message, QUESTION],
        max_tokens=4,
        extra_headers={"x-request-id": made.id},
    )
    trajectory = trajectory_of(backend, "choices")
    assert audit(trajectory).first_violation is None
    assert len(trajectory.branches()) == 3
    last = trajectory.prompt_token_ids(3)
    before = [*second.message.prompt_token_ids, *second.token_ids]
    assert last[: len(before)] == before


async def test_a_streamed_completion_is_recorded_like_a_whole_one(
    backend: ChatBackend, chats: ChatCompletionScheduler, template: ChatTemplate
) -> None:
    """Without HTTP, with tools, and recorded as the whole completion is."""
    lines = "The answer\u2028is 42."  # a line's end, but not of an event
    asked: dict[str, Any] = {
        "messages": [QUESTION],
        "tools": [TOOL_SCHEMA],
        "extra_body": scripted(template, CALL, f"{lines}<|im_end|>"),
        "extra_headers": {"x-session-id": "streamed"},
    }
    stream: Any = await chats.chat_completion(stream=True, **asked)
    assert isinstance(stream, AsyncGenerator)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments) == {"operation": "+", "a": 12, "b": 30}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    told = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks]
    ids = [token for some in told for token in some]
    (turn,) = trajectory_of(backend, "streamed").turns
    assert ids == turn.completion_token_ids == template.encode(CALL)

    pieces: list[str] = []

    async def callback(completions: Any, info: dict[str, Any], exception: Exception | None) -> None:
        async for chunk in completions:
            pieces.append(chunk.choices[0].delta.content or "")

    calling = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function"}]}
    calling["tool_calls"][0]["function"] = {"name": "calculate", "arguments": arguments}  # type: ignore[index]
    following = [QUESTION, calling, {"role": "tool", "tool_call_id": "c", "content": "42"}]
    headers = {"x-request-id": chunks[0].id}
    asked |= {"messages": following, "extra_headers": headers, "stream": True}
    await chats.submit_chat_completions(callback, {}, **asked)
    assert "".join(pieces) == lines
    trajectory = trajectory_of(backend, "streamed")
    assert audit(trajectory).first_violation is None
    assert len(trajectory.turns) == 2
    assert len(trajectory.branches()) == 1


async def test_a_stream_starts_early_and_closing_it_ends_the_request(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=10_000)
    backend = ChatBackend(make_config(engine={}), engine)
    await backend.start()
    try:
        stream: Any = await backend.instance.chat_completion(
            messages=[QUESTION],
            stream=True,
            max_tokens=400,
            extra_headers={"x-session-id": "closed"},
        )
        assert (await anext(stream)).choices
        engine.slowdown = 1e6
        assert await engine.num_in_flight() == 1
        await stream.aclose()
        session = backend.sessions.get("closed")
        assert session is not None
        async with asyncio.timeout(60):
            while await engine.num_in_flight() or not session.lost_turns:
                await asyncio.sleep(0.01)
        assert session.trajectory.turns == []
    finally:
        await backend.stop()


async def test_an_id_of_the_callers_own_names_a_conversation(
    chats: ChatCompletionScheduler, backend: ChatBackend
) -> None:
    headers = {"x-request-id": "my-own-id"}
    made = await chats.chat_completion(messages=[QUESTION], extra_headers=headers, max_tokens=4)
    messages = [QUESTION, made.choices[0].message, QUESTION]
    await chats.chat_completion(messages=messages, extra_headers=headers, max_tokens=4)
    turns = backend.sessions._named["my-own-id"].trajectory.turns
    assert [turn.fork_reason for turn in turns] == [None, None]


async def test_what_cannot_be_served_is_told_by_its_key(chats: ChatCompletionScheduler) -> None:
    """Every key of OpenAI's is served or refused in one sentence."""
    told: list[Any] = []
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"no_such_key": 1}, "no key no_such_key"),
        ({"timeout": 5}, "no key timeout"),
        ({"extra_headers": {"x-other": "1"}}, "extra_headers .* not x-other"),
        ({"extra_headers": {"x-request-id": "chatcmpl-none"}}, "no completion chatcmpl-none"),
        ({"extra_headers": {"x-session-id": "a/b"}}, "x-session-id: a session's name"),
        ({"n": 1000}, "n=1000 is more than 128"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "1 2 3 " * 500}]}, "context length"),
    ]
    for stream in (False, True):
        for keys, words in wrong:
            asked = {"messages": [QUESTION], "stream": stream, **keys}
            await chats.submit_chat_completions(
                lambda c, i, e: told.append((c, i, e)), {"k": 1}, **asked
            )
            completion, info, error = told.pop()
            assert completion is None
            assert info == {"k": 1}
            with pytest.raises(InputError, match=words):
                raise error
            assert "\n" not in str(error)

    def careless(completions: Any, info: Any, exception: Any) -> None:
        raise KeyError("what a callback raises")

    with pytest.raises(KeyError, match="what a callback raises"):
        await chats.submit_chat_completions(careless, {}, messages=[QUESTION], max_tokens=2)


async def test_a_turn_never_exceeds_what_the_context_holds(chats: ChatCompletionScheduler) -> None:
    completion: Any = await chats.chat_completion(
        messages=[{"role": "user", "content": "1 " * 240}],
        max_tokens=512,
        extra_body={"ignore_eos": True},
    )
    assert completion.usage.total_tokens == 512
    assert completion.choices[0].finish_reason == "length"


async def test_the_rounds_of_a_conversation_share_its_budget_of_tokens(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """What is left of `rollout.max_response_tokens` bounds each round."""
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=10_000)
    config = make_config(
        rollout={"max_response_tokens": 60}, sampling={"n": 1, "max_tokens": 20}, engine={}
    )
    backend = ChatBackend(config, engine, Patient)
    await backend.start()
    try:
        made = await backend.generate_sequences([[QUESTION]])
    finally:
        await backend.stop()
    assert made.batch is not None
    assert made.batch["responses"].shape == (1, 60)
    mask = made.batch["response_mask"][0]
    assert mask[:20].tolist() == [1] * 20
    assert mask[-1] == 1
    assert 20 < int(mask.sum()) < 60
    assert "used up its 60 tokens (rollout.max_response_tokens)" in Patient.told[0]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_conversation_has_at_most_max_turns_turns(
    make_config: Callable[..., Config], tokenizer: Any, fails: bool
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=5)
    config = make_config(rollout={"max_turns": 3}, sampling={"n": 1, "max_tokens": 20}, engine={})
    backend = ChatBackend(config, engine, Impatient if fails else Patient)
    await backend.start()
    try:
        made = await backend.generate_sequences([[QUESTION]])
    finally:
        await backend.stop()
    assert made.batch is not None
    assert made.meta_info["dropped"] == {}
    mask = made.batch["response_mask"][0].tolist()
    assert sum(now > before for before, now in itertools.pairwise([0, *mask])) == 3
    assert "its 3 turns" in Patient.told[-1]


class Patient(ChatCompletionScheduler):
    """Asks again until it is refused."""

    told: ClassVar[list[str]] = []

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        messages: list[Any] = [QUESTION]
        try:
            while True:
                made: Any = await self.chat_completion(messages=messages)
                messages += [made.choices[0].message, QUESTION]
        except InputError as refused:
            self.told.append(str(refused))


class Impatient(Patient):
    """Fails when it is refused."""

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        await super().generate_sequences(batch, **sampling_params)
        raise RuntimeError("no more turns")


async def test_a_batch_of_conversations_becomes_padded_tensors(backend: ChatBackend) -> None:
    """Masks, log-probs and weight versions of three rounds, and of single turns."""
    raw = [
        [{"role": "user", "content": "What is 12 plus 30?"}],
        [{"role": "user", "content": "7?"}],
    ]
    prompts = DataProto(non_tensor_batch={"raw_prompt": np.array(raw)})
    await backend.set_scheduler(ThreeRounds)
    try:
        made = await backend.generate_sequences(prompts, max_tokens=6, temperature=0.7)
    finally:
        await backend.set_scheduler(ChatCompletionScheduler)
    assert made.batch is not None
    assert len(made) == 4  # sampling.n of each
    assert made.non_tensor_batch["index"].tolist() == [0, 0, 1, 1]
    assert made.meta_info == {"dropped": {}}
    batch = made.batch
    width, length = batch["prompts"].shape[1], batch["responses"].shape[1]
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert batch[name].shape == (4, width + length)
    for name in ("response_mask", "rollout_log_probs", "weight_versions"):
        assert batch[name].shape == (4, length)
    assert batch["attention_mask"][2, 0] == 0  # the shorter prompt is padded on the left
    assert batch["response_mask"][:, 0].tolist() == [1, 1, 1, 1]
    sampled = batch["response_mask"] == 1
    assert (batch["weight_versions"][sampled] == 0).all()
    assert (batch["weight_versions"][~sampled] == -1).all()
    assert (batch["rollout_log_probs"][~sampled] == 0).all()
    assert (batch["rollout_log_probs"][sampled] <= 0).all()
    template = ChatTemplate(backend.tokenizer)
    for row in range(4):
        real = batch["attention_mask"][row] == 1
        assert batch["position_ids"][row][real].tolist() == list(range(int(real.sum())))
        text = template.decode_all(batch["input_ids"][row][real].tolist())
        assert all(question in text for question in FOLLOW_UPS)
        assert torch.equal(batch["input_ids"][row][width:], batch["responses"][row])
        assert [m["role"] for m in made.non_tensor_batch["messages"][row]] == [
            "user",
            "assistant",
        ] * 3
        rounds = np.diff(np.concatenate([[0], batch["response_mask"][row].numpy(), [0]]))
        assert (rounds == 1).sum() == 3
    await backend.set_scheduler(Streaming)
    try:
        single = await backend.generate_sequences(raw, n=1, max_completion_tokens=3)
    finally:
        await backend.set_scheduler(ChatCompletionScheduler)
    assert single.batch is not None
    assert len(single) == 2
    assert single.batch["responses"].shape[1] <= 3
    assert sorted(single.batch["response_mask"].sum(dim=1).tolist()) == sorted(Streaming.counts)
    with pytest.raises(InputError, match="no sampling key max_new"):
        await backend.generate_sequences(raw, max_new=3)


class Streaming(ChatCompletionScheduler):
    """Reads each answer as it comes, on the event loop of user code."""

    counts: ClassVar[list[int]] = []

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        messages = list(batch.non_tensor_batch["raw_prompt"][0])
        stream: Any = await self.chat_completion(messages=messages, stream=True, **sampling_params)
        told = [getattr(chunk.choices[0], "token_ids", None) or [] async for chunk in stream]
        self.counts.append(sum(map(len, told)))


async def test_a_conversation_whose_time_is_over_ends_its_request(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), latency=Latency(step=3600.0))
    rollout = {"trajectory_timeout": 1, "stall_timeout": 60}
    config = make_config(rollout=rollout, sampling={"n": 2, "max_tokens": 8}, engine={})
    backend = ChatBackend(config, engine)
    await backend.start()
    try:
        with pytest.raises(TrajectoryError, match="not done after 1 s") as failure:
            await backend.generate_sequences([[QUESTION]])
        assert failure.value.reason == "trajectory_timeout"
        async with asyncio.timeout(60):
            while await engine.num_in_flight():
                await asyncio.sleep(0.01)
        assert len(backend.sessions) == 0
    finally:
        await backend.stop()


class Raising(ThreeRounds):
    """Its callback fails in half of the conversations."""

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        await super().generate_sequences(batch, **sampling_params)
        if batch.non_tensor_batch["raw_prompt"][0][0]["content"] == "7?":
            raise ValueError("no luck")


class Watched(ThreeRounds):
    """Knows where it runs."""

    threads: ClassVar[set[int]] = set()
    rows: ClassVar[list[dict[str, Any]]] = []

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        self.threads.add(threading.get_ident())
        self.rows.append({name: column[0] for name, column in batch.non_tensor_batch.items()})
        await super().generate_sequences(batch, **sampling_params)


class Stuck(ChatCompletionScheduler):
    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        asked = {"messages": [QUESTION], "max_tokens": 2}
        await self.submit_chat_completions(lambda c, i, e: asyncio.sleep(3600), {}, **asked)


class Silent(ChatCompletionScheduler):
    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        pass


class Cold(ChatCompletionScheduler):
    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        await super().generate_sequences(batch, temperature=0.0)


class Naive(ChatCompletionScheduler):
    """Chooses its sampling parameters as verl's class does."""

    async def generate_sequences(self, batch: DataProto, **sampling_params: Any) -> None:
        asked = {"n": self.config.n, "temperature": self.config.temperature}
        if batch.meta_info.get("validate") or not batch.meta_info.get("do_sample", True):
            asked = {"n": 1, "temperature": 0}
        messages = list(batch.non_tensor_batch["raw_prompt"][0])
        await self.submit_chat_completions(ended, {}, messages=messages, **asked)


async def ended(completions: Any, info: dict[str, Any], error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize("meta_info", [{"validate": True}, {"do_sample": False}])
async def test_batches_that_nobody_trains_on_are_greedy(
    backend: ChatBackend, meta_info: dict[str, Any]
) -> None:
    await backend.set_scheduler(Naive)
    try:
        batch = DataProto.from_conversations([[QUESTION]], **meta_info)
        first, second = [await backend.generate_sequences(batch, max_tokens=8) for _ in range(2)]
        assert first.meta_info["dropped"] == {}
        assert first.batch["responses"].tolist() == second.batch["responses"].tolist()
        assert len(first.batch["responses"]) == 1
        await backend.set_scheduler(Cold)  # without a word in the batch
        made = await backend.generate_sequences([[QUESTION]], n=2, max_tokens=8)
        assert made.batch["responses"][0].tolist() == made.batch["responses"][1].tolist()
        assert made.batch["response_mask"].all()
    finally:
        await backend.set_scheduler(ChatCompletionScheduler)


def test_sleeping_engines_are_asked_for_nothing(make_config: Callable[..., Config]) -> None:
    manager = LLMServerManager(make_config())
    manager._asleep = True
    with pytest.raises(InputError, match="the engines sleep: call wake_up first"):
        manager.generate_sequences([[QUESTION]])
    with pytest.raises(InputError, match="the engines sleep: call wake_up first"):
        manager.submit_chat_completions(print, {}, messages=[QUESTION])


async def test_the_batch_leaves_out_and_counts_a_failed_conversation(
    backend: ChatBackend,
) -> None:
    raw = [[QUESTION], [{"role": "user", "content": "7?"}]]
    await backend.set_scheduler(Raising)
    try:
        made = await backend.generate_sequences(raw, max_tokens=4)
        assert made.non_tensor_batch["index"].tolist() == [0, 0]
        assert made.meta_info["dropped"] == {"chat_scheduler_error": 2}
        with pytest.raises(TrajectoryError, match=r"no luck \(.*test_chat_scheduler"):
            await backend.generate_sequences(raw[1:], max_tokens=4)
    finally:
        await backend.set_scheduler(ChatCompletionScheduler)


async def test_the_configured_class_holds_every_conversation(
    backend: ChatBackend, engine: WorkerHandle, make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """Three rounds by callbacks are one exact trajectory; user code runs elsewhere."""
    path = f"{__name__}:Watched"
    config = make_config(rollout={"chat_scheduler": path}, sampling={"n": 3, "max_tokens": 6})
    assert config.rollout.loop == "chat_scheduler"
    await backend.set_scheduler(load_chat_scheduler(path))
    problem = load_training(config)[0]
    runner = Runner(config, tokenizer)
    runner.loops["chat_scheduler"].chats = backend
    group = await runner.run_group(engine, problem, config.sampling, "held")
    assert group.dropped == {}
    assert len(group.trajectories) == 3
    for trajectory in group.trajectories:
        assert audit(trajectory).first_violation is None
        assert len(trajectory.turns) == 3
        (sample,) = trajectory.samples()
        assert sum(sample.response_mask) == trajectory.sampled_tokens
        assert trajectory.reward in (0.0, 1.0)
        said = [m["content"] for m in trajectory.messages if m["role"] == "user"]
        assert said == [problem.row["question"], *FOLLOW_UPS]
    held: Any = backend.instance
    assert threading.get_ident() not in held.threads
    assert held.rows[0]["question"] == problem.row["question"]
    assert not [s for s in backend.sessions._named.values() if s.private]


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("Stuck", "stalled", "it made no progress for 1 s"),
        ("Silent", "chat_scheduler_silent", "sampled nothing"),
        ("Cold", "chat_scheduler_error", "temperature=0.0 would make .* off-policy"),
        ("missing", "", "has no missing"),
        ("QUESTION", "", "is not a subclass of"),
    ],
)
async def test_a_failing_class_drops_its_trajectories_with_a_reason(
    name: str,
    reason: str,
    words: str,
    backend: ChatBackend,
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
) -> None:
    path = f"{__name__}:{name}"
    rollout = {
        "chat_scheduler": path,
        "stall_timeout": 1 if name == "Stuck" else 60,
        "agent_sampling": "refuse",
    }
    config = make_config(rollout=rollout, sampling={"n": 2, "max_tokens": 6})
    if not reason:
        with pytest.raises(InputError, match=f"rollout.chat_scheduler: .*{words}"):
            load_chat_scheduler(path)
        return
    await backend.set_scheduler(load_chat_scheduler(path))
    runner = Runner(config, tokenizer)
    runner.loops["chat_scheduler"].chats = backend
    group = await runner.run_group(engine, load_training(config)[0], config.sampling, name)
    assert group.dropped == {reason: 2}
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(group.causes[reason])


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (
            {"chat_scheduler": "a:B", "loop": "agent", "agent": "a:b"},
            "loop agent does not use chat_scheduler",
        ),
        ({"loop": "chat_scheduler"}, "loop chat_scheduler needs chat_scheduler"),
        ({"chat_scheduler": "B"}, "package.module:Class, a ChatCompletionScheduler, not 'B'"),
    ],
)
def test_keys_that_contradict_are_refused(rollout: dict[str, str], words: str) -> None:
    tree = {"environment": "e:E", "model": {"path": "m"}, "data": {"path": "d"}, "rollout": rollout}
    with pytest.raises(InputError, match=words):
        parse_config(tree)


async def test_the_examples_callback_raises_what_failed(chats: ChatCompletionScheduler) -> None:
    with pytest.raises(InputError, match="no key"):
        await on_completion(chats, None, {}, InputError("no key"))
