"""NeMo-RL's environments and programs, with an actor's interface and a simulated engine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import turnwise
from tests.rollouts.test_episode import Talking
from turnwise.compat.keys import answer
from turnwise.compat.nemo_rl import (
    EnvironmentInterface,
    EnvironmentReturn,
    MasterConfig,
    grpo_train,
    setup,
)
from turnwise.compat.nemo_rl.environments import TaskEnvironment, row_of
from turnwise.compat.nemo_rl.program import _CARRIED, _rows, keys_of
from turnwise.config import Config, SamplingConfig, known_keys, load_config
from turnwise.errors import InputError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.trajectory import audit

PROMPT = list(b"Count.")
ROOT = Path(__file__).parents[3]


class Counting(EnvironmentInterface[dict[str, int]]):
    """Counts its steps in the metadata, and ends the episode after the second step."""

    def __init__(self, parts: bool = False) -> None:
        self.logs: list[Any] = []
        self.parts = parts

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[dict[str, int]]:
        self.logs += message_log_batch
        count = metadata[0]["count"] + 1
        rewards: Any = torch.tensor([0.5])
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f" <{count}>"}],
            metadata=[{"count": count}],
            next_stop_strings=[["."]],
            rewards={"even": rewards, "odd": 2 * rewards} if self.parts else rewards,
            terminateds=torch.tensor([count == 2]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        assert batch["extra_env_info"] == [{"count": 0}]
        return batch, {"solved": (batch["total_reward"] == 1.0).float().mean().item()}


def datum(number: int = 0, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Count.", "token_ids": torch.tensor(PROMPT)}
    known = {"message_log": [message], "length": len(PROMPT), "extra_env_info": {"count": 0}}
    return {**known, "loss_multiplier": 1.0, "idx": number, "task_name": "count", **fields}


async def play(
    make_config: Callable[..., Config], tokenizer: Any, environment: Any, **rollout: Any
) -> Group:
    loop = "turnwise.compat.nemo_rl.environments:MessageLogLoop"
    config = make_config(rollout={"loop": loop, **rollout})
    runner = Runner(config, tokenizer, lambda row: TaskEnvironment(row, {"count": environment}))
    problem = Problem("rows:1", row_of(datum()))
    sampling = SamplingConfig(n=1, max_tokens=8)
    return await runner.run_group(Talking(vocab_size=256), problem, sampling, "t")


async def test_observations_follow_answers_as_plain_text(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    environment = Counting()
    group = await play(make_config, tokenizer, environment)
    (trajectory,) = group.trajectories
    first, second = trajectory.turns
    assert first.added.tolist() == PROMPT
    observed = tokenizer.encode(" <1>", add_special_tokens=False)
    assert (second.prefix_length, second.added.tolist()) == (
        len(PROMPT) + len(first.completion_token_ids),
        observed,
    )
    assert trajectory.reward == 1.0
    assert trajectory.outcome.turns == [0.5, 0.5]
    audit(trajectory, trajectory.samples())
    log = environment.logs[-1]
    assert [each["role"] for each in log] == ["user", "assistant", "environment", "assistant"]
    assert log[2]["content"] == " <1>"
    assert trajectory.outcome.metrics == {"solved": 1.0}


async def test_rewards_by_name_are_parts(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    (trajectory,) = (await play(make_config, tokenizer, Counting(parts=True))).trajectories
    assert trajectory.outcome.parts == {"environment": 3.0, "even": 1.0, "odd": 2.0}
    (short,) = (await play(make_config, tokenizer, Counting(), max_turns=1)).trajectories
    assert (short.status, short.reward) == ("max_turns", 0.5)


def test_a_task_without_environment_is_named() -> None:
    with pytest.raises(InputError, match="task_to_env has no environment for the task other"):
        TaskEnvironment(row_of(datum(task_name="other")), {"count": Counting()})
    with pytest.raises(InputError, match="datum 3: each message needs token_ids"):
        row_of(datum(3, message_log=[{"role": "user", "content": "Count."}]))


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (datum(number) for number in iter(int, 1))


def test_a_dataset_is_read_by_index_or_in_order() -> None:
    listed = _rows([datum(0), datum(1)], 9, heldout=True)
    assert (len(listed), listed[1]["idx"], listed[1]["heldout"]) == (2, 1, True)
    endless = _rows(Endless(), 5)
    assert len(endless) == 5
    assert endless[3] is endless[3], "it is drawn once"
    assert endless[4]["message_log"][0]["token_ids"] == PROMPT


MASTER: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 2,
        "max_num_steps": 3,
        "max_rollout_turns": 5,
        "use_leave_one_out_baseline": True,
        "normalize_rewards": False,
        "val_period": 2,
        "async_grpo": {"enabled": True, "max_trajectory_age_steps": 2},
    },
    "loss_fn": {
        "reference_policy_kl_penalty": 0.01,
        "ratio_clip_min": 0.1,
        "ratio_clip_max": 0.3,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 3.0,
    },
    "policy": {
        "model_name": "some/model",
        "optimizer": {"kwargs": {"lr": 1e-5}},
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 8, "alpha": 32}},
        "generation": {"temperature": 0.7, "top_k": None},
    },
    "checkpointing": {"enabled": True, "checkpoint_dir": "results/puzzle", "save_period": 10},
    "data": {"shuffle": False},
}


def test_a_programs_configuration_becomes_ours() -> None:
    assert {answer(key) for key in _CARRIED} <= set(known_keys())
    config = MasterConfig(**MASTER)
    assert config.grpo.max_num_steps == config["grpo"]["max_num_steps"] == 3
    keys = keys_of(config)
    made = load_config({"environment": "a:B", "data": {"path": "d"}}, settings=keys)
    assert (made.rollout.prompts_per_step, made.sampling.n, made.rollout.max_turns) == (4, 2, 5)
    assert (made.algorithm.advantage.name, made.algorithm.reduction) == ("rloo", "sequence_mean")
    loss: Any = made.algorithm.loss
    assert (loss.name, loss.clip_low, loss.clip_high) == ("ppo_clip", 0.1, 0.3)
    correction = made.algorithm.correction
    assert (correction.name, correction.high) == ("token_tis", 3.0)
    assert (made.algorithm.kl.coef, made.training.max_staleness) == (0.01, 2)
    assert made.model.lora is not None
    assert (made.model.lora.rank, made.training.learning_rate) == (8, 1e-5)
    assert (made.run_folder, made.training.checkpoint_every) == (Path("results/puzzle"), 10)
    assert (made.sampling.temperature, made.eval.every, made.data.shuffle) == (0.7, 2, False)


def test_what_cannot_be_carried_over_is_named() -> None:
    config = MasterConfig(**MASTER)
    assert setup(config, None, "rows", "heldout")[4:6] == ("rows", "heldout")
    assert setup(config, None, [])[10] is config
    config.policy["megatron_cfg"] = {"enabled": True}
    with pytest.raises(InputError, match=r"policy\.megatron_cfg\.enabled cannot be carried over"):
        setup(config, None, [])


def test_a_program_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(turnwise, "train", lambda **keys: calls.append(keys))
    checkpointing = {"enabled": True, "checkpoint_dir": str(tmp_path / "puzzle")}
    config = MasterConfig(**{**MASTER, "checkpointing": checkpointing})
    dataset = [datum(number) for number in range(8)]
    for _ in range(2):
        grpo_train(*[None] * 2, dataset, dataset, *[None] * 2, {}, {}, *[None] * 3, config)
        (tmp_path / "puzzle" / "checkpoints" / "step-0002").mkdir(parents=True, exist_ok=True)
    first, second = calls
    assert (first["steps"], first["resume"]) == (2, None), "one epoch of eight problems by four"
    assert second["resume"] == tmp_path / "puzzle"
    assert (len(first["data"]), len(first["eval_data"])) == (8, 8)
    grpo_train(*[None] * 2, dataset, None, *[None] * 2, {}, None, *[None] * 3, config)
    assert (calls[-1]["eval_data"], calls[-1]["eval.every"]) == (None, 0)


FILES = """
import sys
from omegaconf import OmegaConf
from turnwise.compat.nemo_rl import load_config, parse_hydra_overrides, register_omegaconf_resolvers
register_omegaconf_resolvers()
config = load_config("child.yaml")
config = parse_hydra_overrides(config, ["grpo.steps=7", "+grpo.new=1", "~grpo.old"])
assert OmegaConf.to_container(config, resolve=True) == {
    "grpo": {"steps": 7, "double": 14, "new": 1}, "env": {"b": 2}
}, config
try:
    parse_hydra_overrides(config, ["grpo.stepz=7"])
except Exception as error:
    assert "grpo.stepz=7 changes no key" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_files_inherit_compute_and_are_overridden(tmp_path: Path) -> None:
    """Configuration files, by the real omegaconf."""
    (tmp_path / "base.yaml").write_text(
        "grpo: {steps: 1, double: '${mul:2,${grpo.steps}}', old: 1}\nenv: {a: 1}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "defaults: base.yaml\ngrpo: {steps: 2}\nenv: {_override_: true, b: 2}\n"
    )
    installed = tmp_path / "installed"
    pip = [sys.executable, *("-m", "pip", "install", "--quiet", "--target", installed, "omegaconf")]
    subprocess.run(pip, check=True, timeout=900)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{installed}"}
    command = [sys.executable, "-c", FILES]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
