"""Runs with a template that lacks tools, with one by key, and with none, as a user starts them."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT, command_environment, python
from tests.test_cli import turnwise
from turnwise.config import Config, dump_config
from turnwise.config.data import template_text
from turnwise.trajectory import ChatTemplate, Trajectory, read_jsonl


class Prices:
    """Has a tool, and rewards that any model gets now and then."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = row["question"]
        self.tools: list[Callable[..., Any]] = [self.price]

    def price(self, item: str) -> int:
        """Look up a price.

        Args:
            item: The item.
        """
        return len(item)

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(trajectory.turns[-1].completion_token_ids) % 2 == 0)


class Texts(Prices):
    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.tools = []


PIPELINE = """
import json, sys
from turnwise.compat.chatlearn import Pipeline, VLLMModule

policy = VLLMModule("policy")
with Pipeline(sys.argv[1], policy, overrides=["name=pipeline"]) as pipeline:
    for prompts in (["2 + 2 ="], [{"input_ids": [5, 6, 7]}]):
        answers = policy.forward_step(policy.build_dataset(prompts))
        answers["rewards"] = [float(n % 2) for n, _ in enumerate(answers["all_tokens"])]
        prompt = answers["all_tokens"][0][: answers["prompt_token_length"][0]]
        trained = pipeline.train(answers)
        print(json.dumps([list(map(int, prompt)), trained["logprob_diff_max"]]))
"""


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Any]:
    """Runs a command with an environment and values of the section `model`."""

    def run(
        command: str, environment: str, *options: str, rollout: dict[str, Any], **model: Any
    ) -> Any:
        config = make_config(
            environment=f"{__name__}:{environment}",
            model=make_config().model.model_dump() | model,
            rollout={"prompts_per_step": 4, **rollout},
            output_dir=str(tmp_path / "runs"),
            engine={},
        )
        (tmp_path / "config.yaml").write_text(dump_config(config))
        return turnwise(command, tmp_path / "config.yaml", *options)

    return run


@pytest.mark.parametrize("command", ["train", "eval", "rollout"])
def test_a_template_that_lacks_tools_ends_a_command_at_once(
    run: Callable[..., Any], command: str
) -> None:
    done = run(command, "Prices", rollout={}, chat_template="chatml")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the chat template leaves out the tools" in done.stderr
    assert "rollout.tools_in_prompt to false" in done.stderr
    assert "starting" not in done.stdout


def test_a_template_that_is_not_jinja_is_one_sentence(run: Callable[..., Any]) -> None:
    done = run("train", "Texts", rollout={}, chat_template="{{ messages\n}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.chat_template: line 2 is not Jinja: " in done.stderr


@pytest.mark.slow  # two runs with engines
def test_a_run_with_a_template_by_key_exports_it(
    run: Callable[..., Any], tmp_path: Path, tokenizer: Any
) -> None:
    done = run("train", "Prices", "training.steps=1", rollout={}, chat_template="hermes")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "run"
    ours = ChatTemplate(tokenizer, chat_template=template_text("hermes"))
    for trajectory in read_jsonl(folder / "trajectories" / "step-0001.jsonl"):
        prompt = ours.decode_all(trajectory.prompt_token_ids(0))
        assert prompt.startswith("<|im_start|>system\nYou can call these tools")
    saved = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step-0001")
    assert saved.chat_template == template_text("hermes")
    again = turnwise("train", "--resume", folder, "training.steps=2")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.slow  # two runs with engines
def test_a_model_without_a_template_trains_on_texts(
    run: Callable[..., Any], tmp_path: Path, bare_path: str, bare: Any
) -> None:
    one = {"loop": "single_turn"}
    done = run("train", "Texts", "training.steps=1", rollout=one, tokenizer=bare_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "run"
    rows = [*read_jsonl(folder / "trajectories" / "step-0001.jsonl")]
    for trajectory in rows:
        said = trajectory.messages[0]["content"]
        assert trajectory.prompt_token_ids(0) == bare(said)["input_ids"]
    (metrics,) = (folder / "metrics.jsonl").read_text().splitlines()[1:]
    assert json.loads(metrics)["logprob_diff_max"] < 1e-4
    assert AutoTokenizer.from_pretrained(folder / "checkpoints" / "step-0001").chat_template is None
    done = run("rollout", "Texts", rollout=one, tokenizer=bare_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("train", "Prices", "name=tools", rollout={}, tokenizer=bare_path)
    assert done.returncode == 2
    assert "has no chat template, and without one a prompt is one plain text" in done.stderr


@pytest.mark.slow  # engines
def test_a_pipeline_without_a_template_answers_texts_and_ids(
    make_config: Callable[..., Config], tmp_path: Path, bare_path: str, bare: Any
) -> None:
    config = make_config(
        model=make_config().model.model_dump() | {"tokenizer": bare_path},
        output_dir=str(tmp_path / "runs"),
        engine={},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    done = subprocess.run(
        [*python(), "-c", PIPELINE, str(tmp_path / "config.yaml")],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    (text, first), (ids, second) = lines
    assert text == bare("2 + 2 =")["input_ids"]
    assert text[0] == bare.bos_token_id
    assert ids == [5, 6, 7]
    assert max(first, second) < 1e-4
