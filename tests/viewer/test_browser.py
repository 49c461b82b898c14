"""The viewer in Chromium, which Playwright drives from an environment of its own."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pictures

from tests.conftest import ROOT
from turnwise.config import Config, ModelConfig, dump_config
from turnwise.engine.protocol import TurnTimes
from turnwise.observe.metrics import StepMetrics
from turnwise.run.token_values import TokenColumns, write_columns
from turnwise.training.reports import RECORDED
from turnwise.trajectory import Image, Outcome, PlacedImage, Prompt, Trajectory, write_jsonl

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TURNWISE = (sys.executable, "-m", "turnwise.cli")
VOCABULARY = 60


def a_call(number: int) -> dict[str, object]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": number, "b": 2}}}


def a_trajectory(number: int) -> Trajectory:
    """Two turns and a call; number 5 has a second branch, an error, and markup in its answer."""
    trajectory = Trajectory(f"rows:{number // 4}", number % 4, outcome=Outcome((number % 3) / 2))
    first = [*range(10, 22)]
    sampled = [*range(22, 30)]
    logprobs = [-0.05 * (1 + (i + number) % 8) ** 2 for i in range(8)]
    trajectory.add_turn(first, sampled, logprobs, [1] * 8, "stop")
    trajectory.add_turn([*first, *sampled, 30, 31], sampled, logprobs, [1] * 4 + [2] * 4, "stop")
    said, answered = f"The answer is {number}.\nThat is all.", str(number + 2)
    if number == 5:
        edited = [*first[:6], 40, 41]
        trajectory.add_turn(
            edited, sampled, logprobs, [2] * 8, "stop", fork_reason="history_edited"
        )
        said, answered = "<img src=x onerror=alert(1)>", "Error: add failed: ValueError: 5"
        trajectory.events["tool_error"] += 1
    trajectory.events["tool_call"] += 1
    trajectory.messages = [
        {"role": "user", "content": f"What is {number} + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [a_call(number)]},
        {"role": "tool", "name": "add", "content": answered},
        {"role": "assistant", "content": said},
    ]
    trajectory.status = "length" if number == 5 else "completed"
    trajectory.environment = "shop" if number < 8 else "sums"
    trajectory.set_outcome(parts={"environment": (number % 3) / 2, "style": 0.5})
    trajectory.row = {"answer": f"<b>{number + 2}</b>"}
    return trajectory


def values_of(trajectories: Sequence[Trajectory]) -> TokenColumns:
    """A row for each sampled token, as training writes them."""
    places = np.array(
        [
            (number, turn, at)
            for number, trajectory in enumerate(trajectories)
            for turn, made in enumerate(trajectory.turns)
            for at in range(len(made.completion_token_ids))
        ],
        np.int32,
    )
    names = ("trajectory", "turn", "at")
    columns: TokenColumns = dict(zip(names, np.ascontiguousarray(places.T), strict=True))
    columns |= {name: np.full(len(places), 0.5, np.float32) for name in RECORDED}
    return columns | {"staleness": np.ones(len(places), np.int32)}


def with_a_picture() -> Trajectory:
    """An image of six tokens in the question, and the same one again in a result."""
    Pictures.new("RGB", (56, 84), "teal").save(buffer := io.BytesIO(), "PNG")
    image = Image.of(buffer.getvalue(), "png", 56, 84)
    part = {"type": "image", "image": image}
    trajectory = Trajectory("pictures:1", status="completed", outcome=Outcome(1.0))
    first = Prompt([10, *[11] * 6, 12], [PlacedImage(image, 1, 6)])
    trajectory.add_turn(first, [22, 23], [-0.5, -0.1], [1, 1], "stop")
    more = Prompt([30, *[11] * 6], [PlacedImage(image, 1, 6)])
    trajectory.add_turn(Prompt.joined(first, [22, 23], more), [24], [-0.2], [1], "stop")
    trajectory.messages = [
        {"role": "user", "content": [{"type": "text", "text": "Which colour?"}, part]},
        {"role": "assistant", "content": "", "tool_calls": [a_call(1)]},
        {"role": "tool", "name": "add", "content": [part]},
        {"role": "assistant", "content": "Teal."},
    ]
    return trajectory


def a_long_trajectory() -> Trajectory:
    trajectory = Trajectory("rows:long", status="completed", outcome=Outcome(0.0))
    ids = [10 + i % 50 for i in range(31_990)]
    trajectory.add_turn([10], ids, [-0.5] * len(ids), [1] * len(ids), "stop")
    return trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three steps, as training writes it, whose groups had no signal."""
    run = tmp_path / "demo"
    run.mkdir()
    config = Config(model=ModelConfig(path="model"), rollout={"prompts_per_step": 4})
    (run / "config.yaml").write_text(dump_config(config))
    rows = [
        StepMetrics(
            step=step,
            reward_mean=step / 10,
            trajectories=16,
            turns_mean=2.0,
            sampled_tokens=256,
            groups_without_signal=4,
            logprob_diff_mean=1e-6,
            logprob_diff_max=1e-5,
            phase_seconds={"idle": 2.0, "train": 1.0},
            environments={"shop": {"reward_mean": 0.5, "heldout": {"accuracy": step / 20}}},
            heldout_sets={"easy": {"accuracy": step / 16}},
            pools={"fresh": 15 - step, "mixed": step, "mastered": 1, "hopeless": 0, "resting": 1},
            step_seconds=3.0,
        ).to_json()
        for step in range(1, 16)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trajectories = [*map(a_trajectory, range(16))]
    write_jsonl(run / "trajectories" / "step-0015.jsonl", trajectories)
    write_columns(run / "training" / "step-0015.safetensors", values_of(trajectories))
    calls = [TurnTimes(t, 3.0 * t, 3 * t + 0.5, 3 * t + 2.0, f"worker-{t % 2}") for t in range(3)]
    (run / "timeline").mkdir()
    (run / "timeline" / "step-0015.jsonl").write_text(f"{json.dumps(calls)}\n" * 16)
    write_jsonl(run / "rollouts.jsonl", [a_long_trajectory()] * 20)
    write_jsonl(run / "trajectories" / "eval-0015.jsonl", [with_a_picture()])
    words = {f"word{i}": i for i in range(VOCABULARY)} | {
        "\u0120ab": 24,
        "\u010a": 26,
        "\u00c3": 28,
    }
    tokenizer = {"model": {"vocab": words}, "decoder": {"type": "ByteLevel"}}
    (run / "checkpoints" / "step-0015").mkdir(parents=True)
    (run / "checkpoints" / "step-0015" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return run


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """The address of a viewer of this run and the recorded ones, in a process of its own."""
    command = [*TURNWISE, "view", str(folder), "--demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()
        assert process.wait(60) == 130


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
def test_a_person_finds_her_way_through_a_live_run(folder: Path, address: str) -> None:
    subprocess.run(["make", "-s", ".venv-interop/.installed"], cwd=ROOT, check=True, timeout=900)
    page = folder.parent / "page.html"
    exported = [*TURNWISE, "view", str(folder), "--step", "15", "--export", str(page)]
    subprocess.run(exported, check=True, timeout=300)
    pictures = [*exported[:-2], "--heldout", "--export", str(page.with_name("pictures.html"))]
    subprocess.run(pictures, check=True, timeout=300)
    python = ROOT / ".venv-interop" / "bin" / "python"
    look = [python, ROOT / "tests" / "viewer" / "look.py", CHROMIUM, address, folder]
    kept = ("PATH", "HOME", "SCREENSHOTS")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    done = subprocess.run(
        [*map(str, look)], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 18, done.stdout
