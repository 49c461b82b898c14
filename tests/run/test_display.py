import io
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnwise.cli.command import print_error
from turnwise.core.logs import VisibleFormatter
from turnwise.errors import TrajectoryError
from turnwise.observe.conversations import Overview, show
from turnwise.observe.metrics import StepMetrics
from turnwise.run import display as module
from turnwise.run.display import Display, show_result, why_untrained
from turnwise.run.doctor import Finding, print_finding
from turnwise.trajectory import Outcome, Trajectory

STEP = {
    "step": 1,
    "reward_mean": 0.5,
    "rollout_tokens_per_s": 4321.0,
    "train_tokens_per_s": 1234.0,
    "staleness_max": 0,
    "step_seconds": 2.0,
    "accuracy_heldout": None,
    "dropped": {},
    "trained_tokens": 99,
    "groups_without_signal": 0,
    "stale_groups": 0,
}
UNTRAINED = {**STEP, "trained_tokens": 0}


class Clock:
    """The display's time, which only tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def opened(out: io.StringIO, *, terminal: bool = False, steps: int = 4) -> Display:
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
    return Display("demo", steps, console, 0.75)


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with opened(out, terminal=terminal) as display:
        display.phase("rollout", 16)
        display.advance()
        display.step(StepMetrics(**{**STEP, "step": 0, "accuracy_heldout": 0.25}))
        display.step(StepMetrics(**{**STEP, "dropped": {"tool_timeout": 2}}))
    return out.getvalue()


def test_without_a_terminal_each_step_is_a_plain_line() -> None:
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("step    0/4")
    assert "held-out accuracy (reward ≥ 0.75) 0.250" in first
    for part in (
        "step    1/4",
        "reward 0.500",
        "4,321 tok/s",
        "left 0:",
        "dropped: tool_timeout 2",
    ):
        assert part in second


def test_conversations_are_printed_as_they_are() -> None:
    trajectory = Trajectory("rows:7", status="completed", outcome=Outcome(0.5))
    trajectory.messages = [{"role": "assistant", "content": "[bold]no markup[/bold]"}]
    out = io.StringIO()
    with opened(out) as display:
        display.samples({"best": [trajectory], "worst": []})
    head, said = out.getvalue().splitlines()
    assert head.startswith("── best: rows:7 #0  reward 0.5")
    assert said == "assistant  [bold]no markup[/bold]"


def test_the_time_left_of_a_resumed_run_counts_its_own_steps(clock: Clock) -> None:
    out = io.StringIO()
    with opened(out, steps=9) as display:
        display.phase("rollout", 16)
        clock.now += 10  # seconds that the first step here takes
        display.step(StepMetrics(**{**STEP, "step": 7}))
    assert "left 0:20" in out.getvalue()


def test_on_a_terminal_a_table_tells_what_happens_now() -> None:
    text = shown(terminal=True)
    for part in ("turnwise · demo", "rollout 1/16", "0.250", "4,321", "1,234", "left"):
        assert part in text


@pytest.mark.parametrize("terminal", [False, True])
def test_each_part_of_the_start_is_named_and_then_its_seconds(clock: Clock, terminal: bool) -> None:
    out = io.StringIO()
    with opened(out, terminal=terminal) as display:
        with display.part("starting Ray"), display.part("rendering 4,000 prompts"):
            clock.now += 0.5
        with pytest.raises(ValueError, match="no"), display.part("starting 2 engines"):
            raise ValueError("no")
    text = out.getvalue()
    found = [text.index(line) for line in ("starting Ray ...", "rendering 4,000 prompts ...")]
    ended = ("rendering 4,000 prompts: 0.5 s", "starting Ray: 0.5 s")
    found += [text.index(line) for line in ended]
    assert found == sorted(found)
    assert "starting 2 engines ..." in text
    assert "starting 2 engines: " not in text, "it never was up"


def test_what_does_not_train_shows_no_columns_of_training() -> None:
    out = io.StringIO()
    with opened(out, terminal=True, steps=0) as display:
        display.phase("evaluate", 3)
    assert "evaluate 0/3" in out.getvalue()
    assert "staleness" not in out.getvalue()


def lines_until(out: io.StringIO, count: int) -> list[str]:
    """The lines as soon as there are as many; the test's own deadline bounds the wait."""
    while len(lines := out.getvalue().splitlines()) < count:
        time.sleep(0.01)
    return lines


@pytest.mark.timeout(300)
def test_without_a_terminal_a_quiet_start_says_what_it_is_at(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.02)
    out = io.StringIO()
    with opened(out) as display:
        with display.part("starting Ray"), display.part("starting 2 engines"):
            clock.now += 3
            told = lines_until(out, 3)[2]
        display.phase("evaluate", 200)
        display.advance()
        clock.now += 0.01
        time.sleep(0.05)
        said = len(out.getvalue().splitlines())
        clock.now += 4.99
        lines_until(out, said + 1)
    assert told == "3 s: starting Ray (3 s), starting 2 engines (3 s)"
    assert said == 5, "it is silent while others speak"
    assert out.getvalue().splitlines()[-1] == "8 s: evaluate 1/200 (5 s)"
    for thread in threading.enumerate():
        if thread.name == "turnwise-display":
            thread.join(60)
            assert not thread.is_alive(), "it says no more"


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([], ""),
        ([{**UNTRAINED, "step": 0}], ""),
        ([STEP, {**UNTRAINED, "groups_without_signal": 4}], ""),
        (
            [{**UNTRAINED, "groups_without_signal": 1}],
            "1 group without signal (all rewards of a group equal, 0.500 on average)",
        ),
        (
            [
                {**UNTRAINED, "groups_without_signal": 2000},
                {**UNTRAINED, "groups_without_signal": 48, "reward_mean": 0.0, "stale_groups": 3},
            ],
            "2,048 groups without signal (all rewards of a group equal), "
            "3 groups too old (training.max_staleness)",
        ),
        ([UNTRAINED], "no group has two trajectories to compare (sampling.n, dropped)"),
    ],
)
def test_why_nothing_was_trained(steps: list[dict[str, Any]], why: str) -> None:
    assert why_untrained(steps) == why


def test_a_step_that_trains_nothing_says_so() -> None:
    out = io.StringIO()
    with opened(out) as display:
        display.step(StepMetrics(**STEP))
        display.step(StepMetrics(**{**UNTRAINED, "step": 2, "groups_without_signal": 4}))
    first, second = out.getvalue().splitlines()
    assert "nothing trained" not in first
    assert "nothing trained: 4 groups without signal (all rewards of a group equal" in second


ESCAPES = "\x1b]0;TITLE\x07\x1b[2J\x1b[31mall is well\r\u202e"


def test_what_others_wrote_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=500)
    display = Display("run", 1, console, 1.0)
    display.warn(f"4 agent_error: {ESCAPES} [bold]")
    trajectory = Trajectory(f"rows:{ESCAPES}", messages=[{"role": ESCAPES, "content": ESCAPES}])
    display.samples({"best": [trajectory]})
    print_finding(console, Finding("rollout", "broken", ESCAPES, ESCAPES))
    show(console, Overview.of([trajectory]))
    print_error(f"turnwise: {ESCAPES}")
    record = logging.LogRecord("turnwise", logging.INFO, "", 0, "it said %s", (ESCAPES,), None)
    texts = [out.getvalue(), capsys.readouterr().err, VisibleFormatter().format(record)]
    texts.append(str(TrajectoryError("agent_error", ESCAPES)))
    for text in texts:
        assert all(line.isprintable() for line in text.split("\n")), text
        assert r"\x1b[2J" in text
    again = TrajectoryError("agent_error", str(TrajectoryError("agent_error", ESCAPES)))
    assert str(again) == texts[-1]


def test_a_line_names_the_results_of_each_environment() -> None:
    out = io.StringIO()
    shop, sums = {"reward_mean": 0.75, "heldout": {"accuracy": 1.0}}, {"reward_mean": 0.25}
    metrics = StepMetrics(**STEP | {"environments": {"shop": shop, "sums": sums}})
    metrics.accuracy_heldout = 0.5
    with opened(out) as display:
        display.step(metrics)
    assert "reward 0.500 (shop 0.750, sums 0.250)" in out.getvalue()
    assert "held-out accuracy (reward ≥ 0.75) 0.500 (shop 1.000)" in out.getvalue()


def test_the_end_names_audit_and_folder_and_why_nothing_trained() -> None:
    console = Console(file=io.StringIO(), width=20)
    assert isinstance(console.file, io.StringIO)
    idle = STEP | {"trained_tokens": 0, "groups_without_signal": 4, "stale_groups": 0}
    folder = Path("runs/a [b]")
    show_result(console, "100 % of 9", folder, folder / "reward.png", [idle])
    first, *rest = console.file.getvalue().splitlines()
    assert first.startswith("nothing was trained: 4 groups without signal")
    assert "the problems may be too easy or too hard" in first
    assert rest == ["100 % of 9", "run folder runs/a [b]", "picture    runs/a [b]/reward.png"]
