"""The picture, read from its axes."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from turnwise.config import load_config, parse_config
from turnwise.observe.metrics import StepMetrics
from turnwise.run.run_dir import RunDir, make_figure


def row(step: int, reward: float, accuracy: float | None = None) -> dict[str, Any]:
    return {"step": step, "reward_mean": reward, "accuracy_heldout": accuracy}


def drawn(rows: list[dict[str, Any]], success_reward: float = 1.0) -> Figure:
    figure = make_figure("trial", rows, success_reward)
    figure.draw_without_rendering()  # ticks are chosen when it is drawn
    return figure


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def shown(axes: Axes, axis: str) -> list[float]:
    """The ticks within the limits."""
    low, high = getattr(axes, f"get_{axis}lim")()
    return [tick for tick in getattr(axes, f"get_{axis}ticks")() if low <= tick <= high]


@pytest.mark.parametrize(
    "rewards", [[-120.0, -80.5, -3.0], [0.0, 250.0], [0.2, 1.5], [-0.5, 0.5], [1e-3, 2e3]]
)
def test_every_reward_lies_within_the_axis_and_fills_it(rewards: list[float]) -> None:
    figure = drawn([row(step, reward) for step, reward in enumerate(rewards, start=1)])
    low, high = figure.axes[0].get_ylim()
    assert low < min(rewards) < max(rewards) < high
    assert high - low < 1.2 * (max(rewards) - min(rewards))


def test_rewards_and_accuracy_between_0_and_1_share_their_scale() -> None:
    figure = drawn([row(0, 0.0, 0.3), row(1, 0.4), row(2, 0.5, 0.6)])
    rewards, accuracy = figure.axes
    assert rewards.get_ylim() == accuracy.get_ylim() == (-0.02, 1.02)
    assert list(rewards.lines[0].get_xdata()) == [1, 2], "step 0 trained on nothing"
    assert list(accuracy.lines[0].get_xydata().ravel()) == [0, 0.3, 2, 0.6]


def test_accuracy_keeps_its_own_axis_whatever_the_rewards_scale() -> None:
    figure = drawn([row(0, -90.0, 0.3), row(1, -100.0, 0.4)], success_reward=-10)
    assert figure.axes[1].get_ylim() == (-0.02, 1.02)
    assert labels(figure)[1] == "accuracy on held-out problems (reward ≥ -10)"


def test_accuracy_is_named_only_where_it_was_measured() -> None:
    figure = drawn([row(1, 0.4), row(2, 0.5)])
    assert len(figure.axes) == 1
    assert labels(figure) == ["mean reward of the step's trajectories"]


@pytest.mark.parametrize("last", [1, 2, 3, 7, 90])
def test_steps_are_whole_numbers(last: int) -> None:
    figure = drawn([row(step, 0.5, 0.5) for step in range(last + 1)])
    ticks = shown(figure.axes[0], "x")
    assert ticks
    assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(("more", "mode"), [({}, 0o644), ({"hf_token": "hf_x"}, 0o600)])
def test_a_configuration_with_secrets_is_its_owners(
    more: dict[str, str], mode: int, tmp_path: Path
) -> None:
    tree = {"environment": "a:B", "model": {"path": "m"}, "data": {"path": "d"}}
    config = parse_config({**tree, "output_dir": str(tmp_path), "engine": {"vllm_args": more}})
    before = os.umask(0o022)
    try:
        RunDir(config).metrics.close()
    finally:
        os.umask(before)
    path = tmp_path / config.name / "config.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert load_config(path) == config


def test_the_api_key_is_in_no_file_of_the_run_folder(tmp_path: Path) -> None:
    config = parse_config(
        {
            "name": "keyed",
            "output_dir": str(tmp_path),
            "environment": "e:E",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "serving": {"api_key": "hush-hush"},
        }
    )
    folder = RunDir(config)
    folder.metrics.write(StepMetrics(step=0, reward_mean=0.5).to_json())
    folder.metrics.close()
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert folder.path / "config.yaml" in files
    assert not [path for path in files if b"hush-hush" in path.read_bytes()]
