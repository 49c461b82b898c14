"""Attributes that scripts of TRL read of a trainer: model, rewards, dataloaders, logs, masks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.models import make_reward_model, perturbed
from tests.trl_maze import ones
from turnwise.compat.trl.config import settings
from turnwise.compat.trl.logs import TrlNames
from turnwise.compat.trl.policy import Policy
from turnwise.config import Config, make_config
from turnwise.errors import InputError
from turnwise.observe.metrics import StepMetrics
from turnwise.training import checkpoint_state
from turnwise.training.lora import write_adapter
from turnwise.trajectory import Outcome, Trajectory
from turnwise.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "answer": n} for n in range(8)]


def trainer(model: Any = "/no/such/model", **given: Any) -> GRPOTrainer:
    arguments = {"reward_funcs": ones, "train_dataset": ROWS, **given}
    return GRPOTrainer(model=model, **arguments)


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_the_scripts_model_gets_the_trained_weights_in_place(
    model_path: str, tmp_path: Path
) -> None:
    made = trainer(model_path)
    model, before = made.model, values_of(made.model)
    assert made.model is model
    assert model.dtype == torch.float32
    made._policy.refresh(Path(perturbed(model_path, tmp_path / "step-0001")))
    assert made.model is model
    trained = values_of(AutoModelForCausalLM.from_pretrained(tmp_path / "step-0001"))
    for name, value in before.items():
        assert not torch.equal(model.get_parameter(name), value)
        assert torch.equal(model.get_parameter(name), trained[name])
    later = Policy(model_path, model_path, None, "float32")  # not read before the training
    later.refresh(tmp_path / "step-0001")
    for name, value in trained.items():
        assert torch.equal(later.model.get_parameter(name), value)


def test_an_adapter_is_trained_in_the_model_and_its_base_stays(
    model_path: str, tmp_path: Path
) -> None:
    given = AutoModelForCausalLM.from_pretrained(model_path)
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    made = trainer(given, peft_config=LoraConfig(), args=args)
    model: Any = made.model
    assert isinstance(model, PeftModel)
    before = values_of(model)
    adapter = {
        f"{name.replace('.default.', '.')}": torch.full_like(value, 0.5)
        for name, value in before.items()
        if ".lora_" in name
    }
    assert len(adapter) > 4
    write_adapter(tmp_path / "step-0001", {"peft_type": "LORA"}, adapter)
    made._policy.refresh(tmp_path / "step-0001")
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name]) is (".lora_" not in name)


def test_a_peft_model_is_trained_from_a_fresh_adapter(model_path: str, tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=["q_proj", "v_proj"])
    plain = AutoModelForCausalLM.from_pretrained(model_path)
    weights = values_of(plain)
    given: Any = get_peft_model(plain, lora)
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    made = trainer(given, args=args)
    assert made.model is given
    assert made._config.model.lora.target_modules == ["q_proj", "v_proj"]
    saved = AutoModelForCausalLM.from_pretrained(made.settings["model.path"])
    for name, value in weights.items():
        assert torch.equal(saved.get_parameter(name), value)
    with pytest.raises(InputError, match="model has an adapter already: pass the plain model"):
        trainer(given, args=args, peft_config=lora)
    for name, parameter in given.named_parameters():
        if ".lora_B." in name:
            parameter.data.fill_(0.1)
    with pytest.raises(InputError, match=r"already trained .*merge_and_unload"):
        trainer(given, args=args)


def test_a_model_with_code_of_its_own_needs_trust(model_path: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(tmp_path / "own")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "own")
    kind = type(AutoModelForCausalLM.from_pretrained(model_path))
    (tmp_path / "own" / "modeling_own.py").write_text(
        f"from transformers import {kind.__name__}, {kind.config_class.__name__}\n"
        f"class OwnConfig({kind.config_class.__name__}):\n    model_type = 'own_model'\n"
        f"class OwnForCausalLM({kind.__name__}):\n    config_class = OwnConfig\n"
    )
    file = tmp_path / "own" / "config.json"
    known = json.loads(file.read_text()) | {"model_type": "own_model"}
    known["architectures"] = ["OwnForCausalLM"]
    known["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    file.write_text(json.dumps(known))
    with pytest.raises(ValueError, match="custom code"):
        trainer(str(tmp_path / "own"))
    made = trainer(str(tmp_path / "own"), args=GRPOConfig(trust_remote_code=True))
    assert type(made.model).__name__ == "OwnForCausalLM"


def test_reward_models_in_memory_are_saved_with_their_tokenizers(
    tokenizer: Any, model_path: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    path = make_reward_model(tokenizer, tmp_path / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(path)
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    made = trainer(
        reward_funcs=[ones, model, "some/classifier"],
        reward_processing_classes=[None, tokenizer, None],
        args=args,
    )
    _, judge, named = made.settings["rollout.rewards"]
    assert judge["name"] == "judge"
    assert AutoTokenizer.from_pretrained(judge["tokenizer"]).pad_token_id == tokenizer.pad_token_id
    saved = AutoModelForSequenceClassification.from_pretrained(judge["model"])
    assert saved.config.pad_token_id == tokenizer.pad_token_id
    assert named == {"model": "some/classifier", "name": "classifier", "weight": 1.0}
    assert made.reward_func_names == ["ones", "judge", "classifier"]
    assert made.reward_processing_classes == [None, tokenizer, None]


def test_evaluation_sets_are_kept_under_their_names() -> None:
    few, many = Dataset.from_list(ROWS[:2]), Dataset.from_list(ROWS)
    for given in ({"few": few, "many": many}, DatasetDict({"few": few, "many": many})):
        made = trainer(eval_dataset=given)
        assert made.eval_dataset is given
        rows = made._inputs.eval_rows
        assert isinstance(rows, dict)
        assert [len(rows[name]) for name in ("few", "many")] == [2, 8]
    assert trainer().eval_dataset is None
    assert trainer(eval_dataset=few).eval_dataset is few


def test_streams_are_read_by_one_worker_and_not_dispatched() -> None:
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    args = GRPOConfig(accelerator_config={"dispatch_batches": True})
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        trainer(train_dataset=stream, args=args)
    args = GRPOConfig(max_steps=1, dataloader_num_workers=4)
    made = trainer(train_dataset=stream, args=args)
    assert made.args.dataloader_num_workers == 0
    assert made.args.accelerator_config.dispatch_batches is False
    args = GRPOConfig(dataloader_num_workers=4, per_device_train_batch_size=16)
    made = trainer(train_dataset=Dataset.from_list(ROWS), eval_dataset=stream, args=args)
    assert made.args.dataloader_num_workers == 4
    assert made.get_train_dataloader().num_workers == 4
    assert made.get_eval_dataloader().num_workers == 0
    assert [len(batch) for batch in made.get_eval_dataloader()] == [2, 2, 2, 2]  # type: ignore[arg-type]
    made = trainer(args=GRPOConfig(max_steps=1))
    assert next(iter(made.get_train_dataloader())) == [ROWS[0]]
    with pytest.raises(InputError, match="there is no eval_dataset"):
        made.get_eval_dataloader()


def config_of(**given: Any) -> Config:
    values = settings(GRPOConfig(**given), 100, tools=False) | {"model.path": "m"}
    return make_config({}, settings=values, optional=["environment", "data.path"])


def test_rows_are_trained_in_their_own_order_without_shuffling() -> None:
    assert config_of().data.shuffle
    assert not config_of(shuffle_dataset=False).data.shuffle


def attempt(problem: str, reward: float, tokens: int, status: Any = "completed") -> Trajectory:
    trajectory = Trajectory(problem, status=status, outcome=Outcome(reward))
    trajectory.set_outcome(parts={"few": reward}, metrics={"custom_accuracy": 0.75})
    trajectory.add_turn([1], [2] * tokens, [-0.5] * tokens, [0] * tokens, "stop")
    return trajectory


def test_log_history_has_the_names_of_trl() -> None:
    metrics = StepMetrics(step=2, groups_without_signal=1, loss=0.5, clip_fraction=0.25)
    metrics.add_trajectories([attempt("p", 1.0, 3), attempt("p", 0.0, 5, "length")])
    metrics.heldout, metrics.heldout_sets = {"reward_mean": 0.5}, {"easy": {"reward_mean": 0.75}}
    config = config_of(steps_per_generation=2, per_device_train_batch_size=8)
    trained, evaluated = TrlNames(config).log_history([metrics.to_json()], rows=8)
    expected = {
        "step": 4, "epoch": 0.5, "loss": 0.5, "reward": 0.5, "reward_std": 0.5**0.5,
        "rewards/few/mean": 0.5,
        "rewards/few/std": 0.5**0.5, "custom_accuracy": 0.75, "frac_reward_zero_std": 0.5,
        "completions/mean_length": 4, "completions/min_length": 3, "completions/max_length": 5,
        "completions/mean_terminated_length": 3, "completions/clipped_ratio": 0.5,
        "clip_ratio/region_mean": 0.25,
    }  # fmt: skip
    assert {name: trained[name] for name in expected} == pytest.approx(expected)
    assert evaluated == {
        "eval_reward_mean": 0.5, "eval_reward": 0.5, "eval_easy_reward_mean": 0.75,
        "eval_easy_reward": 0.75, "step": 4, "epoch": 0.5,
    }  # fmt: skip
    assert "tools/call_frequency" not in trained


def test_a_step_without_a_signal_is_logged_with_a_loss_too() -> None:
    config = config_of(learning_rate=1e-3)
    steps = [StepMetrics(step=1), StepMetrics(step=2, loss=0.5, grad_norm=2.0, learning_rate=1e-4)]
    steps.append(StepMetrics(step=3))
    history = TrlNames(config).log_history([step.to_json() for step in steps], rows=8)
    names = "loss", "grad_norm", "learning_rate"
    logged = [tuple(record[name] for name in names) for record in history]
    assert logged == [(0.0, 0.0, 1e-3), (0.5, 2.0, 1e-4), (0.0, 0.0, 1e-4)]


def test_calls_of_tools_have_trls_frequencies() -> None:
    with_tools = make_config(
        config_of().model_dump(),
        settings={"rollout.max_turns": 3},
        optional=["environment", "data.path"],
    )
    events = {"tool_call": 2, "tool_error": 1, "tool_malformed": 3}
    record = {"step": 1, "reward_mean": 0.0, "trajectories": 3, "events": events}
    names = TrlNames(with_tools).names(record)
    assert names["tools/call_frequency"] == pytest.approx(2 / 3)
    assert names["tools/failure_frequency"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dapo", -(1 * 3 - 1 * 5) / 8),
        ("grpo", 0.0),
        ("dr_grpo", -(0.5 * 3 - 0.5 * 5) / (2 * 16)),
    ],
)
def test_an_evaluations_loss_is_that_of_its_own_answers(loss: str, expected: float) -> None:
    scale = "none" if loss == "dr_grpo" else "group"
    config = config_of(loss_type=loss, max_completion_length=16, scale_rewards=scale)
    answers = [attempt("p", 1.0, 3), attempt("p", 0.0, 5)]
    assert TrlNames(config).evaluation_loss(answers) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert TrlNames(config).evaluation_loss([]) == 0.0


def test_the_hub_gets_model_and_tokenizer(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the Hub, which no test reaches."""
    sent: list[tuple[object, str, dict[str, Any]]] = []

    def push(self: object, name: str, **where: Any) -> str:
        sent.append((self, name, where))
        return "commit"

    args = GRPOConfig(output_dir=str(tmp_path / "maze"), hub_token="secret", hub_private_repo=True)
    made = trainer(model_path, args=args)
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", push)
    monkeypatch.setattr(type(made.processing_class), "push_to_hub", push)
    assert made.push_to_hub(dataset_name="rows") == "commit"
    assert [one for one, _, _ in sent] == [made.processing_class, made.model]
    for _, name, where in sent:
        assert name == made.hub_model_id == "maze"
        assert (where["token"], where["private"]) == ("secret", True)
    assert "secret" not in str(made.settings)


def test_a_model_is_saved_before_it_is_trained(model_path: str, tmp_path: Path) -> None:
    made = trainer(model_path, args=GRPOConfig(output_dir=str(tmp_path / "run")))
    made.save_model()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert AutoTokenizer.from_pretrained(tmp_path / "run").vocab_size
    made.save_metrics("eval", {"eval_reward": 0.5})
    made.save_state()
    assert json.loads((tmp_path / "run" / "eval_results.json").read_text()) == {"eval_reward": 0.5}
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["max_steps"] == 24


def test_there_is_a_reference_only_with_a_penalty(model_path: str) -> None:
    assert trainer(model_path).ref_model is None
    made = trainer(model_path, args=GRPOConfig(beta=0.1))
    assert made.ref_model is made.ref_model is not made.model
    lora = trainer(model_path, args=GRPOConfig(beta=0.1), peft_config=LoraConfig())
    assert lora.ref_model is None


def test_a_reference_that_was_moved_is_that_of_the_checkpoint(
    model_path: str, tmp_path: Path
) -> None:
    moved = AutoModelForCausalLM.from_pretrained(perturbed(model_path, tmp_path / "moved"))
    scorer = torch.nn.Module()
    scorer.model = moved
    (tmp_path / "step-0001" / "state").mkdir(parents=True)
    checkpoint_state.save_state(tmp_path / "step-0001", 0, {}, {}, scorer)
    reference = Policy(model_path, model_path, None, "float32", reference=True)
    before = values_of(reference.model)
    reference.refresh(tmp_path / "step-0001")
    for name, value in before.items():
        assert not torch.equal(reference.model.get_parameter(name), value)
        assert torch.equal(reference.model.get_parameter(name), moved.get_parameter(name))
    state = tmp_path / "step-0001" / "state"
    checkpoint_state.save({"another": scorer.state_dict()}, checkpoint_id=state, no_dist=True)
    reference.refresh(tmp_path / "step-0001")  # of a run that moves none


def test_columns_that_reward_functions_log_are_read_from_the_run(tmp_path: Path) -> None:
    made = trainer(args=GRPOConfig(output_dir=str(tmp_path)))
    assert made._logs == {"extra": {}}
    lines = [json.dumps({"sample_index": n, "place": n}) for n in range(20)]
    (tmp_path / "extra.jsonl").write_text("\n".join(lines) + "\n")
    assert made._logs["extra"]["place"] == [*range(12, 20)]


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_a_sequence_weight_with_a_token_sum_warns_as_in_trl(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    config_of(importance_sampling_level="sequence", loss_type=loss)
    assert ("weights each sequence by its completion length" in caplog.text) == (loss != "grpo")
