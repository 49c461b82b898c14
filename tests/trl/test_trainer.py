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
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, command_environment
from tests.pages import blocks
from tests.trl_maze import WORLDS, Maze, Quiet, few, ones
from turnwise.errors import InputError
from turnwise.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "answer": n} for n in range(8)]
QWEN = "Qwen/Qwen3-0.6B"
SCRIPT = Path(__file__).parent / "script.py"


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
        {"model": "some/classifier", "weight": 0.5},
        {"name": "environment", "weight": 1.0},
    ]
    assert made.settings["environment"] == "trl:tests.trl_maze:Maze"
    assert (made.settings["output_dir"], made.settings["name"]) == (str(tmp_path), "maze")
    assert made.settings["model.max_length"] == 4096
    assert made.state.max_steps == 24
    assert "rollout.loop" not in made.settings


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
    made = trainer(environment_factory=WORLDS, reward_funcs=None)
    assert made.settings["rollout.rewards"] == [{"name": "environment", "weight": 1.0}]


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
            {"peft_config": LoraConfig(target_modules=".*q_proj")},
            "peft_config.target_modules='.*' is not supported: it must be all-linear or a list",
        ),
        ({"quantization_config": {"a": 1}}, "quantization_config is not supported"),
        ({"rollout_func": print}, "GRPOTrainer: rollout_func is not supported"),
        ({"reward_processing_classes": [1]}, "reward_processing_classes is not supported"),
        ({"reward_funcs": None}, "reward_funcs is required unless the environment has a get_r"),
        ({"reward_funcs": [3]}, "reward_funcs is not supported: 3 is no function or path"),
        ({"train_dataset": None}, "train_dataset is required unless one environment has the data"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": [{"question": 1}]}, 'train_dataset has no column "prompt", but quest'),
        ({"train_dataset": [{"prompt": "a", "image": 1}]}, "a column 'image', and only text"),
        ({"eval_dataset": {"a": ROWS}}, "eval_dataset is not supported: give one dataset"),
        ({"args": {"max_steps": 1}}, r"args must be turnwise\.trl\.GRPOConfig, not dict"),
        ({"args": GRPOConfig(reward_weights=[1, 2])}, "reward_weights has 2 numbers for 1 reward"),
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


def test_calls_out_of_order_are_named() -> None:
    made = trainer()
    with pytest.raises(InputError, match=r"save_model needs a finished train\(\)"):
        made.save_model()
    with pytest.raises(InputError, match=r"evaluate needs eval_dataset"):
        made.evaluate()


def test_a_launcher_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="start the script with python, not with torchrun"):
        trainer()


def run(module: str, kind: str, model: str, folder: Path, *more: str) -> dict[str, Any]:
    """Run the script with `trl` or `turnwise.trl`; returns what it writes."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), module, kind, model, str(folder), *more],
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
def test_trl_gives_reward_functions_of_the_same_script_the_same_arguments(
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
    for name in functions:
        assert forms(ours, name) == forms(theirs, name)
    if kind == "answers":
        continued = run("turnwise.trl", kind, model, tmp_path / "turnwise.trl", "3")
        assert continued["global_step"] == 3
    if kind == "tools":
        assert ours["evaluation"]["eval_reward_mean"] >= 0
        assert any('"tool_calls"' in form for form in forms(ours, "thrift")["completions"])
        assert "environments" in forms(ours, "thrift")
