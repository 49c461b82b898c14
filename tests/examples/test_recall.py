"""The example in which a model learns to write summaries from which it can go on."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import turnwise
from examples.calculator.tokenizer import train_tokenizer
from examples.recall.environment import NEXT, PROBLEM, Recall, page
from examples.recall.run import CONFIG, attempt
from examples.recall.warm_start import CARELESS, conversations, render, said
from tests.conftest import ROOT, command_environment, python
from tests.rollouts.test_context_window import Rule
from turnwise.config import Config
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.context_window import REQUEST, SUMMARY
from turnwise.trajectory import ChatTemplate, Trajectory


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = list(itertools.islice(conversations(0), 200))
    return train_tokenizer(lambda bare: [render(bare, text) for text in texts], 640)


async def play(tokenizer: Any, script: list[str]) -> tuple[Group, Rule]:
    """An attempt in which the model says the texts, summaries included, in their order."""
    config: Config = turnwise.load_config(CONFIG)
    left = list(script)
    engine = Rule(ChatTemplate(tokenizer), lambda _: left.pop(0))
    problem = Problem("rows:1", {"pages": ["47", "91"]})
    sampling = config.sampling.model_copy(update={"n": 1})
    group = await Runner(config, tokenizer).run_group(engine, problem, sampling, "t")
    assert group.dropped == {}
    return group, engine


async def test_summaries_decide_whether_the_digits_can_be_said(tokenizer: Any) -> None:
    group, engine = await play(tokenizer, [NEXT, "47", NEXT, "4791", "4791"])
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.status) == (1.0, "completed")
    assert trajectory.metrics == {"pages_read": 2.0, "compacted": 2.0}
    assert "47" not in "".join(engine.prompts[-1].split("4791"))
    group, engine = await play(tokenizer, [NEXT, CARELESS, NEXT, "91", NEXT])
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.status) == (0.0, "completed")
    assert "47" not in engine.prompts[-1]


async def test_the_warm_start_has_the_prompts_of_the_loop(tokenizer: Any) -> None:
    """Otherwise the model would have to learn their form from rewards."""
    _, engine = await play(tokenizer, [NEXT, "47", NEXT, "4791", "4791"])

    def prompt(*texts: str) -> str:
        return render(tokenizer, said(*texts)) + "<|im_start|>assistant\n"

    first, second = (f"{page(digits)}\n\n{REQUEST}" for digits in ("47", "91"))
    known = f"{PROBLEM}\n\n{SUMMARY.format('47')}"
    assert engine.prompts == [
        prompt(PROBLEM),
        prompt(PROBLEM, NEXT, first),
        prompt(known),
        prompt(known, NEXT, second),
        prompt(f"{PROBLEM}\n\n{SUMMARY.format('4791')}"),
    ]
    made = itertools.islice(conversations(0), 2000)
    texts = {message["content"] for messages in made for message in messages}
    assert {PROBLEM, known, first, second, NEXT, "47", CARELESS} <= texts


def test_rows_to_train_on_and_others_are_apart() -> None:
    train, held = (
        {tuple(row["pages"]) for row in Recall.rows(split)} for split in ("train", "eval")
    )
    assert (len(train), len(held)) == (2000, 100)
    assert not train & held


def test_an_attempt_is_a_line() -> None:
    trajectory = Trajectory("rows:1")
    texts = ["Read.", NEXT, page("47"), "Summary of the conversation so far:\n47", "47"]
    trajectory.messages = [{"content": text} for text in texts]
    assert attempt(trajectory) == "next, 47., Summary of the conversation so far: 47, 47"


def _run(folder: Path, *arguments: str, timeout: float) -> list[dict[str, Any]]:
    done = subprocess.run(
        [
            *(*python(), "-m", "examples.recall.run", "--build", str(folder), *arguments),
            f"output_dir={folder}",
        ],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Held-out attempts" in done.stdout
    (metrics,) = folder.glob("recall-seed0*/metrics.jsonl")
    return [json.loads(line) for line in metrics.open()]


@pytest.mark.slow  # the loop alone: the tests above
def test_a_short_run_of_recall_from_nothing(tmp_path: Path) -> None:
    overrides = ["training.steps=1", "eval.every=1", "sampling.n=2", "rollout.prompts_per_step=4"]
    first, last = _run(tmp_path, "--updates", "60", *overrides, timeout=900)
    assert (first["step"], last["step"], last["trajectories"]) == (0, 1, 8)
    assert last["dropped"] == {}
    assert last["exact_percent"] == 100.0
    assert last["forked"]["compacted"] == last["events"]["compacted"] > 0


@pytest.mark.slow
def test_a_model_learns_to_summarise(tmp_path: Path) -> None:
    """From the reward of the answer alone: no other part of the reward knows of summaries."""
    steps = _run(tmp_path, timeout=3600)
    assert all(step["exact_percent"] == 100.0 for step in steps[1:])
    before, after = steps[0]["accuracy_heldout"], steps[-1]["accuracy_heldout"]
    assert 0.02 < before < 0.6
    assert after > 0.85
    assert steps[-1]["forked"]["compacted"] >= steps[-1]["trajectories"]
