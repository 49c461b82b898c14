"""GRPO, PPO and online DPO over several models from one file, and how they resume."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import turnwise.compat.chatlearn as chatlearn
from tests.conftest import ROOT, command_environment, python
from tests.models import make_reward_model, perturbed
from tests.programs import Mark
from tests.test_cli import metrics_of, turnwise
from turnwise.compat.chatlearn import Pipeline, VLLMModule
from turnwise.training import checkpoint

SAMPLES, GROUP = 8, 4
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def file(
    build: Path, tokenizer: Any, model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A pipeline's file, and a file of its own for each of its models."""
    folder = tmp_path_factory.mktemp("models")
    reference = perturbed(model_path, folder / "reference")
    words = AutoConfig.from_pretrained(model_path).vocab_size  # it samples any of them
    reward = make_reward_model(tokenizer, folder / "reward", vocabulary=words)
    files = {
        "shared": {"model": {"path": model_path, "max_length": 512}},
        "policy": {
            "includes": ["shared.yaml"],
            "sampling": {"n": GROUP, "max_tokens": 12},
            "cache": {"kv_cache_gib": 0.0625},
        },
        "reference": {"includes": ["shared.yaml"], "model": {"path": reference}},
        "reward": {"model": {"path": reward, "dtype": "float32"}},
        "value": {"model": {"path": reward}},
        "ppo_policy": {
            "includes": ["shared.yaml"],
            "training": {"learning_rate": 1e-3},
            "algorithm": {"kl": {"coef": 0.05}},
        },
        "ppo_value": {"model": {"path": reward}, "training": {"learning_rate": 1e-3}},
        "rlhf": {
            "models": {
                name: {"model_config_file": f"{name}.yaml"}
                for name in ("policy", "reference", "reward", "value", "ppo_policy", "ppo_value")
            },
            "runtime": {
                "num_episode": 2,
                "sample_per_episode": SAMPLES,
                "data_path": str(build / "train.jsonl"),
                "output_dir": str(folder / "runs"),
                "exp_name": "${exp_name:rlhf}",
            },
            "environment": "tests.test_cli:Lottery",
            "deterministic": True,
            "training": {"threads": 1},
        },
    }
    for name, tree in files.items():
        (folder / f"{name}.yaml").write_text(json.dumps(tree))  # JSON is YAML too
    return folder / "rlhf.yaml"


@pytest.fixture(scope="module")
def grpo(file: Path) -> Path:
    """The folder of a GRPO run by the command: one step, then another by a second start."""
    run = file.parent / "runs" / "grpo"
    for episodes in (1, 2):
        done = turnwise(
            "pipeline", file, "pipeline=grpo", f"runtime.num_episode={episodes}", exp_name="grpo"
        )
        assert done.returncode == 0, done.stderr
    assert f"continuing from {run.resolve()}/checkpoints/step-0001" in done.stdout
    assert "models.value, models.ppo_value: no effect; only ppo has a value model" in done.stderr
    return run


@pytest.fixture(scope="module")
def seen(file: Path, grpo: Path) -> Seen:
    mark = Mark()
    output, step = file.parent / "seen.json", grpo / "checkpoints" / "step-0001"
    done = subprocess.run(
        [*python(), "-m", "tests.pipeline.models_scenario", str(file), str(step), str(output)],
        cwd=ROOT,
        env=command_environment() | mark.environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    seen: Seen = json.loads(output.read_text())
    return {**seen, "left": mark.left()}


def folder_of(file: Path, model: str) -> str:
    return str(file.parent / model)


def values_at(masks: list[int], values: list[float]) -> list[float]:
    """Return the values of scored tokens; the others are 0."""
    assert len(masks) == len(values)
    assert all(value == 0 for value, mask in zip(values, masks, strict=True) if not mask)
    return [value for value, mask in zip(values, masks, strict=True) if mask]


def test_the_command_trains_grpo_and_resumes_from_a_checkpoint(grpo: Path) -> None:
    rows = metrics_of(grpo)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["weight_version"] for row in rows] == [1, 2]
    for row in rows:
        assert row["trajectories"] == SAMPLES
        assert row["logprob_diff_max"] < 1e-3
        assert row["kl"] > 0  # the reference is another model, so it is so in the first step too
        assert set(row["reward_parts"]) == {"reward"}
    assert checkpoint.incomplete_reason(grpo / "checkpoints" / "step-0002") == ""
    assert (grpo / "trajectories" / "step-0002.jsonl").exists()


def test_a_run_that_is_complete_says_so(file: Path, grpo: Path) -> None:
    again = turnwise("pipeline", file, "pipeline=grpo", exp_name="grpo")
    assert again.returncode == 0
    assert "the run is complete" in again.stderr
    second = turnwise(
        "pipeline", file, "runtime.enable_resume_training=false", "pipeline=grpo", exp_name="grpo"
    )
    assert (second.returncode, "already holds a run" in second.stderr) == (2, True)


def test_a_missing_model_is_named_before_anything_starts(file: Path) -> None:
    done = turnwise("pipeline", file, "algorithm.advantage.model.path=./nowhere")
    assert done.returncode == 2
    assert "algorithm.advantage.model.path: there is no model in ./nowhere" in done.stderr
    assert not (file.parent / "runs" / "rlhf").exists()


def test_the_reference_gives_the_logprobs_of_transformers(file: Path, seen: Seen) -> None:
    """By `ReferenceModule`."""
    model = AutoModelForCausalLM.from_pretrained(folder_of(file, "reference")).float().eval()
    for step in seen["ppo"]["steps"]:
        for ids, mask, ours in zip(
            step["all_tokens"], step["loss_mask"], step["ref_logprobs"], strict=True
        ):
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            expected = [float(logprobs[t - 1, ids[t]]) for t in range(len(ids)) if mask[t]]
            assert values_at(mask, ours) == pytest.approx(expected, abs=1e-4)


def test_the_value_model_gives_what_transformers_computes(file: Path, seen: Seen) -> None:
    """By `ValueModule`."""
    model = AutoModelForSequenceClassification.from_pretrained(folder_of(file, "reward")).eval()
    first, second = seen["ppo"]["steps"]
    for ids, mask, ours in zip(
        first["all_tokens"], first["loss_mask"], first["old_values"], strict=True
    ):
        with torch.no_grad():
            hidden_TH = model.base_model(torch.tensor([ids])).last_hidden_state[0]
            values = model.score(hidden_TH)[:, 0]
        expected = [float(values[t - 1]) for t in range(len(ids)) if mask[t]]
        assert values_at(mask, ours) == pytest.approx(expected, abs=1e-4)
    assert first["metrics"]["value_loss"] > 0
    assert second["metrics"]["value_loss"] > 0


def test_the_reward_model_gives_what_transformers_computes(
    file: Path, seen: Seen, tokenizer: Any
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder_of(file, "reward")).eval()
    for step in seen["ppo"]["steps"]:
        expected = []
        for messages in step["messages"]:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            with torch.no_grad():
                expected.append(float(model(torch.tensor([ids])).logits[0, 0]))
        assert step["rewards"] == pytest.approx(expected, abs=1e-4)
        assert step["judged"] == pytest.approx(expected, abs=1e-4)
        assert step["metrics"]["reward_mean"] == pytest.approx(sum(expected) / len(expected))


def test_ppo_trains_the_policy_in_the_engines_processes(seen: Seen) -> None:
    """By `PolicyTrainer.train_step`, as it is in ChatLearn, with `training.colocated`."""
    for number, step in enumerate(seen["ppo"]["steps"], start=1):
        metrics = step["metrics"]
        assert (metrics["weight_version"], metrics["trajectories"]) == (number, SAMPLES)
        assert metrics["trained_tokens"] > 0
        assert metrics["logprob_diff_max"] < 1e-3
        assert metrics["canary_diff_max"] < 1e-3


def test_a_resumed_pipeline_goes_on_as_if_it_had_not_stopped(seen: Seen) -> None:
    ppo = seen["ppo"]
    iteration, version, state = ppo["loaded"]
    assert (iteration, version) == (1, 1)
    assert state["position"] == 2
    assert ppo["old_values"] == ppo["steps"][1]["old_values"]  # of the value model after step 1
    assert ppo["exactness"]["tokens_trained"] == sum(map(sum, ppo["steps"][0]["loss_mask"]))
    once, again = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (ppo["steps"][1]["saved"], ppo["again"])
    )
    before = load_file(Path(ppo["steps"][0]["saved"]) / "model.safetensors")
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not all(torch.equal(once[name], before[name]) for name in once)


def test_online_dpo_starts_from_a_checkpoint_of_the_command(
    file: Path, grpo: Path, seen: Seen
) -> None:
    dpo = seen["dpo"]
    assert (dpo["began"], dpo["ended"]) == ([1, 1], [3, 3])
    first, second = dpo["metrics"]
    assert first["loss"] > 0
    assert (first["weight_version"], second["weight_version"]) == (2, 3)
    model = AutoModelForCausalLM.from_pretrained(grpo / "checkpoints" / "step-0001").float().eval()
    for ids, mask, ours in zip(
        dpo["first"]["all_tokens"], dpo["first"]["loss_mask"], dpo["first"]["logprobs"], strict=True
    ):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected = [float(logprobs[t - 1, ids[t]]) for t in range(len(ids)) if mask[t]]
        assert values_at(mask, ours) == pytest.approx(expected, abs=1e-3)


def test_a_mistake_is_one_sentence(seen: Seen) -> None:
    refused = seen["ppo"]["refused"]
    assert (
        refused["no tokens"]
        == "reference needs all_tokens, which the forward_step of a policy returns"
    )
    assert refused["mask"] == "value: loss_mask must have a number for each of all_tokens"
    assert "reward needs trajectories" in refused["nothing"]
    assert "the reward model reward gave no reward: the trajectory has" in refused["no messages"]
    assert "nowhere is no checkpoint to resume from" in refused["checkpoint"]
    assert "is no checkpoint to resume from" in refused["broken"]
    assert "there is no value model: set algorithm.advantage.name" in seen["dpo"]["refused"]


def test_nothing_is_left_after_the_blocks(seen: Seen) -> None:
    assert seen["left"] == []


def test_classes_are_exported_and_imported_when_asked_for() -> None:
    """Importing turnwise, or reading a pipeline's file, imports no torch."""
    text = (
        "import sys, turnwise.compat.chatlearn.pipeline_file;"
        "print({'torch', 'ray', 'vllm'} & sys.modules.keys())"
    )
    said = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert said.stdout == "set()\n", said.stderr
    assert chatlearn.Pipeline is Pipeline
    assert chatlearn.VLLMModule is VLLMModule
    with pytest.raises(AttributeError, match="has no attribute Pipelines"):
        _ = chatlearn.Pipelines


@pytest.mark.slow
def test_the_command_trains_an_adapter_beside_other_models(file: Path) -> None:
    lora = "models.ppo_policy.lora={enable_lora: true, lora_dim: 4, lora_scaling: 8}"
    done = turnwise("pipeline", file, lora, "runtime.num_episode=1", exp_name="lora")
    assert done.returncode == 0, done.stderr
    run = file.parent / "runs" / "lora"
    (row,) = metrics_of(run)
    assert (row["weight_version"], row["logprob_diff_max"] < 1e-4) == (1, True)
    assert row["canary_diff_max"] < 1e-4
    assert load_file(run / "checkpoints" / "step-0001" / "adapter_model.safetensors")
