"""The environment of README and tutorial: a published model learns it in minutes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.weather.environment import Weather
from tests.conftest import ROOT
from tests.pages import blocks
from tests.test_cli import metrics_of, turnwise
from turnwise.trajectory import Outcome, Trajectory

FOLDER = ROOT / "examples" / "weather"


def rows_of(name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines()))


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_pages_show_the_class_of_the_example(page: str) -> None:
    (text,) = (block.text for block in blocks(page) if block.name == "my_env.py")
    shown: dict[str, Any] = {}
    exec(text, shown)
    for row in rows_of("train"):
        theirs, ours = shown["Weather"](row), Weather(row)
        assert theirs.problem == ours.problem
        assert theirs.temperature("any") == ours.temperature("any") == f"{row['celsius']} degrees"
        assert theirs.temperature.__doc__ == ours.temperature.__doc__


def test_questions_of_the_evaluation_never_occur_in_training() -> None:
    train, heldout = ({row["question"] for row in rows_of(name)} for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (40, 31)
    assert not train & heldout


def test_only_the_measured_temperature_in_a_sentence_is_rewarded() -> None:
    row = rows_of("train")[0]
    for text, reward in ((row["answer"], 1.0), (f"{row['celsius']} degrees", 0.0), ("", 0.0)):
        message = {"role": "assistant", "content": text}
        made = Trajectory("row", 0, messages=[message], outcome=Outcome(None))
        assert Weather(row).reward(made) == reward


@pytest.mark.slow
def test_a_published_model_learns_to_ask_the_tool(tmp_path: Path) -> None:
    subprocess.run(["make", "-s", ".venv/.real"], cwd=ROOT, check=True, timeout=900)
    done = turnwise("train", "examples/weather/config.yaml", f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    measured = [row["accuracy_heldout"] for row in metrics_of(tmp_path / "weather")]
    assert measured[0] < 0.5
    assert max(filter(None, measured)) > 0.8
