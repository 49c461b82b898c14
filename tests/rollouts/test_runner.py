"""The runner on a simulated engine: tries, their tokens and seconds, and prompts that are left out.

The engine's tokens mean nothing; what the tests look at does not depend on them.
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.blocking import NeverIdle, gate, new_gate, tick
from tests.simulated import Latency, SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.core import aio
from turnwise.core import user_code as tasks
from turnwise.core.user_code import stuck_calls
from turnwise.core.watchdog import watching_progress
from turnwise.engine.protocol import Chunk, Request
from turnwise.errors import EngineError, InputError, StepError
from turnwise.rollouts import Group, Problem, RolloutContext, Runner, check_failures
from turnwise.rollouts import runner as runner_module
from turnwise.rollouts.loops import SingleTurnLoop
from turnwise.trajectory import Trajectory

HERE = "tests.rollouts.test_runner"


class Desk:
    """The first `fails` rewards of a row fail."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = [{"role": "user", "content": row["question"]}]
        self.tools: list[Callable[..., Any]] = []
        self.row = row

    def reward(self, trajectory: Trajectory) -> float:
        number = next(self.row["tries"])
        if number <= self.row.get("fails", 0):
            raise ValueError(f"failure {number}")
        time.sleep(self.row.get("takes", 0.0))
        if "until" in self.row:
            assert self.row["until"].wait(300)
        return 1.0


class Bench(Desk):
    """A desk with a tool."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.tools = [self.double]

    def double(self, x: int) -> int:
        """Double a number.

        Args:
            x: The number.
        """
        return 2 * x


@pytest.fixture
def _gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(tasks, "BLOCKED_SECONDS", 0.3)
    gate = new_gate()
    yield
    gate.set()


def misbehave(how: str) -> None:
    if how == "block":
        gate().wait()
    if how == "raise":
        raise ValueError("the judge is down")
    if how == "exit":
        sys.exit(3)
    if how == "cancel":
        raise asyncio.CancelledError


class Rough:
    """Does what its row says where its row says it."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.at("init")

    def at(self, place: str) -> None:
        if self.row["where"] == place:
            misbehave(self.row["how"])

    @property
    def problem(self) -> list[dict[str, str]]:
        self.at("problem")
        return [{"role": "user", "content": "Go."}]

    @property
    def tools(self) -> list[Any]:
        self.at("tools")
        return []

    async def reward(self, trajectory: Trajectory) -> float:
        self.at("reward")
        return 1.0


class RoughLoop(SingleTurnLoop):
    async def run(self, environment: Any, context: RolloutContext) -> None:
        await super().run(environment, context)
        if environment.row["where"] == "loop":
            if environment.row["how"] != "block":
                misbehave(environment.row["how"])
            own = gate()
            while not own.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.02)


class Listening(SimulatedEngine):
    """Remembers what it was asked for; its first requests may be refused."""

    def __init__(self, refuses: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[tuple[str, int | None, str, str]] = []
        self.refuses = refuses

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request.id, request.seed, request.route.session, request.route.group))
        if len(self.asked) <= self.refuses:
            raise EngineError("out of order")
        return super().stream(request)


@pytest.fixture
def run(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Any]:
    async def run(
        row: dict[str, Any],
        n: int = 4,
        engine: SimulatedEngine | None = None,
        deterministic: bool = False,
        environment: str = "Desk",
        output_dir: str = "",
        **rollout: Any,
    ) -> Group:
        config = make_config(
            environment=f"{HERE}:{environment}",
            **({"output_dir": output_dir} if output_dir else {}),
            rollout={"loop": "single_turn", **rollout},
            deterministic=deterministic,
        )
        engine = engine or SimulatedEngine(vocab_size=len(tokenizer))
        problem = Problem("rows:1", {"question": "Go.", "tries": itertools.count(1), **row})
        sampling = SamplingConfig(n=n, max_tokens=8)
        return await Runner(config, tokenizer).run_group(engine, problem, sampling, "step1.0")

    return run


class Crowd(SimulatedEngine):
    """Remembers the largest number of requests at a time."""

    running = most = 0

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for chunk in super().stream(request):
                yield chunk
        finally:
            self.running -= 1


async def test_runners_of_two_environments_share_the_admission(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    config = make_config(
        environment=f"{HERE}:Desk", rollout={"loop": "single_turn", "concurrency": 2}
    )
    runner = Runner(config, tokenizer)
    runner.tool_parser = None  # type: ignore[assignment]  # nothing is parsed here
    other = runner.with_environment(Desk, SingleTurnLoop())
    engine = Crowd(vocab_size=len(tokenizer))
    sampling = SamplingConfig(n=4, max_tokens=8)
    problem = Problem("rows:1", {"question": "Go.", "tries": itertools.count(1)})

    groups = await asyncio.gather(
        runner.run_group(engine, problem, sampling, "one"),
        other.run_group(engine, problem, sampling, "other"),
    )

    assert [len(group.trajectories) for group in groups] == [4, 4]
    assert engine.most == 2


async def test_a_failed_try_is_made_good_by_another(run: Callable[..., Any]) -> None:
    group = await run({"fails": 5}, retries=2, concurrency=1)
    assert [t.sample_index for t in group.trajectories] == [1, 2, 3]
    assert all(t.reward == 1.0 and len(t.turns) == 1 for t in group.trajectories)
    assert group.retried == {"reward_error": 4}
    assert group.dropped == {"reward_error": 1}
    assert "failure 1" in group.causes["reward_error"]


async def test_a_complete_group_counts_what_its_failed_tries_sampled(
    run: Callable[..., Any], tokenizer: Any
) -> None:
    engine = Listening(vocab_size=len(tokenizer), mean_tokens=10**9)
    group = await run({"fails": 3}, engine=engine, retries=3, concurrency=1)
    assert len(group.trajectories) == 4
    assert group.dropped == {}
    assert group.retried == {"reward_error": 3}
    assert group.dropped_tokens == {"reward_error": 3 * 8}
    assert sum(t.sampled_tokens for t in group.trajectories) == 4 * 8
    assert check_failures([group], 0.01, "rollouts") == {}


async def test_without_retries_a_failure_is_final(run: Callable[..., Any]) -> None:
    group = await run({"fails": 99})
    assert (group.retried, group.dropped) == ({}, {"reward_error": 4})
    with pytest.raises(StepError, match="4 of 4 trajectories failed"):
        check_failures([group], 0.5, "rollouts")


async def test_each_try_of_a_group_has_its_own_name_and_seed(
    run: Callable[..., Any], tokenizer: Any
) -> None:
    engine = Listening(refuses=3, vocab_size=len(tokenizer))
    group = await run({}, n=2, engine=engine, retries=3, deterministic=True)
    assert group.retried == {"engine_error": 3}
    requests, seeds, sessions, groups = zip(*engine.asked, strict=True)
    assert len(set(requests)) == len(set(seeds)) == len(set(sessions)) == 5
    assert set(groups) == {"step1.0-rows:1"}
    first = sorted(sessions)[0]
    assert first == "step1.0-rows:1-0"


async def test_a_try_that_hangs_has_its_own_deadline(run: Callable[..., Any]) -> None:
    group = await run({"takes": 60.0}, n=1, retries=1, trajectory_timeout=0.2)
    assert (group.retried, group.dropped) == ({"trajectory_timeout": 1}, {"trajectory_timeout": 1})
    assert 0.4 <= group.elapsed < 60


async def test_turns_may_take_longer_than_a_stall(run: Callable[..., Any], tokenizer: Any) -> None:
    """A trajectory ends when nothing of it moves, however long its turns are."""
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=10**9)
    engine.slowdown = 100
    group = await run({"takes": 0.2}, n=2, engine=engine, stall_timeout=1.5)
    assert group.dropped == {}
    assert group.seconds["generate"] > 2 * 2 * 1.5
    stalled = await run({"takes": 60.0}, n=1, stall_timeout=0.5)
    assert stalled.dropped == {"reward_error": 1}
    late = "the environment's reward did not answer within 0.5 s (rollout.stall_timeout)"
    assert stalled.causes["reward_error"].endswith(late)


async def test_a_group_tells_where_its_time_went(run: Callable[..., Any], tokenizer: Any) -> None:
    engine = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=10**9)
    engine.slowdown = 5
    group = await run({"takes": 0.2}, n=32, engine=engine)
    assert set(group.seconds) == {"generate", "reward"}
    assert group.seconds["reward"] >= 32 * 0.2
    assert group.seconds["generate"] >= 32 * 8 * 4e-3 * 5 * 0.9
    assert group.elapsed < sum(group.seconds.values()), "they ran side by side"


async def test_a_watchdog_hears_who_a_trajectory_waits_for(
    run: Callable[..., Any], tokenizer: Any
) -> None:
    told: list[str] = []
    rewards, answers = (
        "waiting for: 2 rewards (environment of rows:1 for ",
        "waiting for: 3 answers (turn 0 of step1.0-rows:1-",
    )
    heard = {rewards: threading.Event(), answers: threading.Event()}

    def hear(line: str) -> None:
        told.append(line)
        for text, event in heard.items():
            if text in line:
                event.set()

    class Patient(SimulatedEngine):
        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            assert await asyncio.to_thread(heard[answers].wait, 300), told
            async for chunk in super().stream(request):
                yield chunk

    async with watching_progress(0.2, hear):
        assert (await run({"until": heard[rewards]}, n=2)).dropped == {}, told
        engine = Patient(vocab_size=len(tokenizer), mean_tokens=10**9)
        assert (await run({}, n=3, engine=engine)).dropped == {}, told


class Saying(SimulatedEngine):
    """Says a text again and again."""

    def __init__(self, token_ids: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.said = token_ids

    def _sample(
        self, prompt_token_ids: Sequence[int], max_tokens: int
    ) -> tuple[list[int], list[float]]:
        return [*self.said, 0], [-0.1] * (len(self.said) + 1)


@pytest.mark.parametrize(
    ("loop", "parser", "said", "events", "content"),
    [
        ("tool_calling", "pythonic", "[double(x=1", 2, "write it again, complete"),
        ("tool_calling", "hermes", '<tool_call>{"name": "dou', 2, "one JSON object with name and"),
        ("interleaved", "hermes", '<tool_call>{"name": "dou', 1, ""),
    ],
)
async def test_a_call_that_is_cut_is_answered_and_trained(
    run: Callable[..., Any],
    tokenizer: Any,
    loop: str,
    parser: str,
    said: str,
    events: int,
    content: str,
) -> None:
    engine = Saying(tokenizer.encode(said, add_special_tokens=False), vocab_size=len(tokenizer))
    group = await run(
        {}, engine=engine, environment="Bench", loop=loop, tool_parser=parser, max_turns=2
    )
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert trajectory.events == {"tool_malformed": events}
        assert trajectory.reward == 1.0
        answers = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
        assert len(answers) == (events if content else 0)
        assert all(content in answer for answer in answers)


async def test_a_call_that_takes_too_long_to_parse_counts_as_malformed(
    run: Callable[..., Any], tokenizer: Any
) -> None:
    slow = "<tool_call>double\n" + "<arg_key>x</arg_key><arg_value>" * 800 + "</tool_call>"
    said = tokenizer.encode(slow, add_special_tokens=False)
    engine = Saying(said, vocab_size=len(tokenizer), latency=Latency(0.0, 0.0, 0.0))
    options = {"environment": "Bench", "loop": "tool_calling", "tool_parser": "glm45"}
    group = await run({}, engine=engine, max_turns=1, n=2, **options)
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert trajectory.events == {"tool_malformed": 1, "parse_timeout": 1}


async def test_tools_that_run_together_count_once(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    from turnwise.chat.tool_parser import ParsedText, ToolCall
    from turnwise.rollouts.agent_loop import RolloutContext
    from turnwise.rollouts.episode import Episode
    from turnwise.rollouts.loops import answer_calls
    from turnwise.tools.toolbox import Toolbox

    running, met = 0, asyncio.Event()

    async def nap() -> str:
        """Wait for the others."""
        nonlocal running
        running += 1
        if running == 3:
            met.set()
        await met.wait()
        await asyncio.sleep(0.05)
        return "awake"

    config = make_config()
    runner = Runner(config, tokenizer)
    episode = Episode(Desk, Problem("rows:1", {}), config.rollout)
    episode.toolbox = Toolbox([nap], timeout=60, max_chars=99)
    context = RolloutContext(
        trajectory=Trajectory("rows:1"),
        engine=SimulatedEngine(),
        template=runner.template,
        tool_parser=None,  # type: ignore[arg-type]  # nothing is parsed here
        rollout=config.rollout,
        sampling=config.sampling,
        max_length=512,
        request_id="r",
        row={},
        episode=episode,
    )
    parsed = ParsedText("", [ToolCall("nap", "{}")] * 3, malformed=False)
    started = time.perf_counter()
    messages = await answer_calls(parsed, context, 0)
    elapsed = time.perf_counter() - started
    assert [message["content"] for message in messages] == ["awake"] * 3
    assert 0.05 <= context.seconds["tools"] <= elapsed


@pytest.mark.parametrize("process", [False, True], ids=["in a thread", "in a process"])
async def test_a_momentary_lack_of_threads_ends_no_run(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, process: bool
) -> None:
    options = {"environment": "Desk", "environment_process": process}
    row = {"question": "?", "tries": itertools.count(1)} if not process else {"question": "?"}
    starts = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "turnwise-call":
            raise RuntimeError("can't start new thread")
        starts(thread)

    began = time.monotonic()
    with monkeypatch.context() as lacking:
        lacking.setattr(aio, "_idle_threads", NeverIdle())
        lacking.setattr(aio, "_THREAD_SECONDS", 0.5)  # each of several calls waits for a thread
        lacking.setattr(threading.Thread, "start", start)
        group = await run(row, n=2, **options)
    assert dict(group.dropped) == {"system_error" if process else "environment_error": 2}
    (cause,) = group.causes.values()
    assert ("no thread can be started" if process else "BlockingIOError") in cause
    assert stuck_calls(began) == ""


async def test_an_error_of_nobody_costs_its_trajectory(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def episode(*_: object) -> None:
        raise KeyError("\x1b[2Jnot foreseen")

    monkeypatch.setattr(runner_module.Stage, "episode", episode)
    group = await run({"question": "?"}, n=2, environment="Desk", output_dir=str(tmp_path))
    assert dict(group.dropped) == {"unexpected_error": 2}
    assert r"\x1b[2Jnot foreseen" in errors_logged(tmp_path)


def errors_logged(folder: Path) -> str:
    (log,) = folder.rglob("errors.log")
    return log.read_text()


@pytest.mark.parametrize("where", ["init", "problem", "tools", "reward", "loop"])
@pytest.mark.parametrize("how", ["raise", "exit", "cancel", "block"])
@pytest.mark.usefixtures("_gate")
async def test_failing_user_code_costs_only_its_trajectory(
    run: Callable[..., Any], tmp_path: Path, where: str, how: str
) -> None:
    began, ticks = time.monotonic(), list[None]()
    ticking = asyncio.create_task(tick(ticks))
    options = {"environment": "Rough", "loop": f"{HERE}:RoughLoop", "output_dir": str(tmp_path)}
    limit = 120.0
    if how == "block":  # time enough to come to the place
        limit = 3.0 if where in ("reward", "loop") else 0.3
    async with asyncio.timeout(120):
        row = {"where": where, "how": how}
        patience = {"stall_timeout": limit, "environment_timeout": limit}
        group = await run(row, n=2, **patience, **options)
    ticking.cancel()
    reason = {"reward": "reward_error", "loop": "loop_error"}.get(where, "environment_error")
    if how == "block":
        late = {"reward": "reward_error", "loop": "stalled"}.get(where, "environment_timeout")
        assert group.dropped == {late: 2}
        assert len(ticks) > 1, "the event loop went on"
        name = {"reward": "the environment's reward", "loop": "the loop "}.get(where)
        assert (name or "the environment of rows:1") in stuck_calls(began)
        return
    said = {
        "raise": "ValueError: the judge is down",
        "exit": "RuntimeError: raised SystemExit(3)",
        "cancel": "RuntimeError: raised CancelledError()",
    }[how]
    assert group.dropped == {reason: 2}
    assert said in group.causes[reason]
    assert "(tests/rollouts/test_runner.py:" in group.causes[reason]
    log = errors_logged(tmp_path)
    assert log.count(f"first {reason}: step1.0-rows:1-") == log.count(said) == 1
    assert "in misbehave" in log


@pytest.mark.usefixtures("_gate")
def test_the_check_of_a_blocking_environment_has_a_deadline(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    runner, patient = (
        Runner(
            make_config(environment=f"{HERE}:Rough", rollout={"environment_timeout": seconds}),
            tokenizer,
        )
        for seconds in (0.1, 120)
    )
    with pytest.raises(InputError, match=r"the environment of rows:1 did not answer within 0\.1 s"):
        runner.within_prompt_limit([Problem("rows:1", {"where": "init", "how": "block"})])
    with pytest.raises(InputError, match=r"rows:1: .* ValueError: the judge is down \(tests/"):
        patient.within_prompt_limit([Problem("rows:1", {"where": "problem", "how": "raise"})])


def rows(*words: int) -> list[Problem]:
    return [
        Problem(f"rows.jsonl:{number}", {"question": "1 " * count})
        for number, count in enumerate(words, start=1)
    ]


def test_rows_with_long_prompts_are_left_out_and_counted(
    make_config: Callable[..., Config], tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_config().data.model_dump() | {"max_prompt_tokens": 100}
    runner = Runner(make_config(environment=f"{HERE}:Desk", data=data), tokenizer)
    problems = rows(5, 300, 10, 2000)
    with caplog.at_level(logging.WARNING):
        assert runner.within_prompt_limit(problems) == [problems[0], problems[2]]
    assert "2 of 4 rows have prompts of more than 100 tokens" in caplog.text
    assert [(runner.check(problem) or 0) > 100 for problem in problems[:3]] == [False, True, False]
    with pytest.raises(InputError, match=r"2 of 2 rows .* \(data\.max_prompt_tokens\), and none"):
        runner.within_prompt_limit(rows(300, 400))


def test_without_a_limit_a_prompt_that_does_not_fit_is_an_error(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    runner = Runner(make_config(environment=f"{HERE}:Desk"), tokenizer)
    assert runner.within_prompt_limit(rows(5, 10)) == rows(5, 10)
    with pytest.raises(InputError, match=r"rows\.jsonl:2: its prompt of \d+ tokens does not fit"):
        runner.within_prompt_limit(rows(5, 2000))


class Brief(Bench):
    """A bench with a system message."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.problem = [{"role": "system", "content": "Be brief."}, *self.problem]


QUESTION = Problem("rows.jsonl:1", {"question": "Twice 4?", "tries": itertools.count(1)})
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"

NO_RESULTS = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("environment", "chat_template", "rollout", "message"),
    [
        ("Bench", "chatml", {}, r"leaves out the tools.*rollout\.tools_in_prompt"),
        ("Bench", "chatml", {"loop": "interleaved"}, "leaves out the tools"),
        ("Bench", "chatml", {"tools_in_prompt": False}, ""),
        ("Bench", "chatml", {"loop": "single_turn"}, ""),
        ("Bench", "chatml", {"loop": f"{HERE}:RoughLoop"}, ""),
        ("Bench", "chatml", {"loop": "agent", "agent": "http://127.0.0.1:9/"}, ""),
        ("Bench", "hermes", {}, ""),
        ("Desk", "chatml", {}, ""),
        ("Brief", NO_SYSTEM, {"loop": "single_turn"}, "leaves out messages of the role system"),
        ("Bench", NO_RESULTS, {"tools_in_prompt": False}, "leaves out the results of tools"),
    ],
)
def test_the_check_fails_if_the_template_drops_tools_or_messages(
    make_config: Callable[..., Config],
    model_path: str,
    tokenizer: Any,
    environment: str,
    chat_template: str,
    rollout: dict[str, Any],
    message: str,
) -> None:
    config = make_config(
        environment=f"{HERE}:{environment}",
        model={"path": model_path, "max_length": 512, "chat_template": chat_template},
        rollout=rollout,
    )
    runner = Runner(config, tokenizer)
    if not message:
        assert runner.check(QUESTION)
        return
    with pytest.raises(InputError, match=rf"^rows\.jsonl:1: .*{message}"):
        runner.check(QUESTION)


def test_tools_described_by_hand_are_no_part_of_a_prompts_length(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    shown, by_hand = (
        Runner(
            make_config(environment=f"{HERE}:Bench", rollout={"tools_in_prompt": in_prompt}),
            tokenizer,
        ).check(QUESTION)
        for in_prompt in (True, False)
    )
    assert shown is not None
    assert by_hand is not None
    assert shown > by_hand + 20


def test_a_template_whose_end_of_turn_is_no_stop_is_warned_of(
    make_config: Callable[..., Config],
    model_path: str,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    end = tokenizer.convert_tokens_to_ids("</think>")
    text = "{% for m in messages %}{{ m.role + m.content }}</think>{% endfor %}"
    header = "{% for m in messages %}</think>{{ m.role + m.content }}{% endfor %}"
    model = {"path": model_path, "max_length": 512}
    for sampling, warns, template in (
        ({}, True, text),
        ({"stop_token_ids": [end]}, False, text),
        ({}, True, header),  # the next message's header alone ends a turn
        ({"stop_token_ids": [end]}, False, header),
    ):
        model["chat_template"] = template
        config = make_config(environment=f"{HERE}:Desk", model=model, sampling=sampling)
        caplog.clear()
        runner = Runner(config, tokenizer)
        for _ in range(2):
            runner.check(QUESTION)
        assert caplog.text.count(f"set sampling.stop_token_ids to [{end}]") == warns
    model = {**model, "chat_template": text.replace("</think>", "END")}
    Runner(make_config(environment=f"{HERE}:Desk", model=model), tokenizer).check(QUESTION)
    assert (
        "ends turns with END, which is plain text for this tokenizer, but answers do not stop "
        'there: set sampling.stop to ["END"], or choose a template for this model'
    ) in caplog.text


async def test_a_model_without_a_template_answers_texts(
    make_config: Callable[..., Config], bare: Any
) -> None:
    config = make_config(environment=f"{HERE}:Desk", rollout={"loop": "single_turn"})
    runner = Runner(config, bare)
    expected = bare("Twice 4?")["input_ids"]
    assert runner.check(QUESTION) == len(expected)
    engine = SimulatedEngine(vocab_size=len(bare))
    group = await runner.run_group(engine, QUESTION, SamplingConfig(n=2, max_tokens=8), "step1.0")
    assert [t.prompt_token_ids(0) for t in group.trajectories] == [expected] * 2
    assert all(
        t.final_text == runner.template.decode(t.turns[0].completion_token_ids)
        for t in group.trajectories
    )


@pytest.mark.parametrize(
    ("environment", "rollout"),
    [
        ("Bench", {}),
        ("Bench", {"tools_in_prompt": False}),
        ("Brief", {"loop": "single_turn"}),
    ],
)
async def test_what_a_model_without_a_template_cannot_do_ends_the_run(
    make_config: Callable[..., Config], bare: Any, environment: str, rollout: dict[str, Any]
) -> None:
    runner = Runner(make_config(environment=f"{HERE}:{environment}", rollout=rollout), bare)
    with pytest.raises(InputError, match=r"^rows\.jsonl:1: the tokenizer of .* has no chat templ"):
        runner.check(QUESTION)
    if rollout.get("tools_in_prompt", True):
        engine = SimulatedEngine(vocab_size=len(bare))
        with pytest.raises(InputError, match="has no chat template"):
            await runner.run_group(engine, QUESTION, SamplingConfig(n=1, max_tokens=8), "step1.0")


async def test_a_lack_of_threads_costs_a_trajectory_and_not_the_run(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> int:
        raise OSError(errno.EAGAIN, "no thread can be started")

    monkeypatch.setattr(runner_module, "in_thread_if_long", refused)
    group = await run({"takes": 0.0}, n=2)
    assert group.dropped == {"system_error": 2}
    assert "no thread can be started" in group.causes["system_error"]


class Picky(SingleTurnLoop):
    """A loop that some rows cannot be played with."""

    async def run(self, environment: Any, context: RolloutContext) -> None:
        if context.row.get("bad"):
            raise InputError("the row has no key 'answer'")
        await super().run(environment, context)


async def test_a_mistake_in_a_later_row_fails_its_trajectories(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    """Before any trajectory is finished, it is one of the configuration, and ends the run."""
    config = make_config(environment=f"{HERE}:Desk", rollout={"loop": f"{HERE}:Picky"})
    runner, engine = Runner(config, tokenizer), SimulatedEngine(vocab_size=len(tokenizer))
    sampling = SamplingConfig(n=2, max_tokens=4)

    async def play(number: int, **row: Any) -> Group:
        problem = Problem(f"rows:{number}", {"question": "Go.", "tries": itertools.count(1), **row})
        return await runner.run_group(engine, problem, sampling, f"group{number}")

    with pytest.raises(InputError, match="no key 'answer'"):
        await play(1, bad=True)
    assert not (await play(2)).dropped
    assert (await play(3, bad=True)).dropped == {"input_error": 2}
