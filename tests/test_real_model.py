"""SmolLM2-135M-Instruct as it was published: exact, resumed, exported, adapted, sharded, served."""

import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2.environment import SHOWN, Sums, calculate, solved
from examples.smollm2.run import CONFIG
from tests.conftest import ROOT
from tests.serving.openai.test_server import fetched
from tests.test_cli import metrics_of, turnwise
from tests.test_lora_runs import agreed, greedy_answers, vllm_answers
from tests.test_runs import timeless
from turnwise.config import Config, dump_config, load_config
from turnwise.core.gguf import resolve_model
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.tools.toolbox import make_toolbox
from turnwise.trajectory import Trajectory, audit, read_jsonl

pytestmark = pytest.mark.slow

SMALL = (
    *("rollout.prompts_per_step=2", "rollout.max_turns=2", "sampling.n=2"),
    *("sampling.max_tokens=24", "eval.sampling={n: 1, temperature: 0, max_tokens: 16}"),
    "data.eval_limit=4",
    *("eval.every=0", "training.steps=2", "training.threads=1", "training.learning_rate=0.0001"),
)
"""Keys of runs of seconds: a processor samples a few dozen tokens in one of them."""


class AnyReward(Sums):
    """Rewards that differ within each group, without which so short a run trains nothing."""

    def reward(self, trajectory: Trajectory) -> float:
        ids = [number for turn in trajectory.turns for number in turn.completion_token_ids]
        return sum(ids) % 97 / 97


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's configuration, for shorter runs."""
    subprocess.run(["make", "-s", ".venv/.real"], cwd=ROOT, check=True, timeout=900)
    folder = tmp_path_factory.mktemp("real")
    keys = {"output_dir": folder / "runs", "environment": f"{__name__}:AnyReward"}
    config = load_config(CONFIG, [*(f"{key}={value}" for key, value in keys.items()), *SMALL])
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


def train(file: Path, name: str, *options: str) -> Path:
    """Train, check that it was exact, and return the run's folder."""
    done = turnwise("train", file, f"name={name}", *options)
    assert done.returncode == 0, done.stderr
    run = file.parent / "runs" / name
    rows = metrics_of(run)
    assert rows[-1]["weight_version"] >= 1
    for row in rows:
        assert (row["logprob_diff_max"] or 0.0) < 1e-4  # None where no group had a signal
    for row in rows[1:]:
        assert row["exact_percent"] == 100.0
        assert row["canary_diff_max"] < 1e-4
        assert row["dropped"] == {}
    for path in (run / "trajectories").glob("step-*.jsonl"):
        assert all(audit(trajectory).violations == 0 for trajectory in read_jsonl(path))
    return run


@pytest.fixture(scope="module")
def whole(file: Path) -> Path:
    """A deterministic run of three steps."""
    often = ("training.checkpoint_every=1", "training.keep_last=3", "training.steps=3")
    return train(file, "whole", "deterministic=true", "eval.every=3", *often)


def test_it_answers_as_it_was_taught(file: Path) -> None:
    folder = resolve_model(load_config(file).model.path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    text = tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert "The capital of France is Paris" in text
    assert text.endswith("<|im_end|>")  # it stops by itself


def test_a_run_goes_on_bit_for_bit(whole: Path) -> None:
    resumed = whole.with_name("resumed")
    shutil.copytree(whole, resumed)
    for step in (2, 3):
        shutil.rmtree(resumed / "checkpoints" / f"step-000{step}")
    done = turnwise("train", "--resume", resumed)
    assert done.returncode == 0, done.stderr
    assert timeless(resumed) == timeless(whole)
    for path in ("trajectories/step-0003.jsonl", "checkpoints/step-0003/model.safetensors"):
        assert (resumed / path).read_bytes() == (whole / path).read_bytes()


def test_what_is_exported_gives_the_runs_answers_elsewhere(whole: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    assert turnwise("export", whole, "--output", exported).returncode == 0
    rows = greedy_answers(whole)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    agreed(model, rows)
    answers = [answer for _, answer in rows]
    assert vllm_answers(tmp_path, str(exported), "", rows) == answers


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_an_adapter_is_trained_and_exported(file: Path, tmp_path: Path, way: str) -> None:
    options = ("model.lora.rank=4", "training.learning_rate=0.01", "eval.every=2")
    run = train(file, f"lora-{way}", *options, f"weights.lora={way}")
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    for output, flags in ((merged, ["--merged"]), (adapter, [])):
        done = turnwise("export", run, *flags, "--output", output)
        assert done.returncode == 0, done.stderr
    rows = greedy_answers(run)
    path = resolve_model(load_config(run / "config.yaml").model.path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    agreed(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval(), rows)
    agreed(PeftModel.from_pretrained(base, adapter).eval(), rows)
    answers = [answer for _, answer in rows]
    assert vllm_answers(tmp_path, str(merged), "", rows) == answers
    assert vllm_answers(tmp_path, path, str(adapter), rows) == answers


def test_an_engine_of_three_shards_computes_the_same(file: Path) -> None:
    """Its 9 heads cannot be divided by 2."""
    train(file, "sharded", "engine.tensor_parallel_size=3", "engine.kv_cache_gib=0.25")


@pytest.fixture(scope="module")
async def server(ray_started: None, file: Path) -> AsyncIterator[tuple[Config, OpenAIServer]]:
    config = load_config(file, ["serving.port=0"])
    engine = await WorkerHandle.start(config)
    server = OpenAIServer(config, engine)
    await server.start()
    yield config, server
    await server.stop()
    await engine.shutdown()


def as_client(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as OpenAI's API has them."""
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if "tool_calls" in message:
            (call,) = message["tool_calls"]
            function = call["function"]
            function = function | {"arguments": json.dumps(function["arguments"])}
            message = message | {"tool_calls": [call | {"id": f"c{number}", "function": function}]}
        if message["role"] == "tool":
            message = message | {"tool_call_id": f"c{number - 1}"}
        made.append(message)
    return made


async def test_a_client_with_tools_is_served(server: tuple[Config, OpenAIServer]) -> None:
    config, serving = server
    tools: Any = make_toolbox([calculate], config.rollout).schemas
    called = 0
    root = serving.base_url.removesuffix("/v1")
    async with (
        AsyncOpenAI(base_url=serving.base_url, api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=root, timeout=60) as http,
    ):
        model = (await client.models.list()).data[0].id
        for number, expression in enumerate(("23 + 45", "81 - 17 + 4", "120 + 35")):
            session = f"sum-{number}"
            shown = [message for each in SHOWN for message in solved(each)]
            asked = as_client([*shown, solved(expression)[0]])
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model=model,
                    messages=asked,  # type: ignore[arg-type]
                    tools=tools,
                    temperature=0,
                    max_tokens=48,
                    extra_headers={"X-Session-Id": session},
                )
                message = answer.choices[0].message
                asked.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    called += 1
                    try:
                        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                        result = str(calculate(**arguments))
                    except Exception as error:
                        result = f"error: {error}"
                    asked.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    break
            trajectory = await fetched(http, session)
            assert len(trajectory.turns) >= 1
            assert audit(trajectory).violations == 0
    assert called
