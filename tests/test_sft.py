"""`turnwise sft` on the real stack: a command without engines, resumed, exported, as a LoRA."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.test_cli import metrics_of, turnwise
from tests.training.test_supervised import solutions
from turnwise.config import Config, dump_config
from turnwise.trajectory import audit, read_jsonl

OPTIONS = ("rollout.prompts_per_step=4", "eval.every=2", "training.learning_rate=0.0001")


@pytest.fixture(scope="module")
def file(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of conversations with tools, without an environment."""
    folder = tmp_path_factory.mktemp("sft")
    rows = solutions(24)
    for name, part in (("rows", rows[:16]), ("held", rows[16:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    config = make_config(
        output_dir=str(folder / "runs"),
        data={"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held.jsonl")},
        engine={},
    )
    tree = yaml.safe_load(dump_config(config))
    del tree["environment"]
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    return folder / "sft.yaml"


def losses(run: Path) -> list[dict[str, Any]]:
    keys = ("step", "loss", "loss_heldout", "grad_norm", "trained_tokens", "epoch")
    return [{key: row[key] for key in keys if key in row} for row in metrics_of(run)]


def test_a_run_is_resumed_and_exported(file: Path) -> None:
    whole = turnwise("sft", file, *OPTIONS, "training.steps=4", "name=whole")
    assert whole.returncode == 0, whole.stderr
    run = file.parent / "runs" / "whole"
    assert "held-out loss" in whole.stdout
    assert "engine" not in whole.stdout
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    assert {"exactness.json", "checkpoints/step-0004"} <= names
    for trajectory in read_jsonl(run / "trajectories/step-0001.jsonl"):
        assert audit(trajectory).violations == 0

    half = turnwise("sft", file, *OPTIONS, "training.steps=2", "name=half")
    assert half.returncode == 0, half.stderr
    resumed = turnwise("sft", "--resume", file.parent / "runs" / "half", "training.steps=4")
    assert resumed.returncode == 0, resumed.stderr
    both = losses(run), losses(file.parent / "runs" / "half")
    for mine, other in zip(*both, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)

    exported = turnwise("export", run)
    assert exported.returncode == 0, exported.stderr
    AutoModelForCausalLM.from_pretrained(run / "export")
    refused = turnwise("train", "--resume", run, "environment=a:B", "training.steps=9")
    assert refused.returncode == 2
    assert "is a run of another command: turnwise sft --resume" in refused.stderr


@pytest.mark.slow
def test_a_lora_on_two_ranks_learns_what_earned_the_reward(
    file: Path, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Rejection sampling: a run's own trajectories, with the ids that its engines sampled."""
    config = make_config(output_dir=str(tmp_path), rollout={"prompts_per_step": 4}, engine={})
    (tmp_path / "rl.yaml").write_text(dump_config(config))
    sampled = turnwise("train", tmp_path / "rl.yaml", "name=rl", "eval.every=0")
    assert sampled.returncode == 0, sampled.stderr
    changes = (
        *(f"data.path={tmp_path / 'rl'}", "data.eval_path=null", "data.filter=len(turns) >= 1"),
        *("model.lora.rank=4", "training.ranks=2", "training.threads=1", "training.steps=2"),
    )
    done = turnwise("sft", file, *OPTIONS, *changes, "name=good")
    assert done.returncode == 0, done.stderr
    run = file.parent / "runs" / "good"
    known = {
        (t.problem_id, tuple(turn.record for turn in t.turns))
        for path in (tmp_path / "rl" / "trajectories").glob("step-*.jsonl")
        for t in read_jsonl(path)
    }
    for trajectory in read_jsonl(run / "trajectories/step-0001.jsonl"):
        own = trajectory.problem_id, tuple(turn.record for turn in trajectory.turns)
        assert own in known
    assert all(row["trained_tokens"] > 0 for row in metrics_of(run))
    assert (run / "checkpoints/step-0002/adapter_config.json").is_file()


@pytest.mark.slow
def test_it_is_a_call_of_a_program(file: Path, tmp_path: Path) -> None:
    from tests.test_api import run_script

    code = (
        "import turnwise\n"
        "from tests.training.test_supervised import solutions\n"
        "if __name__ == '__main__':\n"
        f"    result = turnwise.sft(data=solutions(8), steps=2, config={str(file)!r},\n"
        f"        output_dir={str(tmp_path)!r}, name='called', rollout={{'prompts_per_step': 4}})\n"
        "    print(result.checkpoint.name, len(result.metrics), result.exactness.percent)\n"
    )
    assert run_script(code, tmp_path).split()[-3:] == ["step-0002", "3", "100.0"]


@pytest.mark.slow
def test_the_demos_warm_start_is_supervised_training(tmp_path: Path) -> None:
    from tests.test_api import run_script

    code = (
        "from pathlib import Path\n"
        "from examples.calculator.warm_start import make_model\n"
        "if __name__ == '__main__':\n"
        "    keys = {'training.steps': 4, 'rollout.prompts_per_step': 8}\n"
        "    result = make_model(Path('made'), 0, count=64, **keys)\n"
        "    losses = [row['loss_heldout'] for row in result.metrics if 'loss_heldout' in row]\n"
        "    print(len(result.metrics), losses[-1] < losses[0])\n"
    )
    assert run_script(code, tmp_path).split()[-2:] == ["5", "True"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "made")
