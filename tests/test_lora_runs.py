"""Whole runs that train a LoRA: every transport, resumed, and what they leave for others."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, command_environment
from tests.test_cli import Lottery, metrics_of, turnwise, write_config
from tests.test_runs import timeless
from turnwise.config import Config, load_config
from turnwise.trajectory import Trajectory, audit, read_jsonl

pytestmark = pytest.mark.slow

__all__ = ["Lottery"]
LORA = ("model.lora.rank=4", "training.learning_rate=0.01", "sampling.n=4", "eval.every=2")


@pytest.fixture(scope="module")
def file(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(make_config, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def whole(file: Path) -> Path:
    """A deterministic run of four steps."""
    options = ("deterministic=true", "training.steps=4", "training.checkpoint_every=1")
    done = turnwise("train", file, *LORA, *options, "training.keep_last=4", "name=whole")
    assert done.returncode == 0, done.stderr
    return file.parent / "runs" / "whole"


def exact(run: Path, steps: int) -> None:
    """Check the engines' log-probs and every trained token of a run."""
    rows = metrics_of(run)[-steps:]
    assert [row["weight_version"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["canary_diff_max"] < 1e-4
        assert row["logprob_diff_max"] < 1e-4 or row["staleness_max"]
    for path in (run / "trajectories").glob("step-*.jsonl"):
        assert all(audit(trajectory).violations == 0 for trajectory in read_jsonl(path))
    (adapter,) = (run / "checkpoints").glob(f"step-000{steps}/adapter_model.safetensors")
    moved = [t for name, t in load_file(adapter).items() if "lora_B" in name]
    assert moved
    assert all(bool(tensor.any()) for tensor in moved)


@pytest.mark.parametrize(
    "options",
    [
        ("weights.transport=shm", "algorithm.kl.coef=0.01", "serving.workers=2"),
        ("weights.transport=ipc", "algorithm.advantage.name=gae", "training.ranks=2"),
        ("weights.transport=collective", "algorithm.loss={name: dpo}"),
        ("weights.transport=disk", "training.max_staleness=1", "training.updates_per_step=1"),
        ("training.colocated=true", "training.offload=[params, optimizer]"),
        (
            "training.colocated=true",
            "training.ranks=2",
            "engine.tensor_parallel_size=2",
            "training.offload=[params, optimizer]",
            "model.lora.target_modules=[q_proj, down_proj]",
        ),
    ],
    ids=["shm-kl", "ipc-ppo-ranks", "collective-dpo", "disk-async", "in-process", "sharded"],
)
def test_the_engines_sample_from_base_plus_adapter(file: Path, options: tuple[str, ...]) -> None:
    name = options[0].rpartition("=")[2] + str(len(options))
    done = turnwise("train", file, *LORA, "training.threads=1", f"name={name}", *options)
    assert done.returncode == 0, done.stderr
    exact(file.parent / "runs" / name, 2)


def test_a_run_goes_on_bit_for_bit(whole: Path) -> None:
    exact(whole, 4)
    resumed = whole.with_name("resumed")
    shutil.copytree(whole, resumed)
    for step in (3, 4):
        shutil.rmtree(resumed / "checkpoints" / f"step-000{step}")
    done = turnwise("train", "--resume", resumed)
    assert done.returncode == 0, done.stderr
    assert timeless(resumed) == timeless(whole)
    for path in ("trajectories/step-0004.jsonl", "checkpoints/step-0004/adapter_model.safetensors"):
        assert (resumed / path).read_bytes() == (whole / path).read_bytes()


def greedy_answers(run: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of the evaluation after the last step."""
    path = max((run / "trajectories").glob("eval-*.jsonl"))
    trajectories: list[Trajectory] = list(read_jsonl(path))
    return [(t.turns[0].added_token_ids, t.turns[0].completion_token_ids) for t in trajectories]


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, adapter, source = sys.argv[1:]
    more = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=1024, block_size=32,
        kv_cache_memory_bytes=2**26, **more,
    )
    rows = json.load(open(source))
    made = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in rows],
        SamplingParams(temperature=0, max_tokens=16, detokenize=True),
        lora_request=LoRARequest("run", 1, adapter) if adapter else None,
    )
    print("ANSWERS", json.dumps([list(m.outputs[0].token_ids) for m in made]))
"""


def vllm_answers(folder: Path, model: str, adapter: str, rows: list[Any]) -> list[list[int]]:
    """Greedy answers of plain vLLM, in a process of its own."""
    script, source = folder / "plain_vllm.py", folder / "rows.json"
    script.write_text(VLLM)
    source.write_text(json.dumps(rows))
    done = subprocess.run(
        [sys.executable, str(script), model, adapter, str(source)],
        capture_output=True,
        text=True,
        timeout=600,
        env=command_environment() | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    answers: list[list[int]] = json.loads(line.removeprefix("ANSWERS"))
    return answers


def agreed(model: Any, rows: list[tuple[list[int], list[int]]]) -> None:
    """Check that each answer's tokens are the most likely ones under a model."""
    for prompt, answer in rows:
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits_TV.argmax(-1).tolist() == answer


def test_what_is_exported_gives_the_runs_answers_elsewhere(whole: Path, tmp_path: Path) -> None:
    config = load_config(whole / "config.yaml")
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    for output, flags in ((merged, ["--merged"]), (adapter, [])):
        done = turnwise("export", whole, *flags, "--output", output)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(output)
    again = turnwise("export", whole, "--output", adapter)
    assert again.returncode == 2
    assert f"{adapter} exists" in again.stderr

    rows = greedy_answers(whole)
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    with pytest.raises(AssertionError):
        agreed(base, rows)  # the answers are those of the adapter
    agreed(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval(), rows)
    agreed(PeftModel.from_pretrained(base, adapter).eval(), rows)
    answers = [answer for _, answer in rows]
    assert vllm_answers(tmp_path, str(merged), "", rows) == answers
    assert vllm_answers(tmp_path, config.model.path, str(adapter), rows) == answers


PROGRAM = """
import sys, turnwise
from tests.test_cli import Lottery

if __name__ == "__main__":
    model, config, folder = sys.argv[1:]
    rows = [{"question": f"What is {n} + {n}?"} for n in range(8)]
    result = turnwise.train(
        model=model, environment=Lottery, data=rows, steps=1, config=config, name="program",
        output_dir=folder, progress=False, **{"model.lora.rank": 4},
    )
    done = turnwise.evaluate(
        model=result.checkpoint, environment=Lottery, data=rows, config=config, name="evaluated",
        output_dir=folder, progress=False,
    )
    print("SAMPLED", len(done.trajectories))
"""


def test_a_program_trains_and_evaluates_an_adapter(
    file: Path, model_path: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), model_path, str(file), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**command_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "SAMPLED 8" in done.stdout
