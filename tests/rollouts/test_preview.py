"""The checks before anything is started: the first row's environment is set up and closed."""

import asyncio
import gc
import importlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import turnwise
from tests.blocking import new_gate
from tests.rollouts.test_episode import Talking
from turnwise.config import Config, SamplingConfig
from turnwise.core.user_code import call_user_code
from turnwise.errors import DeadlineError, InputError, TrajectoryError
from turnwise.rollouts import Problem, Runner
from turnwise.trajectory import Trajectory

HERE = "tests.rollouts.test_preview"
FIRST, SECOND = Problem("rows.jsonl:1", {"n": 1}), Problem("rows.jsonl:2", {"n": 2})


class Desk:
    """Records its life; its problem and tools are known after `setup` only."""

    calls: ClassVar[list[str]] = []

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.calls.append(f"init {row['n']}")

    def setup(self) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        self.calls.append("setup")
        self.problem, self.tools = "Add.", self.given()

    def given(self) -> list[Any]:
        return []

    def reward(self, trajectory: Trajectory) -> float:
        return 1.0

    def close(self) -> None:
        self.calls.append("close")


class AsyncDesk(Desk):
    async def setup(self) -> None:
        super().setup()


class Untyped(AsyncDesk):
    def given(self) -> list[Any]:
        def look(where):  # type: ignore[no-untyped-def]
            """Look."""

        return [look]


class Twice(AsyncDesk):
    def given(self) -> list[Any]:
        def look() -> None:
            """Look."""

        return [look, look]


class Unrewarded(AsyncDesk):
    reward = None  # type: ignore[assignment]


class Inherited(turnwise.Environment):
    problem = "Go."


class Failing(AsyncDesk):
    async def setup(self) -> None:
        raise FileNotFoundError("no drawer")


class Hanging(AsyncDesk):
    async def setup(self) -> None:
        await asyncio.Event().wait()


class Cases:
    """A toolset that nothing opens."""

    async def open(self) -> list[Any]:
        raise AssertionError("opened")

    async def close(self) -> None:
        raise AssertionError("closed")


class Equipped(AsyncDesk):
    def given(self) -> list[Any]:
        return [Cases()]


class Away(Desk):
    def setup(self) -> None:
        raise TrajectoryError("simulated_user", "the server is away")


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Desk.calls.clear()


@pytest.fixture
def make(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., Runner]:
    def make(environment: Any, **rollout: Any) -> Runner:
        path = f"{HERE}:{environment.__name__}"  # another class than this module's
        config = make_config(environment=path, rollout={"max_turns": 2, **rollout})
        return Runner(
            config, tokenizer, None if config.rollout.environment_process else environment
        )

    return make


@pytest.mark.parametrize("environment", [Desk, AsyncDesk])
async def test_the_first_rows_environment_is_set_up_once_and_closed(
    make: Callable[..., Runner], environment: type
) -> None:
    runner = make(environment)
    assert runner.check(FIRST)
    assert Desk.calls == ["init 1", "setup", "close"]
    assert runner.within_prompt_limit([FIRST, SECOND]) == [FIRST, SECOND]
    assert Desk.calls[3:] == ["init 1", "init 2"]
    engine, sampling = Talking(vocab_size=256), SamplingConfig(n=2, max_tokens=8)
    assert len((await runner.run_group(engine, FIRST, sampling, "t")).trajectories) == 2


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Untyped, r"tool look \({file}:\d+\) cannot be offered to the model: .*type hint"),
        (Twice, r"Twice\.tools has two functions named look \({file}:{line}\)"),
        (Unrewarded, r"the environment Unrewarded \({file}:{line}\) has no reward: give it a meth"),
        (Inherited, r"the environment Inherited \({file}:{line}\) has no reward: .*rollout\.rewa"),
        (Failing, r"the environment failed: FileNotFoundError: no drawer \({file}:\d+\)"),
    ],
)
def test_what_needs_no_engine_is_refused_in_one_sentence(
    make: Callable[..., Runner], environment: type, said: str, process: bool
) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(
        n for n, text in enumerate(lines, 1) if text.startswith(f"class {environment.__name__}(")
    )
    said = said.replace("{file}", r"tests/rollouts/test_preview\.py").replace("{line}", str(line))
    with pytest.raises(InputError, match=rf"^rows\.jsonl:1: {said}") as caught:
        make(environment, environment_process=process).check(FIRST)
    assert "\n" not in str(caught.value)
    if not process and environment is not Inherited:
        assert Desk.calls[-1] == "close"


def test_a_setup_that_hangs_has_the_deadline_of_environments(make: Callable[..., Runner]) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:1 did not .*rollout\.environment_timeout"):
        make(Hanging, environment_timeout=0.3).check(FIRST)
    assert Desk.calls == ["init 1", "close"]


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
async def test_a_trajectorys_failure_in_the_check_is_only_a_warning(
    make: Callable[..., Runner], caplog: pytest.LogCaptureFixture, process: bool
) -> None:
    runner = make(Away, environment_process=process)
    assert runner.check(FIRST) is None
    assert "rows.jsonl:1 is checked when it is played: " in caplog.text
    assert "the server is away" in caplog.text
    assert runner.check(SECOND) is None
    assert caplog.text.count("the server is away") == 1
    if not process:
        engine, sampling = Talking(vocab_size=256), SamplingConfig(n=1, max_tokens=8)
        group = await runner.run_group(engine, FIRST, sampling, "t")
        assert group.dropped == {"simulated_user": 1}


@pytest.mark.parametrize(
    "rollout",
    [
        {"rewards": [{"function": f"{HERE}:one"}]},
        {"loop": f"{HERE}:OwnLoop"},
        {"loop": "agent", "agent": "http://127.0.0.1:9/run", "agent_rewards": True},
    ],
)
def test_an_environment_needs_no_reward_where_another_is_given(
    make: Callable[..., Runner], rollout: dict[str, Any]
) -> None:
    make(Unrewarded, **rollout).check(FIRST)
    assert Desk.calls == ["init 1", "setup", "close"]


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_toolsets_stay_closed_in_a_check(
    make: Callable[..., Runner], caplog: pytest.LogCaptureFixture, process: bool
) -> None:
    assert make(Equipped, environment_process=process).check(FIRST) is None
    assert caplog.text == ""
    assert process or Desk.calls == ["init 1", "setup", "close"]


def one(trajectory: Trajectory, row: dict[str, Any]) -> float:
    return 1.0


class OwnLoop:
    async def run(self, environment: Any, context: Any) -> None:
        """Do nothing."""


async def test_a_coroutine_that_comes_too_late_to_begin_is_no_warning() -> None:
    gate, ended = new_gate(), threading.Event()

    async def setup() -> None:
        """Never begun."""

    def late() -> Any:
        gate.wait()
        threading.Timer(0.2, ended.set).start()
        return setup()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(DeadlineError):
            await call_user_code(late, name="setup", seconds=0.1)
        gate.set()
        assert await asyncio.to_thread(ended.wait, 60)
        gc.collect()
    assert [each.message for each in caught if each.category is RuntimeWarning] == []


class Ringed(Desk):
    """Imports a package when it is built, by either of its modules."""

    numbers = itertools.count()

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        importlib.import_module(("ring.left", "ring.right")[next(self.numbers) % 2])

    async def setup(self) -> None:
        super().setup()


@pytest.fixture
def _ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose modules import each other in an order that the package knows. A thread that
    holds `ring.left` waits for the package, which another thread imports: one must see a part."""
    folder = tmp_path / "ring"
    folder.mkdir()
    wait = "import time\ntime.sleep(0.2)\n"
    (folder / "__init__.py").write_text(f"{wait}from ring.right import right\n")
    (folder / "left.py").write_text(f"from ring import right as module\n{wait}left = 1\n")
    (folder / "right.py").write_text(f"from ring.left import left\n{wait}right = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("ring", "ring.left", "ring.right"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_ring")
@pytest.mark.parametrize("checked", [False, True])
async def test_first_imports_of_a_package_do_not_race(
    make: Callable[..., Runner], checked: bool
) -> None:
    """Processes of rollouts check no row before: their first environments are opened together."""
    runner = make(Ringed)
    if checked:
        runner.check(FIRST)
        assert "ring.left" in sys.modules
    engine, sampling = Talking(vocab_size=256), SamplingConfig(n=8, max_tokens=8)
    groups = await asyncio.gather(
        *(runner.run_group(engine, problem, sampling, "t") for problem in (FIRST, SECOND))
    )
    assert [(group.dropped, group.causes) for group in groups] == [({}, {})] * 2
