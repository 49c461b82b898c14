"""Programs that other systems have published, with nothing but their imports and paths changed.

    python -m tests.published [--verl CLONE] [--nemo CLONE] [--chatlearn CLONE] [--steps 2]

A CLONE is a git repository of the system with its history. The programs are read from the last
commit that had them, and train the demo's model for a few steps:

- verl's `examples/ppo_trainer/naive_chat_scheduler.py`, as `rollout.chat_scheduler`
- NeMo-RL's `examples/run_grpo_sliding_puzzle.py`, with its environment and its configuration
- ChatLearn's `examples/megatron/entry/train_rlhf.py` and `train_online_dpo.py`
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from safetensors.torch import load_file

from examples.calculator.prepare import prepare

ROOT = Path(__file__).parent.parent


class Run(Protocol):
    """Runs a system's programs from its clone, for some steps, in a folder with the demo's files;
    fails unless they have trained."""

    def __call__(self, clone: Path, folder: Path, steps: int) -> None: ...


VERL = "457f4d2a2~1", "examples/ppo_trainer/naive_chat_scheduler.py"
NEMO = "7ea279abf", "examples/run_grpo_sliding_puzzle.py"
PUZZLE = "nemo_rl/environments/games/sliding_puzzle.py"
CHATLEARN = "b92d628d~1", "examples/megatron/entry"
IMPORTS = {
    "verl": {
        r"from verl\.protocol import": "from turnwise.compat.verl import",
        r"from verl\.workers\.rollout\.async_server import": "from turnwise.compat.verl import",
    },
    "nemo": {
        r"from nemo_rl\.environments\.games\.sliding_puzzle import": "from sliding_puzzle import",
        r"from nemo_rl\.[a-z_.]+ import": "from turnwise.compat.nemo_rl import",
    },
    "chatlearn": {
        r"from examples\.megatron\.models import (Policy|VLLM).*": "from chatlearn_models import *",
        r"from examples\.megatron\.models import .*": "from chatlearn_models import *",
        r"from examples\.megatron\.models\.utils import": "from chatlearn_models import",
        r"from examples\.megatron\.models\.eval_.* import": "from chatlearn_models import",
        r"import chatlearn$": "import turnwise.compat.chatlearn as chatlearn",
        r"from chatlearn import": "from turnwise.compat.chatlearn import",
    },
}
"""Changes of a program's imports: what a user would write in their place."""
MODELS = '''
"""The models of ChatLearn's examples, by their names there."""

import json

from turnwise.compat.chatlearn import (
    Evaluator as EvaluatorPostProcess,
    ReferenceModule as PolicyReference,
    RewardModule as RewardInference,
    TrainerModule as PolicyTrainer,
    TrainerModule as ValueTrainer,
    ValueModule as ValueInference,
    VLLMModule as PolicyInference,
)

PolicyModel = PolicyInference


def get_prompts(path, num_limit=None):
    return [json.loads(line) for line in open(path)][:num_limit]
'''


def program(clone: Path, commit: str, path: str, system: str) -> str:
    """Return a program's text with the imports of Turnwise."""
    shown = subprocess.run(
        ["git", "-C", str(clone), "show", f"{commit}:{path}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    text = shown.stdout
    for old, new in IMPORTS[system].items():
        text = re.sub(old, new, text, flags=re.MULTILINE)
    return text


def run(folder: Path, *command: object) -> None:
    """Run a command with the modules of a folder; print its end if it fails."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stdout[-4000:]}")


def check(run_folder: Path, steps: int) -> str:
    """Return what a run did; every trained token must be the sampled one."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").open()]
    exactness = json.loads((run_folder / "exactness.json").read_text())
    trained = sum(line.get("trained_tokens") or 0 for line in lines)
    assert lines[-1]["step"] == steps, lines[-1]["step"]
    assert trained, "nothing was trained"
    return f"{steps} steps, {trained} trained tokens, {exactness}"


def verl(clone: Path, folder: Path, steps: int) -> None:
    (folder / "naive_chat_scheduler.py").write_text(program(clone, *VERL, "verl"))
    target = ("--target", folder, "--no-deps", "--quiet", "tensordict", "pyvers")
    run(folder, "-m", "pip", "install", *target)
    keys = {
        "environment": "tests.test_cli:Lottery",  # a reward that one turn without tools can get
        "rollout.loop": "chat_scheduler",
        "rollout.chat_scheduler": "naive_chat_scheduler.NaiveChatCompletionScheduler",
        "model.path": folder / "model",
        "data.path": folder / "train.jsonl",
        "data.eval_path": folder / "heldout.jsonl",
        "data.eval_limit": 16,
        "eval.every": steps,
        "rollout.prompts_per_step": 8,
        "rollout.max_response_tokens": 64,
        "training.steps": steps,
        "output_dir": folder,
        "name": "verl",
    }
    changes = [f"{key}={value}" for key, value in keys.items()]
    run(folder, "-m", "turnwise", "train", "examples/calculator/config.yaml", *changes)
    print(f"verl: {VERL[1]}: {check(folder / 'verl', steps)}", flush=True)


def nemo(clone: Path, folder: Path, steps: int) -> None:
    commit, path = NEMO
    file = folder / "run_grpo_sliding_puzzle.py"
    file.write_text(program(clone, commit, path, "nemo"))
    (folder / "sliding_puzzle.py").write_text(program(clone, commit, PUZZLE, "nemo"))
    for name in ("grpo_sliding_puzzle.yaml", "grpo_math_1B.yaml"):
        (folder / name).write_text(program(clone, commit, f"examples/configs/{name}", "nemo"))
    run(folder, "-m", "pip", "install", "--target", folder, "--quiet", "omegaconf")
    keys = {
        "policy.model_name": folder / "model",
        "policy.precision": "float32",
        "policy.max_total_sequence_length": 2048,
        "policy.generation.max_new_tokens": 8,
        "policy.dtensor_cfg.activation_checkpointing": "false",
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": steps,
        "grpo.max_rollout_turns": 3,
        "grpo.max_val_samples": 4,
        "grpo.val_period": steps,
        "env.sliding_puzzle_game.cfg.game_config.size": 2,
        "checkpointing.checkpoint_dir": folder / "nemo",
        "checkpointing.save_period": steps,
        "logger.log_dir": folder / "logs",
    }
    changes = [f"{key}={value}" for key, value in keys.items()]
    run(folder, file, "--config", folder / "grpo_sliding_puzzle.yaml", *changes)
    print(f"NeMo-RL: {path}: {check(folder / 'nemo', steps)}", flush=True)


def chatlearn(clone: Path, folder: Path, steps: int) -> None:
    (folder / "chatlearn_models.py").write_text(MODELS)
    for name, pipeline in (("train_rlhf", "ppo"), ("train_online_dpo", "online_dpo")):
        file = folder / f"{name}.py"
        commit, entry = CHATLEARN
        file.write_text(program(clone, commit, f"{entry}/{name}.py", "chatlearn"))
        changes = [
            *(f"pipeline={pipeline}", f"runtime.num_episode={steps}"),
            *("runtime.sample_per_episode=32", "runtime.train_global_batch_size=32"),
            *("runtime.eval_episode_interval=1", f"runtime.save_episode_interval={steps}"),
            *("runtime.training_data_num_limit=200", f"runtime.data_path={folder}/train.jsonl"),
            "models.reward={function: examples.calculator.rlhf:right}",
            *(f"runtime.exp_name={name}", f"output_dir={folder}"),
        ]
        run(folder, file, "--config", "examples/calculator/rlhf.yaml", *changes)
        trained = folder / name / "checkpoints" / f"step-{steps:04d}" / "model.safetensors"
        first = folder / "model" / "model.safetensors"
        before, after = load_file(first), load_file(trained)
        assert any(not after[key].equal(before[key]) for key in before), "nothing was trained"
        print(f"ChatLearn: {entry}/{name}.py: {steps} episodes, a trained checkpoint", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verl", type=Path, help="a clone of verl")
    parser.add_argument("--nemo", type=Path, help="a clone of NeMo-RL")
    parser.add_argument("--chatlearn", type=Path, help="a clone of ChatLearn")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "published")
    options = parser.parse_args()
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder)
    prepare()  # the pipeline's files name the model there
    if options.verl is not None:
        verl(options.verl, folder, options.steps)
    if options.nemo is not None:
        nemo(options.nemo, folder, options.steps)
    if options.chatlearn is not None:
        chatlearn(options.chatlearn, folder, options.steps)


if __name__ == "__main__":
    main()
