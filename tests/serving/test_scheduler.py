"""Routing and continuation, on simulated engines and a virtual clock."""

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.simulated import SimulatedEngine
from tests.virtual_time import run_virtually
from turnwise.config import SamplingConfig, ServingConfig
from turnwise.engine import Request, Route, generate
from turnwise.errors import DeadlineError, EngineError
from turnwise.serving.scheduler import Scheduler, remaining
from turnwise.weights.manifest import Manifest

SAMPLING = SamplingConfig(max_tokens=128)
PROMPT = list(range(1, 211))
"""Answered at full length."""


def fleet(
    workers: int = 2, turn_timeout: float = 60.0, **serving: float
) -> tuple[Scheduler, list[SimulatedEngine]]:
    engines = [SimulatedEngine(name=f"worker-{index}") for index in range(workers)]
    scheduler = Scheduler(ServingConfig(**serving), turn_timeout)  # type: ignore[arg-type]
    for engine in engines:
        scheduler.add(engine.name, engine)
    return scheduler, engines


@dataclass
class Traffic:
    """Loads that a study saw while new sessions were still arriving."""

    loads: list[float]
    events: Counter[str]
    turns: list[int]
    cached: float

    def balance(self, first: int = 0) -> float:
        """The smallest load by the largest, of the workers from `first` on."""
        return min(self.loads[first:]) / max(self.loads[first:])

    @property
    def at_home(self) -> float:
        """The share of turns that ran on their session's worker."""
        moved = sum(self.events[f"moved_{why}"] for why in ("overload", "slow", "gone"))
        return 1 - moved / self.events["turns"]


async def long_tailed_sessions(slowdown: float, seed: int, concurrency: int = 512) -> Traffic:
    """2,000 sessions in groups of 8, of 1 to 12 turns, whose tools take 0.3 s to a minute."""
    scheduler, engines = fleet(8)
    engines[0].slowdown = slowdown
    generator = random.Random(seed)
    plans = [
        [min(60.0, 0.3 * generator.paretovariate(1.3)) for _ in range(generator.randint(1, 12))]
        for _ in range(2000)
    ]
    slots = asyncio.Semaphore(concurrency)
    loads: list[float] = []

    async def session(index: int, tools: list[float]) -> None:
        async with slots:
            if index == len(plans) - 1:
                now = asyncio.get_running_loop().time()
                for worker in scheduler.workers.values():
                    scheduler._router.add_load(worker, 0.0, now)
                loads.extend(worker.load_seconds / now for worker in scheduler.workers.values())
            prompt = [(index // 8 * 31 + i) % 997 + 1 for i in range(200)]
            route = Route(f"session-{index}", f"group-{index // 8}")
            for turn, seconds in enumerate(tools):
                completion = await generate(
                    scheduler, Request(prompt, SAMPLING, f"{index}-{turn}", route=route)
                )
                prompt = [*prompt, *completion.token_ids, *[5] * 40]
                await asyncio.sleep(seconds)

    await asyncio.gather(*(session(index, tools) for index, tools in enumerate(plans)))
    return Traffic(
        loads,
        scheduler.events,
        [worker.turns for worker in scheduler.workers.values()],
        sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines),
    )


@pytest.mark.parametrize("slowdown", [1.0, 4.0], ids=["alike", "one-four-times-slower"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_load_is_even_and_sessions_stay_at_home(slowdown: float, seed: int) -> None:
    """By `serving.overload`."""
    traffic = run_virtually(long_tailed_sessions(slowdown, seed))
    assert traffic.balance(int(slowdown > 1)) >= 0.9, traffic.loads
    assert traffic.at_home >= 0.95, traffic.events
    assert traffic.cached > 0.8
    assert (traffic.events["moved_slow"] > 0) == (slowdown > 1)
    if slowdown > 1:
        assert traffic.turns[0] < 0.2 * min(traffic.turns[1:])


def test_a_worker_that_is_no_longer_slow_gets_its_share_again() -> None:
    async def study() -> tuple[float, float]:
        scheduler, engines = fleet(4)
        names = iter(range(10**6))

        async def turns(count: int) -> float:
            """The share of a quarter of the turns that the first worker gets."""
            workers = scheduler.workers.values()
            before = [worker.turns for worker in workers]
            end = next(names) + count

            async def lane() -> None:
                while (number := next(names)) < end:
                    route = Route(f"session-{number}")
                    await generate(
                        scheduler, Request([number, 2, 3], SAMPLING, f"{number}", route=route)
                    )

            await asyncio.gather(*(lane() for _ in range(16)))
            new = [worker.turns - n for worker, n in zip(workers, before, strict=True)]
            return new[0] / sum(new) * 4

        engines[0].slowdown = 4.0
        slow = await turns(2000)
        engines[0].slowdown = 1.0
        await turns(4000)
        return slow, await turns(2000)

    slow, recovered = run_virtually(study())
    assert slow < 0.5
    assert recovered > 0.8


def test_a_groups_first_turns_share_one_workers_prompt_cache() -> None:
    async def work() -> None:
        scheduler, engines = fleet(4)
        await asyncio.gather(
            *(
                generate(
                    scheduler, Request(PROMPT, SAMPLING, f"r{i}", route=Route(f"s{i}", "group"))
                )
                for i in range(4)
            )
        )
        assert sorted(w.turns for w in scheduler.workers.values()) == [0, 0, 0, 4]
        assert sum(engine.cached_tokens for engine in engines) == 3 * 192

    run_virtually(work())


def test_the_session_that_was_used_longest_ago_is_forgotten() -> None:
    """The sessions and groups used last are remembered, `serving.known_sessions` of them."""

    async def work() -> None:
        scheduler, _ = fleet(known_sessions=2)

        async def turn(session: str, group: str = "") -> None:
            await generate(
                scheduler, Request(PROMPT, SAMPLING, session, route=Route(session, group))
            )

        await turn("a", "g")
        await turn("b", "h")
        await turn("a", "g")
        assert scheduler.events["sticky"] == 1
        await turn("c", "i")
        assert list(scheduler._router.sessions) == ["a", "c"]
        assert list(scheduler._router.groups) == ["g", "i"]
        await turn("a")
        assert scheduler.events["sticky"] == 2
        await turn("b")
        assert scheduler.events["sticky"] == 2
        assert list(scheduler._router.sessions) == ["a", "b"]

    run_virtually(work())


def test_requests_without_a_session_spread_evenly() -> None:
    async def work() -> None:
        scheduler, _ = fleet(4)
        for index in range(40):
            await generate(scheduler, Request(PROMPT, SAMPLING, f"r{index}"))
        assert [w.turns for w in scheduler.workers.values()] == [10, 10, 10, 10]

    run_virtually(work())


@pytest.mark.parametrize("way", ["die", "hang"])
def test_turns_of_a_failed_worker_continue_without_token_loss(way: str) -> None:
    async def work() -> None:
        scheduler, engines = fleet(2)
        reference = SimulatedEngine()
        prompts = [[*PROMPT, index] for index in range(1, 65)]
        turns = [
            asyncio.create_task(generate(scheduler, Request(prompt, SAMPLING, f"r{index}")))
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0.3)
        if way == "hang":
            engines[0].hang()
            await asyncio.sleep(5.0)
        engines[0].die()
        for prompt, turn in zip(prompts, turns, strict=True):
            completion = await turn
            assert completion.token_ids == reference.expected(prompt, SAMPLING.max_tokens)
            assert len(completion.logprobs) == len(completion.token_ids)
        assert scheduler.events["continued"] > 0
        assert scheduler.workers["worker-0"].usable is False
        assert scheduler.workers["worker-0"].load == 0

    run_virtually(work())


def test_a_continued_turn_has_the_scores_of_its_prompt_alone() -> None:
    async def work() -> None:
        sampling = SAMPLING.model_copy(update={"prompt_logprobs": True})
        scheduler, engines = fleet(2)
        turn = asyncio.create_task(
            generate(scheduler, Request(PROMPT, sampling, "r", route=Route("s")))
        )
        await asyncio.sleep(0.3)
        (busy,) = [engine for engine in engines if await engine.num_in_flight()]
        busy.die()
        completion = await turn
        assert scheduler.events["continued"] == 1
        assert completion.token_ids == busy.expected(PROMPT, SAMPLING.max_tokens)
        alone = await generate(SimulatedEngine(), Request(PROMPT, sampling, "alone"))
        assert completion.prompt_logprobs == alone.prompt_logprobs
        assert completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == len(PROMPT)

    run_virtually(work())


class Noting:
    """A supervisor that notes which worker failed, and finds out nothing."""

    def __init__(self, name: str, failures: list[str]) -> None:
        self._name, self._failures = name, failures

    def report_failure(self, why: str) -> None:
        self._failures.append(self._name)

    def excuse_death(self) -> None: ...


def test_a_dead_worker_attracts_nothing_until_it_is_restored() -> None:
    async def work() -> None:
        failures: list[str] = []
        scheduler, engines = fleet(2)
        for worker in scheduler.workers.values():
            worker.supervisor = Noting(worker.name, failures)
        engines[0].die()
        for index in range(20):
            await generate(
                scheduler, Request(PROMPT, SAMPLING, f"r{index}", route=Route(f"s{index}"))
            )
        assert failures == ["worker-0"]
        assert scheduler.workers["worker-0"].turns == 1
        scheduler.add("worker-0", SimulatedEngine(name="worker-0"))
        for index in range(20):
            await generate(scheduler, Request(PROMPT, SAMPLING, f"t{index}"))
        assert scheduler.workers["worker-0"].turns > 5

    run_virtually(work())


class Fragile(SimulatedEngine):
    """Dies soon after it gets a prompt that holds `POISON`, and fails one that holds `BAD`."""

    async def stream(self, request: Request) -> Any:
        if POISON in request.prompt.tolist():
            asyncio.get_running_loop().call_later(0.001, self.die)
        if BAD in request.prompt.tolist():
            raise EngineError(f"{self.name} cannot compute this")
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


POISON, BAD = 666, 667


def fragile(workers: int, **serving: int) -> Scheduler:
    scheduler = Scheduler(ServingConfig(**serving), 60.0)  # type: ignore[arg-type]
    for index in range(workers):
        scheduler.add(f"worker-{index}", Fragile(name=f"worker-{index}"))
    return scheduler


def test_a_turn_is_continued_at_most_so_often() -> None:
    async def work() -> None:
        scheduler = fragile(4, max_continuations=0)
        with pytest.raises(EngineError, match="r0 failed on 1 workers; the last: worker-0 died"):
            await generate(scheduler, Request([POISON, *PROMPT], SAMPLING, "r0"))

    run_virtually(work())


def test_a_request_that_ends_two_workers_is_refused_for_a_while() -> None:
    async def work() -> None:
        scheduler = fragile(5)
        poison = [POISON, *PROMPT]
        with pytest.raises(
            EngineError, match=r"crashed 2 workers \(worker-0, worker-1\) and is not"
        ):
            await generate(scheduler, Request(poison, SAMPLING, "r0"))
        with pytest.raises(EngineError, match=r"r1 is refused for another 600 s: the same prompt"):
            await generate(scheduler, Request(poison, SAMPLING, "r1"))
        assert [w.usable for w in scheduler.workers.values()] == [False, False, True, True, True]
        await generate(scheduler, Request(PROMPT, SAMPLING, "honest"))
        await asyncio.sleep(600.0)
        with pytest.raises(EngineError, match=r"r2 crashed 2 workers \(worker-"):
            await generate(scheduler, Request(poison, SAMPLING, "r2"))
        assert scheduler.events["quarantined"] == 2

    run_virtually(work())


def test_what_is_known_of_such_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.serving.scheduler._MAX_QUARANTINED", 2)

    async def work() -> None:
        scheduler = fragile(8)
        for index in range(3):
            with pytest.raises(EngineError, match="crashed 2 workers"):
                await generate(scheduler, Request([POISON, index + 1], SAMPLING, f"r{index}"))
        assert len(scheduler._quarantined) == 2
        with pytest.raises(EngineError, match="crashed 2 workers"):  # forgotten, so it is tried
            await generate(scheduler, Request([POISON, 1], SAMPLING, "again"))

    run_virtually(work())


def test_those_who_die_with_it_finish_all_the_same() -> None:
    async def work() -> None:
        scheduler = fragile(1)

        async def renew() -> None:
            for _ in range(1000):
                await asyncio.sleep(0.5)
                if not scheduler.workers["worker-0"].usable:
                    scheduler.add("worker-0", Fragile(name="worker-0"))

        renewing = asyncio.create_task(renew())
        honest = [
            asyncio.create_task(
                generate(scheduler, Request([*PROMPT, index + 1], SAMPLING, f"r{index}"))
            )
            for index in range(8)
        ]
        with pytest.raises(EngineError, match="poison crashed 3 workers"):
            await generate(scheduler, Request([POISON, *PROMPT], SAMPLING, "poison"))
        for index, turn in enumerate(honest):
            expected = SimulatedEngine().expected([*PROMPT, index + 1], SAMPLING.max_tokens)
            assert (await turn).token_ids == expected
        assert scheduler.events["quarantined"] == 1
        renewing.cancel()

    run_virtually(work())


def test_a_turn_that_came_to_a_dead_worker_did_not_end_it() -> None:
    async def work() -> None:
        scheduler, engines = fleet(4)
        for engine in engines[:3]:
            engine.die()
        completion = await generate(scheduler, Request(PROMPT, SAMPLING, "r0"))
        assert completion.token_ids == engines[3].expected(PROMPT, SAMPLING.max_tokens)
        assert scheduler.events["quarantined"] == 0

    run_virtually(work())


def test_a_turn_waits_for_a_worker_until_its_deadline() -> None:
    async def work() -> None:
        scheduler, _ = fleet(0, turn_timeout=10.0)
        late = asyncio.create_task(generate(scheduler, Request(PROMPT, SAMPLING, "early")))
        await asyncio.sleep(5.0)
        scheduler.add("worker-0", SimulatedEngine())
        assert (await late).token_ids
        scheduler.remove("worker-0")
        with pytest.raises(DeadlineError, match="alone found no live worker within 10 s"):
            await generate(scheduler, Request(PROMPT, SAMPLING, "alone"))
        scheduler.close("worker-0 failed: no memory")
        with pytest.raises(EngineError, match="no worker left: worker-0 failed: no memory"):
            await generate(scheduler, Request(PROMPT, SAMPLING, "after"))

    run_virtually(work())


def test_a_turn_aborted_by_an_update_continues_on_new_weights() -> None:
    async def work() -> None:
        scheduler, engines = fleet(1)
        turn = asyncio.create_task(generate(scheduler, Request(PROMPT, SAMPLING, "r")))
        await asyncio.sleep(0.1)
        await engines[0].update_weights(Manifest(1, "shm", "", 0, ()), "abort")
        completion = await turn
        assert completion.token_ids == engines[0].expected(PROMPT, SAMPLING.max_tokens)
        assert len(completion.token_ids) == SAMPLING.max_tokens
        assert sorted(completion.weight_versions) == completion.weight_versions
        assert set(completion.weight_versions) == {0, 1}
        assert scheduler.events["aborted_by_update"] == 1

    run_virtually(work())


def test_what_depends_on_the_tokens_before_begins_anew() -> None:
    async def work() -> None:
        sampling = SAMPLING.model_copy(update={"stop": ["\n"]})
        scheduler, engines = fleet(2)
        whole = asyncio.create_task(generate(scheduler, Request(PROMPT, sampling, "r")))
        streamed = asyncio.create_task(_drain(scheduler, sampling))
        await asyncio.sleep(0.3)
        for engine in engines:
            if await engine.num_in_flight():
                engine.die()
        scheduler.add("worker-2", SimulatedEngine())
        assert (await whole).token_ids == engines[0].expected(PROMPT, SAMPLING.max_tokens)
        with pytest.raises(EngineError, match="cannot be continued elsewhere"):
            await streamed
        assert scheduler.events["restarted"] == 2

    async def _drain(scheduler: Scheduler, sampling: SamplingConfig) -> None:
        async for _ in scheduler.stream(Request(PROMPT, sampling, "streamed")):
            pass

    run_virtually(work())


def test_the_rest_of_a_turn_keeps_its_budget() -> None:
    sampling = SamplingConfig(max_tokens=20, min_tokens=10)
    request = Request(PROMPT, sampling, "r")
    rest = remaining(request, 16)
    assert rest is not None
    assert (rest.max_tokens, rest.min_tokens, rest.temperature) == (4, 0, 1.0)
    assert remaining(replace(request, seed=1), 16) is None
    stopped = sampling.model_copy(update={"stop": ["x"]})
    assert remaining(replace(request, sampling=stopped), 16) is None
    assert remaining(replace(request, seed=1), 0) is sampling


def test_a_completion_names_its_worker_and_first_token_time() -> None:
    async def study() -> None:
        scheduler, engines = fleet(2)
        before = time.time()
        made = await generate(scheduler, Request(PROMPT, SAMPLING, "request-1"))
        assert made.worker in {engine.name for engine in engines}
        assert made.first_token_at is not None
        assert before <= made.first_token_at <= time.time()

    run_virtually(study())
