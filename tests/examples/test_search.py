"""The search example: its corpus, its reward, and searching in the middle of an answer."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.search.environment import CORPUS, Question, search
from tests.conftest import ROOT
from tests.test_cli import metrics_of, turnwise
from turnwise.config import Config, SamplingConfig, load_config
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, Trajectory, audit

pytest.importorskip("bm25s")  # of requirements/cpu.txt
EXAMPLE = ROOT / "examples" / "search"
ROWS = [json.loads(line) for line in (EXAMPLE / "questions.jsonl").open()]


def test_the_best_passages_come_first() -> None:
    assert CORPUS.search("Who first climbed Mount Hesper?", 1)[0].startswith("Mount Hesper: ")
    assert CORPUS.search("moth caterpillars", 3)[0].startswith("Ashwing: ")
    assert len(CORPUS.search("Oster", 99)) > 3
    assert search("river Vael").startswith("(1) Vael: The Vael is a river")


@pytest.mark.parametrize("query", ["", "   ", "the of", "zebra", "?!", "é\x00"])
def test_a_query_without_a_match_finds_nothing(query: str) -> None:
    assert search(query) == "No passage found."


def test_each_answer_is_in_the_corpus() -> None:
    passages = (EXAMPLE / "corpus.jsonl").read_text().lower()
    for row in ROWS:
        assert all(answer.lower() in passages for answer in row["answers"]), row
        for answer in row["answers"]:
            assert reward(row, f"<answer>{answer.upper()}.</answer>") == 1.0, row


def reward(row: dict[str, Any], said: str) -> float:
    return Question(row).reward(SimpleNamespace(final_text=said))


@pytest.mark.parametrize(
    "said",
    ["", "Oster", "<answer>Merrow</answer>", "<answer>Oster</answer><answer>Selby</answer>",
     "<answer>Oster</answer>\n<information>\n</information>\n", "<answer></answer>"],
)  # fmt: skip
def test_another_answer_earns_nothing(said: str) -> None:
    assert reward({"question": "?", "answers": ["Oster"]}, said) == 0.0


def test_a_row_without_answers_is_named() -> None:
    with pytest.raises(InputError, match="needs the field 'answers'"):
        Question({"question": "?"})


async def test_a_search_is_run_inside_the_answer(
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
    model_path: str,
) -> None:
    example = load_config(EXAMPLE / "config.yaml")
    config = make_config(
        environment=example.environment,
        rollout=example.rollout.model_dump(),
        model={"path": model_path, "max_length": 1024},
        engine={},
    )
    said = ["<search>Who founded Merrow?</search>", "<answer>Ines Calder</answer>"]
    turns = [template.encode(text) for text in said]
    turns[1].append(tokenizer.eos_token_id)
    sampling = SamplingConfig(n=2, max_tokens=128, logits_processor_args={"script": turns})
    group = await Runner(config, tokenizer).run_group(
        engine, Problem("questions:1", ROWS[0]), sampling, "search"
    )
    assert group.dropped == {}
    for trajectory in group.trajectories:
        assert [turn.completion_token_ids for turn in trajectory.turns] == turns
        found = template.decode(trajectory.turns[1].added_token_ids)
        assert found.startswith("\n<information>\n(1) Merrow: Merrow is a harbour town on Tavro.")
        assert found.count("\n") == 5
        assert trajectory.reward == 1.0
        assert trajectory.metrics == {"searches": 1.0}
        assert audit(trajectory).first_violation is None
        (branch,) = trajectory.branches()
        assert sum(branch.response_mask) == sum(map(len, turns))


def test_it_trains_for_a_step(tmp_path: Path) -> None:
    """With a reward that the demo's model earns sometimes, which shows that the loop learns."""
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(
            yaml.safe_load((EXAMPLE / "config.yaml").read_text())
            | {"output_dir": str(tmp_path), "training": {"steps": 1}}
            | {"engine": {"kv_cache_gib": 0.0625}, "sampling": {"n": 4, "max_tokens": 24}}
        )
    )
    parts = "rollout.rewards=[{}, {function: 'tests.examples.test_search:even'}]"
    done = turnwise("train", tmp_path / "config.yaml", parts)
    assert done.returncode == 0, done.stdout + done.stderr
    row = metrics_of(tmp_path / "search")[-1]
    assert (row["step"], row["trajectories"], row["dropped"]) == (1, 16, {})
    assert row["env"] == {"searches": 0.0}
    assert row["grad_norm"] > 0


def even(trajectory: Trajectory, row: dict[str, Any]) -> float:
    return float(sum(trajectory.turns[-1].completion_token_ids) % 2 == 0)
