import io

from rich.console import Console

from turnwise.display import Display

STEP = {
    "step": 1,
    "reward_mean": 0.5,
    "rollout_tokens_per_s": 4321.0,
    "train_tokens_per_s": 1234.0,
    "staleness_max": 0,
    "step_seconds": 2.0,
    "accuracy_heldout": None,
    "dropped": {},
}


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
    with Display("demo", 4, console) as display:
        display.phase("rollout", 16)
        display.advance()
        display.step({**STEP, "step": 0, "accuracy_heldout": 0.25})
        display.step({**STEP, "dropped": {"tool_timeout": 2}})
    return out.getvalue()


def test_without_a_terminal_each_step_is_a_plain_line() -> None:
    first, second = shown(terminal=False).splitlines()
    assert first.startswith("step    0/4")
    assert "held-out accuracy 0.250" in first
    for part in (
        "step    1/4",
        "reward 0.500",
        "4,321 tok/s",
        "left 0:",
        "dropped: tool_timeout 2",
    ):
        assert part in second


def test_on_a_terminal_a_table_tells_what_happens_now() -> None:
    text = shown(terminal=True)
    for part in ("turnwise · demo", "rollout 1/16", "0.250", "4,321", "1,234", "left"):
        assert part in text
