"""What the `ipc` and `collective` transports have in common: with the real engine, and without."""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weights.links import (
    LINKS,
    Link,
    assert_same,
    hurry,
    impatient_from_chunk_2,
    receive_stream,
    some_tensors,
    state_dict_info,
)
from tests.weights.trainer import (
    PROMPT,
    Model,
    Named,
    completed_across,
    send_and_die,
    version_runs,
)
from turnwise.config import SamplingConfig
from turnwise.core.fork_server import share_with_engines
from turnwise.engine import Request, generate
from turnwise.errors import DeadlineError, WeightUpdateError
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.weights.manifest import chunk_bytes, plan_chunks
from turnwise.weights.shm import ShmSender
from turnwise.weights.sync import check_canary
from turnwise.weights.transport import Receiver

SMALL = 64 * 2**10
"""Bytes of a buffer that the test model's weights fill dozens of times."""
PATIENCE = 240.0
"""Seconds for what should not take any: a busy machine may stand still for some, and an engine has
a quarter of a sender's time to accept."""


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = LINKS[request.param]()
    yield link
    link.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


# Without an engine.


@given(st.lists(st.integers(0, 3000), min_size=1), st.integers(1, 8000))
def test_chunks_keep_the_order_and_the_bound(sizes: list[int], buffer_bytes: int) -> None:
    tensors = [(str(i), torch.empty(size, device="meta")) for i, size in enumerate(sizes)]
    chunks = plan_chunks(tensors, torch.float32, buffer_bytes)
    assert [entry.name for chunk in chunks for entry in chunk] == [name for name, _ in tensors]
    for chunk in chunks:
        assert chunk_bytes(chunk) <= buffer_bytes or len(chunk) == 1 or not chunk[-1].nbytes
        ends = [0, *(entry.offset + entry.nbytes for entry in chunk)]
        assert all(end <= entry.offset for end, entry in zip(ends, chunk, strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_as_it_was_sent(
    link: Link, pool: ThreadPoolExecutor, dtype: torch.dtype
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, dtype=dtype, buffer_bytes=4000)
    assert len(sender._chunks) > 4
    expected = state_dict_info(tensors, dtype)
    for version in range(1, 6):
        tensors = [(name, tensor + version) for name, tensor in tensors]
        reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
        sender.send(version, iter(tensors))
        arrived, received = reader.result()
        assert arrived == version
        assert_same(received, tensors, dtype)
    sender.close()


def test_a_buffer_is_not_written_before_its_reader_is_done(
    link: Link, pool: ThreadPoolExecutor
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000)
    reader = pool.submit(
        receive_stream, link.receiver(state_dict_info(tensors), PATIENCE), pause=0.05
    )
    sender.send(1, tensors)
    assert_same(reader.result()[1], tensors)
    sender.close()


def renamed(tensors: Named) -> Named:
    return [("stranger", tensors[0][1]), *tensors[1:]]


DAMAGES: dict[str, tuple[Callable[[Named], Named], str]] = {
    "missing": (lambda tensors: tensors[:3] + tensors[4:], "{3} is missing from version 7"),
    "twice": (lambda tensors: [*tensors, tensors[2]], "{2} is listed twice"),
    "unexpected": (renamed, "stranger of version 7 was not expected"),
    "shape": (
        lambda tensors: [(tensors[0][0], torch.zeros(3)), *tensors[1:]],
        r"{0} of version 7 is \(3,\), not \(",
    ),
}


def words(damage: str, tensors: Named) -> str:
    return DAMAGES[damage][1].format(*(name for name, _ in tensors[:4]))


@pytest.mark.parametrize("damage", DAMAGES)
def test_both_sides_refuse_a_misfit_header_by_name(
    link: Link, pool: ThreadPoolExecutor, damage: str
) -> None:
    tensors = some_tensors()
    damaged = DAMAGES[damage][0](tensors)
    sender = link.sender(damaged, timeout=PATIENCE)
    expected = state_dict_info(tensors)
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    with pytest.raises(WeightUpdateError, match="refused.*" + words(damage, tensors)):
        sender.send(7, damaged)
    with pytest.raises(WeightUpdateError, match=words(damage, tensors)):
        reader.result()
    sender.close()


def test_a_type_that_the_engine_does_not_expect_is_refused(
    link: Link, pool: ThreadPoolExecutor
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, dtype=torch.bfloat16, timeout=PATIENCE)
    expected = {name: (tuple(tensor.shape), "float32") for name, tensor in tensors}
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    with pytest.raises(WeightUpdateError, match="t0 of version 1 is bfloat16, not float32"):
        sender.send(1, tensors)
    with pytest.raises(WeightUpdateError, match="t0 of version 1 is bfloat16, not float32"):
        reader.result()
    sender.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: [*tensors[:6], *tensors[7:]], "got t7 instead of t6"),
        (lambda tensors: tensors[:-1], "got nothing instead of empty"),
        (lambda tensors: [*tensors, ("late", tensors[0][1])], "late came after the last"),
        (lambda tensors: [*tensors[:6], ("t6", torch.ones(1)), *tensors[7:]], "the shape of t6"),
    ],
    ids=["order", "few", "many", "shape"],
)
def test_a_sender_reports_changed_tensors_and_can_go_on(
    link: Link, pool: ThreadPoolExecutor, change: Callable[[Named], Named], message: str
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000, timeout=PATIENCE)
    expected = state_dict_info(tensors)
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    source = iter(change(tensors))
    with pytest.raises(WeightUpdateError, match=message):
        sender.send(1, source)
    assert next(source, None) is None  # taken to its end: other ranks gather along
    with pytest.raises(WeightUpdateError, match=f"gave up.*{message}"):
        reader.result()
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    sender.send(2, tensors)
    assert_same(reader.result()[1], tensors)
    sender.close()


def test_an_engine_that_fails_tells_the_sender_which_can_go_on(
    link: Link, pool: ThreadPoolExecutor
) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000, timeout=PATIENCE)
    expected = state_dict_info(tensors)

    def fail(receiver: Receiver) -> None:
        while receiver.poll() is None:
            time.sleep(0.001)
        chunks = receiver.chunks()
        next(chunks), next(chunks)
        receiver.end("t2 cannot be loaded")

    failing = pool.submit(fail, link.receiver(expected, PATIENCE))
    with pytest.raises(WeightUpdateError, match="t2 cannot be loaded"):
        sender.send(1, tensors)
    failing.result()
    reader = pool.submit(receive_stream, link.receiver(expected, PATIENCE))
    sender.send(2, tensors)
    assert_same(reader.result()[1], tensors)
    sender.close()


def test_waits_for_the_other_side_end_and_name_it(link: Link, pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, buffer_bytes=4000, timeout=0.4)
    expected = state_dict_info(tensors)
    with pytest.raises(DeadlineError, match=rf"trainer at {link.where} did not .* 0\.3 s"):
        receive_stream(link.receiver(expected, 0.3))
    with pytest.raises(DeadlineError, match=r"engine .* did not .* version 1 within 0\.[14] s"):
        sender.send(1, tensors)
    sender._timeout = PATIENCE
    idle, received = link.receiver(expected, PATIENCE), threading.Event()
    source = impatient_from_chunk_2(sender, tensors, received, 0.4)
    sending = pool.submit(sender.send, 2, source)
    while idle.poll() is None:
        time.sleep(0.001)
    hurry(idle, 2)
    received.set()
    with pytest.raises(DeadlineError, match=r"engine.* did not .*chunk . of \d+ of version 2 "):
        sending.result()
    idle.end("too late")
    sender.close()


def test_a_late_trainer_serves_no_engine_that_gave_up(link: Link, pool: ThreadPoolExecutor) -> None:
    tensors = some_tensors()
    sender = link.sender(tensors, timeout=PATIENCE)
    expected = state_dict_info(tensors)
    with pytest.raises(DeadlineError):
        receive_stream(link.receiver(expected, 0.2))
    sending = pool.submit(sender.send, 1, tensors)
    time.sleep(0.05)
    assert receive_stream(link.receiver(expected, PATIENCE))[0] == 1
    sending.result()
    sender.close()


# With the real engine.


@pytest.fixture(scope="module")
def trainer(model_path: str) -> Model:
    return Model(model_path)


@pytest.fixture(scope="module")
def shm(trainer: Model) -> Iterator[ShmSender]:
    sender = ShmSender(trainer.tensors)
    yield sender
    sender.close()


@pytest.fixture
async def ready(
    engine: WorkerHandle, trainer: Model, shm: ShmSender
) -> AsyncIterator[WorkerHandle]:
    """The engine, told what to expect; afterwards with its original weights, and not paused."""
    info = {name: (tuple(tensor.shape), "float32") for name, tensor in trainer.tensors}
    await engine._call("prepare_refit_info", info)
    yield engine
    await engine._call("prepare_refit_info", info)
    trainer.perturb(0.0)
    await engine.update_weights(shm.publish(0, trainer.tensors))
    expected = trainer.logprobs(trainer.canary, 1)
    await check_canary(engine, trainer.canary, expected, 1e-4, 0)


async def test_an_update_lands_whole_and_its_tokens_carry_its_version(
    ready: WorkerHandle, trainer: Model, link: Link
) -> None:
    sender = await link.join(ready, trainer.tensors, buffer_bytes=SMALL)
    assert len(sender._chunks) > 10
    for version in (1, 2, 3):
        trainer.perturb(0.05)
        sending = asyncio.to_thread(sender.send, version, trainer.tensors)
        await asyncio.gather(sending, link.update(ready, PATIENCE))
        completion = await generate(
            ready, Request(PROMPT, SamplingConfig(max_tokens=16), f"v{version}")
        )
        expected = trainer.logprobs([*PROMPT, *completion.token_ids], len(PROMPT))
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert set(completion.weight_versions) == {version}
    sender.close()


async def test_twenty_updates_in_a_row_are_all_exact(
    ready: WorkerHandle, trainer: Model, link: Link
) -> None:
    sender = await link.join(ready, trainer.tensors, buffer_bytes=2 * SMALL)
    for version in range(1, 21):
        trainer.perturb(0.05)
        expected = trainer.logprobs(trainer.canary, 1)
        sending = asyncio.to_thread(sender.send, version, trainer.tensors)
        await asyncio.gather(sending, link.update(ready, PATIENCE))
        assert (await check_canary(ready, trainer.canary, expected, 1e-4, version))[1] < 1e-4
    sender.close()


async def test_requests_run_until_the_trainer_comes_and_then_go_on(
    ready: WorkerHandle, trainer: Model, link: Link, shm: ShmSender, model_path: str
) -> None:
    sender = await link.join(ready, trainer.tensors, buffer_bytes=SMALL)
    for attempt in range(20):
        trainer.perturb(0.05)
        updating = asyncio.create_task(link.update(ready, PATIENCE))
        await asyncio.sleep(0.05)
        sampling = SamplingConfig(max_tokens=8)
        before = await generate(ready, Request(PROMPT, sampling, f"meanwhile-{attempt}"))
        assert set(before.weight_versions) == {0}
        send = partial(asyncio.to_thread, sender.send, 5, trainer.tensors)
        completion = await completed_across(ready, 400, f"in-flight-{attempt}", send)
        await updating
        if len(version_runs(completion)) > 1:
            break
        original = Model(model_path)  # it ended before the update came: the old weights again
        await ready.update_weights(shm.publish(0, original.tensors))
    first, second = version_runs(completion)
    assert (first.version, first.start, second.version, second.end) == (0, 0, 5, 400)
    expected = trainer.logprobs([*PROMPT, *completion.token_ids], len(PROMPT))
    assert completion.logprobs[second.start :] == pytest.approx(expected[second.start :], abs=1e-3)
    sender.close()


async def assert_old_weights_serve(engine: WorkerHandle) -> None:
    completion = await generate(engine, Request(PROMPT, SamplingConfig(max_tokens=4), "after"))
    assert completion.weight_versions == [0] * len(completion.token_ids)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_old_weights_serve_after_an_update_that_does_not_fit(
    ready: WorkerHandle, trainer: Model, link: Link, damage: str
) -> None:
    damaged = DAMAGES[damage][0](trainer.tensors)
    sender = await link.join(ready, damaged, buffer_bytes=SMALL, timeout=PATIENCE)
    message = words(damage, trainer.tensors)
    sending = asyncio.to_thread(sender.send, 7, damaged)
    errors = await asyncio.gather(sending, link.update(ready, PATIENCE), return_exceptions=True)
    for error in errors:
        with pytest.raises(WeightUpdateError, match=message):
            raise error or AssertionError("nobody refused")
    assert str(errors[1]).startswith("worker-0: ")
    await assert_old_weights_serve(ready)
    trainer.perturb(0.0)
    expected = trainer.logprobs(trainer.canary, 1)
    await check_canary(ready, trainer.canary, expected, 1e-4, 0)
    sender.close()


async def test_old_weights_serve_when_the_trainer_never_comes(
    ready: WorkerHandle, trainer: Model, link: Link
) -> None:
    sender = await link.join(ready, trainer.tensors)
    error = rf"worker-0: the trainer at {link.where} did not .* within 1 s"
    with pytest.raises(DeadlineError, match=error):
        await link.update(ready, 1.0)
    await assert_old_weights_serve(ready)
    sender.close()


async def test_a_dead_trainer_is_named_and_the_next_one_succeeds(
    ready: WorkerHandle, trainer: Model, link: Link
) -> None:
    tensors = [(name, tensor.detach() + 1) for name, tensor in trainer.tensors]
    options = {**link.options, "buffer_bytes": SMALL}
    arguments = (link.open_sender, tensors, len(tensors) // 2, options)
    assert share_with_engines()  # or the process would import torch and more for seconds
    process = multiprocessing.get_context("forkserver").Process(target=send_and_die, args=arguments)
    process.start()
    await link.join_engine(ready)
    with pytest.raises(DeadlineError, match=rf"trainer at {link.where} .* chunk \d+ of \d+"):
        await link.update(ready, PATIENCE)
    process.join()
    waiting = asyncio.create_task(
        generate(ready, Request(PROMPT, SamplingConfig(max_tokens=4), "waits"))
    )
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done  # half an update serves nobody
    link.close()
    again = type(link)()
    sender = await again.join(ready, trainer.tensors, buffer_bytes=SMALL)
    trainer.perturb(0.05)
    expected = trainer.logprobs(trainer.canary, 1)
    sending = asyncio.to_thread(sender.send, 2, trainer.tensors)
    await asyncio.gather(sending, again.update(ready, PATIENCE))
    assert (await check_canary(ready, trainer.canary, expected, 1e-4, 2))[1] < 1e-4
    assert set((await waiting).weight_versions) == {2}
    sender.close()
    again.close()


async def test_a_bad_tensor_is_named_and_the_next_update_mends_it(
    ready: WorkerHandle, trainer: Model, link: Link
) -> None:
    name, tensor = trainer.tensors[5]
    damaged = [*trainer.tensors]
    damaged[5] = (name, torch.zeros(3, *tensor.shape))
    info: dict[str, Any] = {name: (tuple(t.shape), "float32") for name, t in damaged}
    await ready._call("prepare_refit_info", info)
    sender = await link.join(ready, damaged, buffer_bytes=SMALL, timeout=PATIENCE)
    sending = asyncio.to_thread(sender.send, 3, damaged)
    errors = await asyncio.gather(sending, link.update(ready, PATIENCE), return_exceptions=True)
    for error in errors:
        with pytest.raises(WeightUpdateError, match=f"{name} cannot be loaded"):
            raise error or AssertionError("it was loaded")
    sender.close()
