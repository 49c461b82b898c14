"""On-policy distillation: a calculator model that rewards trained teaches the initial one."""

from pathlib import Path
from typing import Any

import pytest

from examples.calculator.distil import EVERY_STEP, STUDENT, TARGET, newest_model, tokens_to
from examples.calculator.prepare import prepare
from tests.test_cli import metrics_of, turnwise


def test_tokens_are_counted_until_the_accuracy_is_reached(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "accuracy_heldout": 0.5}\n'
        '{"step": 1, "accuracy_heldout": null, "sampled_tokens": 10}\n'
        '{"step": 2, "accuracy_heldout": 0.9, "sampled_tokens": 20}\n'
        '{"step": 3, "accuracy_heldout": 0.95, "sampled_tokens": 40}\n'
    )
    assert tokens_to(0.9, tmp_path) == 30
    assert tokens_to(0.99, tmp_path) is None
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:04d}").mkdir(parents=True)
    assert newest_model(tmp_path).name == "step-0010"


@pytest.mark.slow
def test_a_teacher_reaches_the_target_in_half_the_tokens(tmp_path: Path) -> None:
    """In the ranks by the advantage, and as an engine by the loss."""
    prepare(tmp_path, seed=0)

    def run(name: str, *keys: str) -> list[dict[str, Any]]:
        done = turnwise(
            *("train", "examples/calculator/config.yaml", f"model.path={tmp_path / 'model'}"),
            *(f"data.path={tmp_path / 'train.jsonl'}", f"output_dir={tmp_path / 'runs'}"),
            *(f"data.eval_path={tmp_path / 'heldout.jsonl'}", f"name={name}", *EVERY_STEP, *keys),
        )
        assert done.returncode == 0, done.stderr
        return metrics_of(tmp_path / "runs" / name)

    run("teacher")
    by_reward = tokens_to(TARGET, tmp_path / "runs" / "teacher")
    assert by_reward is not None
    model = newest_model(tmp_path / "runs" / "teacher")
    for name, keys in (
        ("ranks", "model: {}, where: advantage"),
        ("engines", "model: {}, where: loss, engines: 1"),
    ):
        rows = run(name, *STUDENT, f"algorithm.teacher={{{keys.format(model)}}}")
        by_teacher = tokens_to(TARGET, tmp_path / "runs" / name)
        assert by_teacher is not None
        assert 2 * by_teacher <= by_reward
        taught = rows[1:]
        assert all(row["trained_tokens"] for row in taught)
        assert not any(row["groups_without_signal"] for row in taught)
        assert max(row["teacher_kl"] for row in taught) > 0  # a noisy mean, near 0 at the end
        if name == "engines":  # in the ranks it is part of the training
            assert taught[0]["phase_seconds"]["teacher"] > 0
