"""Programs of ChatLearn: `init`, `get_args`, an engine, `set_dataset`, `set_evaluator`, `learn`."""

import re
import subprocess
from pathlib import Path

import pytest

import turnwise.compat.chatlearn as chatlearn
from tests.conftest import ROOT, command_environment, python
from turnwise.compat.chatlearn import program
from turnwise.errors import InputError

FILE = "examples/calculator/rlhf.yaml"


def test_mistakes_of_a_program_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(program, "_arguments", None)
    with pytest.raises(InputError, match=r"call chatlearn\.init\(\) before"):
        chatlearn.RLHFEngine(chatlearn.VLLMModule("policy"))
    with pytest.raises(InputError, match=r"give the pipeline's file: python .* --config FILE"):
        chatlearn.init(["runtime.num_episode=3"])
    with pytest.raises(InputError, match=r"an override has the form key\.sub=value, not '--wrong'"):
        chatlearn.init(["-c", FILE, "--wrong"])
    chatlearn.init(["-c", FILE])
    with pytest.raises(InputError, match="an engine needs one policy, a VLLMModule, and has 0"):
        chatlearn.RLHFEngine(chatlearn.TrainerModule("ppo_policy"))


def test_arguments_are_the_files_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = ["pipeline=ppo", "runtime.eval_data_num_limit=3"]
    chatlearn.init([*changes, "--config", FILE])
    args = chatlearn.get_args()
    assert (args.config, args.overrides) == (FILE, changes)
    assert args.runtime_args._args_dict["eval_data_num_limit"] == 3
    assert args.runtime_args.sample_per_episode == 256
    assert args.runtime_args._args_dict["exp_name"] == "calculator-rlhf"
    assert args.runtime_args.training_data_num_limit is None
    assert args.runtime_args.get("of_nobody", 7) == 7


@pytest.mark.slow
def test_a_program_of_chatlearn_trains_and_evaluates(tmp_path: Path) -> None:
    """`RLHFEngine`: two episodes of PPO with reference, value and reward models."""
    subprocess.run([*python(), "-m", "examples.calculator.prepare"], cwd=ROOT, check=True)
    overrides = [
        *("runtime.num_episode=2", "runtime.sample_per_episode=32"),
        *("runtime.train_global_batch_size=32", "runtime.eval_episode_interval=1"),
        *("runtime.training_data_num_limit=200", "runtime.save_episode_interval=2"),
        "models.reward={function: examples.calculator.rlhf:right}",
        *("runtime.exp_name=program", f"output_dir={tmp_path}"),
    ]
    done = subprocess.run(
        [*python(), "-m", "examples.calculator.rlhf", "--config", FILE, *overrides],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"episode (\d): (reward|eval_reward_mean) (\S+)", done.stdout)
    assert [(int(n), what) for n, what, _ in said] == [
        *((0, "eval_reward_mean"), (1, "reward"), (1, "eval_reward_mean")),
        *((2, "reward"), (2, "eval_reward_mean")),
    ]
    assert (tmp_path / "program" / "checkpoints" / "step-0002" / "model.safetensors").exists()
