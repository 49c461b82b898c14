"""One file that names several models, each with a file of its own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from turnwise.compat.chatlearn import (
    Pipeline,
    ReferenceModule,
    RewardModule,
    ValueModule,
    VLLMModule,
)
from turnwise.compat.chatlearn.pipeline_file import PipelineFile, is_pipeline_file
from turnwise.config.algorithm import Gae
from turnwise.errors import InputError

FILES = {
    "rlhf": """
runtime_env:
  platform: DLC
  excludes: ["*pt", logs]
models:
  policy:
    model_config_file: policy.yaml
    num_gpu: ${num_gpu_policy:2}
    trainable: False
    batch_generation: {ranking: "${ranking:False}", min_prompt_length: 0}
    free_memory: ${free_memory_policy:False}
  reference:
    model_config_file: reference.yaml
    num_gpu: 2
    generation_batch_size: ${ref_generation_batch_size:4}
  reward:
    model_config_file: reward.yaml
  math_reward:
    function: tests.pipeline.rewards:math
    weight: 0.5
    num_cpu: 2
  value: {model_config_file: value.yaml}
  ppo_policy:
    model_config_file: ppo_policy.yaml
    num_gpu: 2
    trainable: True
    lora: {enable_lora: "${enable_lora_policy:False}", lora_dim: 64}
  ppo_value: {model_config_file: ppo_value.yaml, trainable: True}
runtime:
  colocation:
    - policy,ppo_policy,reward,reference,value,ppo_value
  generation_batch_size: ${generation_batch_size:4}
  train_micro_batch_size: ${train_micro_batch_size:2}
  train_global_batch_size: ${train_global_batch_size:512}
  num_episode: ${num_episode:200}
  sample_per_episode: ${sample_per_episode:1024}
  num_training_epoch: 1
  save_episode_interval: ${save_episode_interval:50}
  data_path: ${data_path}
  eval_data_path: ${eval_data_path}
  training_data_num_limit: ${training_data_num_limit:-1}
  eval_data_num_limit: ${eval_data_num_limit:128}
  eval_episode_interval: ${eval_episode_interval:100}
  data_checkpoint_path: ${data_checkpoint_path}
  output_dir: ${output_dir}
  exp_name: ${exp_name:chatlearn}
  debug: ${debug:False}
  validate_param_sync: ${validate_param_sync:False}
  max_relay_episode: 1
""",
    "shared": "model: {path: models/policy, dtype: bfloat16, max_length: 1024}\n"
    "tokenizer: {tool_parser: hermes}",
    "policy": "includes: [shared.yaml]\nsampling: {n: 8, temperature: 1.0}",
    "reference": "includes: [shared.yaml]\nmodel: {path: models/reference, dtype: float32}",
    "reward": "load: models/reward\nbf16: True",
    "value": "model: {path: models/value}",
    "ppo_policy": "includes: [shared.yaml]\nlr: ${policy_lr:2.4e-7}\nlr_decay_style: linear\n"
    "clip_grad: 0.5\ninit_kl_coef: 0.05\ngamma: 1\nlam: 0.9\ncliprange: 0.1\n"
    "training: {activation_checkpointing: true}",
    "ppo_value": "load: models/value\nlr: ${value_lr:5e-6}\ncliprange_value: 0.1",
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """ChatLearn's own file for PPO with vLLM, key for key, and models' files."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("data_path", "train.jsonl")
    monkeypatch.setenv("eval_data_path", "heldout.jsonl")
    monkeypatch.setenv("output_dir", "out")
    return tmp_path / "rlhf.yaml"


def test_its_environment_variables_are_those_of_all_actors(file: Path) -> None:
    given = "runtime_env:\n  env_vars: {NCCL_DEBUG: INFO}\n"
    file.write_text(FILES["rlhf"].replace("runtime_env:\n", given))
    read = PipelineFile(file)
    assert read.config.ray_env == {"NCCL_DEBUG": "INFO"}
    assert "env_vars" not in "\n".join(read.notes)


def test_every_key_reaches_the_configuration(file: Path) -> None:
    assert is_pipeline_file(file)
    config = PipelineFile(file).config
    assert (config.model.path, config.model.dtype, config.model.max_length) == (
        "models/policy",
        "bfloat16",
        1024,
    )
    assert (config.serving.workers, config.training.ranks, config.training.colocated) == (
        2,
        2,
        True,
    )
    algorithm = config.algorithm
    assert algorithm.kl.model_dump(include={"coef", "where", "estimator", "model"}) == {
        "coef": 0.05,
        "where": "reward",
        "estimator": "k1",
        "model": {"path": "models/reference", "dtype": "float32"},
    }
    assert algorithm.advantage.model_dump() == {
        "name": "gae",
        "level": "token",
        "gamma": 1.0,
        "lam": 0.9,
        "learning_rate": 5e-6,
        "clip": 0.1,
        "warmup_steps": 0,
        "model": {"path": "models/value", "dtype": None},
    }
    assert algorithm.loss.model_dump(include={"clip_low", "clip_high"}) == {
        "clip_low": 0.1,
        "clip_high": 0.1,
    }
    parts = [part.model_dump(exclude_defaults=True) for part in config.rollout.rewards]
    assert parts == [
        {"name": "reward", "model": "models/reward", "dtype": "bfloat16"},
        {"name": "math_reward", "function": "tests.pipeline.rewards:math", "weight": 0.5},
    ]
    training = config.training
    assert (training.steps, training.checkpoint_every, config.eval.every) == (200, 50, 100)
    assert (config.rollout.prompts_per_step, training.updates_per_step) == (128, 2)
    assert training.micro_batch_tokens == 2048
    assert training.learning_rate == pytest.approx(2.4e-7)
    assert (training.lr_schedule, training.max_grad_norm) == ("linear", 0.5)
    assert training.activation_checkpointing
    data = config.data
    assert (data.path, data.eval_path) == ("train.jsonl", "heldout.jsonl")
    assert (data.limit, data.eval_limit) == (None, 128)
    assert (config.output_dir, config.name, config.log_level) == ("out", "chatlearn", "warning")


def test_what_has_no_effect_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("data_checkpoint_path", "somewhere")
    read = PipelineFile(file)
    assert read.resumes
    said = "\n".join(read.notes)
    assert "runtime.generation_batch_size: no effect; engines take" in said
    assert "runtime.data_checkpoint_path: no effect; each checkpoint contains" in said
    assert "validate_param_sync" not in said  # it is false
    unread = "runtime_env.platform, runtime_env.excludes: no effect; the nodes' own environments"
    assert unread in said


@pytest.mark.parametrize(
    ("kind", "advantage", "loss", "where"),
    [
        ("grpo", "grpo", "ppo_clip", "loss"),
        ("ppo", "gae", "ppo_clip", "reward"),
        ("online_dpo", "grpo", "dpo", "loss"),
    ],
)
def test_one_file_serves_each_pipeline(
    file: Path, kind: str, advantage: str, loss: str, where: str
) -> None:
    read = PipelineFile(file, [f"pipeline={kind}"])
    algorithm = read.config.algorithm
    assert (algorithm.advantage.name, algorithm.loss.name) == (advantage, loss)
    assert algorithm.kl.where == where
    assert algorithm.kl.model.path == "models/reference"
    noted = "models.value, models.ppo_value: no effect; only ppo has a value model" in read.notes
    assert noted == (kind != "ppo")


def test_a_reference_without_a_weight_gets_one(file: Path) -> None:
    (file.parent / "ppo_policy.yaml").write_text("includes: [shared.yaml]")
    assert PipelineFile(file).config.algorithm.kl.coef == 0.02


def test_sections_of_a_configuration_beat_all_but_overrides(file: Path) -> None:
    file.write_text(
        file.read_text() + "\nenvironment: a:B\ntraining: {steps: 7, max_staleness: 1}\n"
        "algorithm: {kl: {coef: 0.3}}"
    )
    config = PipelineFile(
        file, ["sampling.n=4", "runtime.exp_name=other", "models.policy.num_gpu=2"]
    ).config
    assert (config.training.steps, config.training.max_staleness) == (7, 1)
    assert (config.algorithm.kl.coef, config.environment, config.name) == (0.3, "a:B", "other")
    assert config.rollout.prompts_per_step == 256  # 1024 samples, 4 of each prompt


@pytest.mark.parametrize(
    ("groups", "colocated"),
    [
        ("[policy, ppo_policy]", True),
        ('["policy,ppo_policy"]', True),
        ('["policy,reward", "ppo_policy,reference"]', False),
        ("[]", False),
        ("null", False),
    ],
)
def test_colocation_is_the_group_of_policy_and_trainer(
    file: Path, groups: str, colocated: bool
) -> None:
    read = PipelineFile(file, [f"runtime.colocation={groups}"])
    assert read.config.training.colocated is colocated


def test_lora_is_that_of_chatlearn(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PipelineFile(file).config.model.lora.rank == 0
    monkeypatch.setenv("enable_lora_policy", "True")
    lora = PipelineFile(file, ["models.ppo_value.lora={enable_lora: true}"]).config.model.lora
    assert (lora.rank, lora.alpha) == (64, 1.0)
    more = ["models.ppo_policy.lora={enable_lora: true, lora_scaling: 16, lora_dropout: 0.1}"]
    lora = PipelineFile(file, more).config.model.lora
    assert (lora.rank, lora.alpha) == (8, 16.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline=dpo", "pipeline is one of grpo, ppo, online_dpo, not 'dpo'"),
        ("models.refrence.num_gpu=1", "models.refrence is no model of a pipeline; did you mean"),
        ("models.policy.num_gpus=1", "no key models.policy.num_gpus; did you mean num_gpu?"),
        ("models.reward={num_gpu: 1}", "models.reward needs a model_config_file with model.path"),
        ("models.reference.weight=1", "models.reference.weight is for rewards"),
        ("models.policy.lora={enable_lora: true}", "adapters are trained by ppo_policy"),
        (
            "models.ppo_policy.lora={enable_lora: true, part_module_name: a}",
            "models.ppo_policy.lora.part_module_name is not supported",
        ),
        (
            "models.ppo_policy.lora={enable_lora: true, lora_dim: 0}",
            "models.ppo_policy.lora.lora_dim is 0: set enable_lora to false",
        ),
        ("engine.tensor_parallel_size=4", "models.policy.num_gpu 2 is no multiple of the 4 device"),
        ("models.policy.num_gpu=1.5", "models.policy.num_gpu must be a whole number, not 1.5"),
        ("models.ppo_policy.trainable=false", "trainable is False: ppo_policy and ppo_value learn"),
        ("runtime.num_episodes=1", "no key runtime.num_episodes; did you mean num_episode?"),
        ("runtime.num_training_epoch=2", "runtime.num_training_epoch is 2: a sample is trained"),
        ("runtime.colocation=[policy, nobody]", "colocation names nobody, which is not in models"),
        ("runtime.sample_per_episode=1001", "sample_per_episode 1001 is no multiple of sampling.n"),
        (
            "runtime.sample_per_episode=0",
            "sample_per_episode must be a whole number of 1 or more, not 0",
        ),
        ("models.policy.model_config_file=no.yaml", "there is no model file .*no.yaml"),
        ("models.value.model_config_file=no.yaml", "there is no file .*no.yaml"),
        ("algorithm.advantage={name: rloo}", "pipeline ppo needs algorithm.advantage.name gae"),
        ("trainning.steps=1", "there is no key trainning"),
    ],
)
def test_a_mistake_is_one_sentence(file: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineFile(file, [override])


@pytest.mark.parametrize("place", ["policy.yaml", "rlhf.yaml", "override"])
def test_devices_are_divided_by_the_engine_size_of_any_file(file: Path, place: str) -> None:
    overrides = ["models.policy.num_gpu=8", "runtime.colocation=null"]
    if place == "override":
        overrides.append("engine.tensor_parallel_size=4")
    else:
        with (file.parent / place).open("a") as text:
            text.write("\nengine: {tensor_parallel_size: 4}\n")
    config = PipelineFile(file, overrides).config
    assert (config.serving.workers, config.engine.tensor_parallel_size) == (2, 4)


def test_a_part_of_the_algorithm_may_be_a_bare_name(file: Path) -> None:
    (file.parent / "ppo_policy.yaml").write_text(
        "cliprange: 0.1\nalgorithm: {advantage: turn_returns, loss: gspo}\n"
    )
    tree = yaml.safe_load(file.read_text())
    del tree["models"]["value"], tree["models"]["ppo_value"], tree["runtime"]["colocation"]
    file.write_text(yaml.safe_dump(tree))
    config = PipelineFile(file, ["algorithm.advantage.gamma=0.5"]).config
    assert config.algorithm.advantage.model_dump() == {
        "name": "turn_returns", "gamma": 0.5, "scale": True,
    }  # fmt: skip
    assert config.algorithm.loss.model_dump() == {
        "name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ppo_value", "load: other", "value.yaml and ppo_value.yaml disagree on algorithm.adv"),
        ("ppo_policy", "model: {max_length: 7}", "policy.yaml and ppo_policy.yaml disagree on mod"),
        ("reference", "model: {pth: a}", "reference.yaml: there is no key model.pth; did you mean"),
        ("reference", "training: {steps: 1}", "training.steps is no key of a reference's file"),
        ("value", "modle: {path: a}", "value.yaml: there is no key modle; did you mean model?"),
        ("ppo_policy", "training: {step: 1}", "no key training.step; did you mean training.steps?"),
        ("ppo_policy", "includes: [ppo_policy.yaml]", "ppo_policy.yaml includes itself"),
        ("rlhf", "model: {policy: 1}\nruntime: {}", "models needs a policy"),
        ("rlhf", "models: {policy: 1}", "models.policy must hold keys and values"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    file: Path, name: str, text: str, message: str
) -> None:
    (file.parent / f"{name}.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        PipelineFile(file)


def test_modules_may_bring_their_files_to_a_plain_configuration(file: Path) -> None:
    config = file.parent / "config.yaml"
    config.write_text("algorithm: {advantage: {name: gae}}")
    (file.parent / "other.yaml").write_text("load: models/other")
    pipeline = Pipeline(
        config,
        VLLMModule("policy", file.parent / "policy.yaml"),
        ReferenceModule("reference", file.parent / "reference.yaml"),
        ValueModule("value", file.parent / "value.yaml"),
        RewardModule("reward", file.parent / "reward.yaml"),
        RewardModule("other_reward", file.parent / "other.yaml"),
        overrides=["training.steps=3"],
    )
    made = pipeline.config
    assert (made.model.path, made.training.steps) == ("models/policy", 3)
    assert made.algorithm.kl.model.path == "models/reference"
    assert isinstance(made.algorithm.advantage, Gae)
    assert made.algorithm.advantage.model.path == "models/value"
    assert [(part.name, part.model) for part in made.rollout.rewards] == [
        ("reward", "models/reward"),
        ("other_reward", "models/other"),
    ]


def test_a_pipeline_takes_the_file_with_overrides_of_both_kinds(file: Path) -> None:
    changes = ["runtime.num_episode=3", "sampling.temperature=0.5"]
    pipeline = Pipeline(file, VLLMModule("policy"), overrides=changes)
    assert pipeline.config == PipelineFile(file, changes).config
    assert (pipeline.config.training.steps, pipeline.config.sampling.temperature) == (3, 0.5)
    with pytest.raises(InputError, match="nowhere is no checkpoint to resume from"):
        Pipeline(file, resume=file.parent / "nowhere")


def test_a_configuration_is_no_pipeline_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: a}")
    assert not is_pipeline_file(path)
    assert not is_pipeline_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("kind", ["grpo", "ppo", "online_dpo"])
def test_the_examples_file_serves_each_pipeline(kind: str) -> None:
    path = ROOT / "examples" / "calculator" / "rlhf.yaml"
    config = PipelineFile(path, [f"pipeline={kind}"]).config
    assert config.environment == "examples.calculator.environment:Calculator"
    names: dict[str, Any] = {"advantage": config.algorithm.advantage.name}
    assert names["advantage"] == ("gae" if kind == "ppo" else "grpo")
    assert config.rollout.prompts_per_step * config.sampling.n == 256


def test_a_rewards_own_keys_are_its_programs(file: Path) -> None:
    (file.parent / "reward.yaml").write_text("load: models/reward\nmath_reward_strategy: merge")
    reward = RewardModule("reward", file.parent / "reward.yaml")
    pipeline = Pipeline(file, VLLMModule("policy"), reward)
    assert reward.model_args["math_reward_strategy"] == "merge"
    assert reward.model_args["seed"] == pipeline.config.seed
    (file.parent / "reward.yaml").write_text("load: models/reward\nloda: 7")
    with pytest.raises(InputError, match=r"no key loda; did you mean load\?"):
        PipelineFile(file)


def test_a_file_that_trains_nothing_needs_no_training_data(tmp_path: Path) -> None:
    """As ChatLearn's `eval_vllm.yaml`."""
    path = tmp_path / "eval.yaml"
    path.write_text("""
models:
  policy: {model_config_file: policy.yaml, trainable: False}
  any_reward: {function: "tests.pipeline.rewards:math"}
runtime: {eval_data_path: held.jsonl, eval_episode_interval: 1}
""")
    (tmp_path / "policy.yaml").write_text("load: models/policy\nmin_p: 0.1")
    config = PipelineFile(path).config
    assert (config.data.path, config.data.eval_path) == (None, "held.jsonl")
    assert config.sampling.min_p == 0.1
