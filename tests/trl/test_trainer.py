"""TRL's trainer, as a script uses it: its arguments, what it refuses, and a run."""

import json
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, command_environment, python
from tests.pages import blocks
from tests.trl_maze import WORLDS, Maze, Quiet, few, ones
from turnwise.errors import InputError
from turnwise.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "answer": n} for n in range(8)]
QWEN = "Qwen/Qwen3-0.6B"
SCRIPT = Path(__file__).parent / "script.py"
NOT_LOGGED = (
    *("num_tokens", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean"),
    *("clip_ratio/high_max", "clip_ratio/region_mean", "entropy", "frac_reward_zero_std"),
    *("step_time", "samples_per_second", "steps_per_second"),
)
"""Ends of the names of TRL's logs that ours lack, of an evaluation or at all."""


def trainer(model: object = "/no/such/model", **given: Any) -> GRPOTrainer:
    arguments = {"reward_funcs": ones, "train_dataset": ROWS, **given}
    return GRPOTrainer(model=model, **arguments)


def test_arguments_become_our_configuration(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path / "maze"), reward_weights=[1.0, 2.0, 0.5])
    made = trainer(
        args=args,
        reward_funcs=[few, partial(few), "some/classifier"],
        tools=[Maze.move],
        environment_factory=Maze,
        train_dataset=Dataset.from_list(ROWS),
    )
    assert made.settings["rollout.rewards"] == [
        {"trl": "tests.trl_maze:few", "name": "few", "weight": 1.0},
        {"trl": "functools:few#2", "name": "few#2", "weight": 2.0},
        {"model": "some/classifier", "name": "classifier", "weight": 0.5},
        {"name": "Maze", "weight": 1.0},
    ]
    assert made.reward_func_names == ["few", "few#2", "classifier", "Maze"]
    assert made.reward_weights.tolist() == [1.0, 2.0, 0.5, 1.0]
    assert len(made.reward_funcs) == len(made.reward_processing_classes) == 4
    assert [tool.__name__ for tool in made.tools] == ["move", "look", "move"]
    assert made.settings["environment"] == "trl:tests.trl_maze:Maze"
    assert (made.settings["output_dir"], made.settings["name"]) == (str(tmp_path), "maze")
    assert made.settings["model.max_length"] == 4096
    assert made.state.max_steps == 24
    assert made.settings["rollout.loop"] == "tool_calling"


def test_the_script_of_the_page_becomes_a_configuration(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the dataset's download and the run, which the script below does."""
    (page,) = (b for b in blocks("docs/how-to/trl.md") if "__main__" in b.text)
    made: list[GRPOTrainer] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Dataset.from_list(ROWS))
    monkeypatch.setattr(GRPOTrainer, "train", lambda trainer: made.append(trainer))
    monkeypatch.setattr(GRPOTrainer, "save_model", lambda *_: None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "brevity_script.py").write_text(page.text.replace(QWEN, model_path))
    runpy.run_path("brevity_script.py", run_name="__main__")
    (trainer,) = made
    assert trainer.settings["model.path"] == model_path
    assert trainer.settings["sampling.n"] == 8
    assert [part["name"] for part in trainer.settings["rollout.rewards"]] == ["brevity"]


def test_an_environment_without_a_reward_adds_no_part() -> None:
    made = trainer(environment_factory=Quiet)
    assert made.settings["rollout.rewards"] == [
        {"trl": "tests.trl_maze:ones", "name": "ones", "weight": 1.0}
    ]


def test_each_environment_class_has_one_reward_part() -> None:
    made = trainer(environment_factory={**WORLDS, "again": Maze}, reward_funcs=None)
    path = "turnwise.compat.trl.environment:Maze"
    assert made.settings["rollout.rewards"] == [{"trl": path, "name": "Maze", "weight": 1.0}]
    (reward,) = made.reward_funcs
    maze = Maze()
    maze.place = 3
    assert reward(environments=[maze, Quiet()]) == [3.0, None]
    assert made._environments.reward_functions[path] is reward


def test_an_environment_may_have_the_data() -> None:
    made = trainer(train_dataset=None, environment_factory=Maze, args=GRPOConfig(max_steps=3))
    assert made.settings["training.steps"] == 3
    with pytest.raises(InputError, match=r"GRPOConfig\.max_steps=-1 is not supported: the number"):
        trainer(train_dataset=None, environment_factory=Maze)


def test_a_stream_of_rows_is_read_as_far_as_it_is_needed() -> None:
    args = GRPOConfig(max_steps=2, per_device_train_batch_size=4, num_generations=2)
    assert trainer(train_dataset=iter(ROWS), args=args).settings["training.steps"] == 2
    with pytest.raises(InputError, match=r"GRPOConfig\.max_steps must be set"):
        trainer(train_dataset=iter(ROWS))


def test_plain_texts_get_the_loop_for_texts() -> None:
    made = trainer(train_dataset=[{"prompt": "The sky is"}] * 8)
    assert made.settings["rollout.loop"] == "turnwise.compat.trl.environment:TextLoop"


def test_a_model_in_memory_is_saved(model_path: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    args = GRPOConfig(output_dir=str(tmp_path / "run"))
    made = trainer(model, processing_class=tokenizer, args=args)
    saved = Path(str(made.settings["model.path"]))
    assert (saved / "config.json").is_file()
    assert AutoTokenizer.from_pretrained(made.settings["model.tokenizer"]).vocab_size
    assert made.settings["model.max_length"] == model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (LoraConfig(r=16, target_modules="all-linear"), (16, 8.0, "all-linear", False)),
        (
            LoraConfig(lora_alpha=32, lora_dropout=0.1, use_rslora=True, task_type="CAUSAL_LM"),
            (8, 32.0, ["q_proj", "v_proj"], True),  # PEFT's choice for this kind of model
        ),
        (LoraConfig(target_modules=["o_proj", "k_proj"]), (8, 8.0, ["k_proj", "o_proj"], False)),
    ],
)
def test_a_peft_config_is_the_section_lora(
    model_path: str, given: LoraConfig, expected: tuple[object, ...]
) -> None:
    lora = trainer(model_path, peft_config=given)._config.model.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.rslora) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callbacks": [object()]}, "GRPOTrainer: callbacks is not supported"),
        ({"optimizers": (object(), None)}, "GRPOTrainer: optimizers is not supported"),
        ({"peft_config": {"r": 8}}, "peft_config=.* is not supported: it must be a peft.LoraConf"),
        (
            {"peft_config": LoraConfig(use_dora=True)},
            "peft_config.use_dora='True' is not supported: PEFT's default is False",
        ),
        (
            {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)},
            "it must be a peft.LoraConfig: engines have no other adapters, and no prompt-learning",
        ),
        (
            {"peft_config": LoraConfig(target_modules=["q_proj", "lm_head"])},
            "engines have no adapter for the output head; remove lm_head",
        ),
        (
            {"peft_config": LoraConfig(target_modules=".*q_proj")},
            "peft_config.target_modules='.*' is not supported: it must be all-linear or a list",
        ),
        ({"quantization_config": {"a": 1}}, "quantization_config is not supported"),
        ({"rollout_func": print}, "GRPOTrainer: rollout_func is not supported"),
        (
            {"reward_processing_classes": [1, None]},
            r"number of reward_processing_classes \(2\) must match that of reward_funcs \(1\)",
        ),
        ({"reward_funcs": None}, "No reward source provided: pass reward_funcs, or an environm"),
        ({"reward_funcs": [3]}, "reward_funcs is not supported: 3 is no function, model of Trans"),
        ({"train_dataset": None}, "`train_dataset` is required unless an `environment_factory`"),
        (
            {"train_dataset": None, "environment_factory": WORLDS},
            "a dictionary of environments requires a `train_dataset` with a column `environment`",
        ),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": [{"question": 1}]}, 'train_dataset has no column "prompt", but quest'),
        ({"train_dataset": {"a": ROWS}}, "train_dataset is not supported: give one dataset"),
        ({"eval_dataset": {"a": ROWS, "b": []}}, r"eval_dataset\['b'\] has no rows"),
        ({"args": {"max_steps": 1}}, r"args must be turnwise\.trl\.GRPOConfig, not dict"),
        ({"args": GRPOConfig(reward_weights=[1, 2])}, r"number of reward_weights \(2\) must match"),
        ({"processing_class": object()}, "processing_class is not supported: it must be a token"),
        (
            {"train_dataset": [{"prompt": "a"}] * 8, "environment_factory": Quiet},
            "prompt must be a list of messages where there are tools",
        ),
        ({"model": object()}, "model is not supported: it must be a path"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trainer(**given)


def test_calls_that_need_something_else_are_named(tmp_path: Path) -> None:
    made = trainer(eval_dataset={"easy": ROWS})
    with pytest.raises(InputError, match=r"the model /no/such/model cannot be loaded"):
        made.save_model(str(tmp_path))
    with pytest.raises(InputError, match=r"GRPOTrainer: eval_dataset has no set 'hard'"):
        made.evaluate("hard")
    with pytest.raises(InputError, match="there is no eval_dataset"):
        trainer().evaluate()
    with pytest.raises(InputError, match=r"callbacks is not supported: the run is in processes of"):
        made.add_callback(object())


def test_mistakes_are_the_value_errors_that_trl_raises() -> None:
    with pytest.raises(ValueError, match="No reward source provided"):
        trainer(reward_funcs=None)


def test_a_launcher_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="start the script with python, not with torchrun"):
        trainer()


def run(module: str, kind: str, model: str, folder: Path, *more: str) -> dict[str, Any]:
    """Run the script with `trl` or `turnwise.trl`; returns what it writes."""
    ours = module == "turnwise.trl"  # with the imports of the session's fork server
    done = subprocess.run(
        [
            *(python() if ours else [sys.executable]),
            str(SCRIPT),
            module,
            kind,
            model,
            str(folder),
            *more,
        ],
        env={**command_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def test_a_script_of_trl_trains(model_path: str, tmp_path: Path) -> None:
    seen = run("turnwise.trl", "answers", model_path, tmp_path)
    assert seen["global_step"] == 2
    assert len(seen["log_history"]) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert seen["changed"] == seen["parameters"] > 10
    assert seen["reward_func_names"] == ["length", "slow_length"]
    assert seen["last"]["train_loss"] is not None
    for record in seen["log_history"]:
        assert record["characters"] > 0
        assert record["rewards/length/std"] >= 0
        assert record["completions/max_length"] <= 8
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, metrics):
        assert record["exact_percent"] == 100
        assert set(record["reward_parts"]) == {"length", "slow_length"}
        assert record["env"]["characters"] > 0
    assert (tmp_path / "run" / "extra.jsonl").is_file()


def forms(seen: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the forms of a reward function's arguments, those of all its calls together."""
    calls = [call["form"] for call in seen["calls"] if call["name"] == name]
    together: dict[str, set[str]] = {}
    for call in calls:
        for argument, form in call.items():
            entries = form if isinstance(form, list) else [form]
            if argument == "completions" and "str" not in entries:  # the messages of all
                entries = [message for completion in entries for message in completion]
            of_argument = together.setdefault(argument, set())
            of_argument |= {json.dumps(entry, sort_keys=True) for entry in entries}
    return together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "functions"),
    [("answers", ["length", "slow_length"]), ("texts", ["near_20"]), ("tools", ["thrift"])],
)
def test_reward_functions_get_the_same_arguments_as_in_trl(
    model_path: str, tmp_path: Path, kind: str, functions: list[str]
) -> None:
    model = str(ROOT / "examples/calculator/warm_started") if kind == "tools" else model_path
    seen = {}
    for module in ("trl", "turnwise.trl"):
        folder = tmp_path / module
        folder.mkdir()
        seen[module] = run(module, kind, model, folder)
    theirs, ours = seen["trl"], seen["turnwise.trl"]
    assert ours["global_step"] == theirs["global_step"] == 2
    for name in ("parameters", "reward_func_names"):
        assert ours[name] == theirs[name]
    known, expected = (
        {name for record in (*each["log_history"], each["evaluation"]) for name in record}
        for each in (ours, theirs)
    )
    assert {name for name in expected - known if not name.endswith(NOT_LOGGED)} == set()
    assert ours["last"].keys() >= {"train_loss", "train_runtime", "epoch", "step"}
    for name in functions:
        assert forms(ours, name) == forms(theirs, name)
    if kind == "answers":
        continued = run("turnwise.trl", kind, model, tmp_path / "turnwise.trl", "3")
        assert continued["global_step"] == 3
    if kind == "tools":
        assert ours["evaluation"]["eval_one_reward_mean"] >= 0
        assert any('"tool_calls"' in form for form in forms(ours, "thrift")["completions"])
        assert "environments" in forms(ours, "thrift")
