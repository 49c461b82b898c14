"""Judges against real servers: vLLM behind our own server, and the example's run."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.judge.rule import Rule, verdict
from tests.conftest import ROOT, own_environment
from tests.rollouts.test_judges import ROW, answered, compared, episode, judged
from tests.test_cli import metrics_of
from turnwise.config import Config, RewardConfig, RolloutConfig
from turnwise.core.run_files import JUDGEMENTS, RunFiles
from turnwise.errors import TrajectoryError
from turnwise.rollouts.rewards import RewardManager
from turnwise.serving.openai.server import OpenAIServer
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, read_jsonl


def rewards_of(url: str, files: RunFiles | None = None, **keys: Any) -> RewardManager:
    part = RewardConfig.model_validate(
        {"judge": {"url": url, "model": "any", "rubric": "The right number.", **keys}}
    )
    return RewardManager([part], rollout=RolloutConfig(), files=files)


def test_the_rule_reads_what_a_judge_reads() -> None:
    said = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "The answer is 7."}]
    document = {"row": {"a": 5, "b": 1, "c": 2}, "conversation": said}
    scores = []
    for c in (3, 2):
        document["row"] = {"a": 5, "b": 1, "c": c}
        scores.append(verdict(f"{json.dumps(document)}\n\nJudge it.")["score"])
    assert scores == [1.0, 0.25]


@pytest.fixture(scope="module")
async def served(
    engine: WorkerHandle, make_config: Callable[..., Config]
) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(make_config(serving={"port": 0}), engine)
    await server.start()
    yield server
    await server.stop()


@pytest.mark.slow
async def test_an_engines_answer_is_read_and_its_tokens_are_counted(
    served: OpenAIServer, template: ChatTemplate
) -> None:
    said = json.dumps({"why": "Nearly.", "score": 0.75})
    request = {
        "response_format": None,  # the forced tokens are no choice of the grammar's
        "max_tokens": 100,
        "vllm_xargs": {"script": template.encode(f"{said}<|im_end|>")},
    }
    trajectory, counts = await judged(rewards_of(served.base_url, request=request))
    assert trajectory.reward == 0.75
    assert trajectory.judgements[0]["why"] == "Nearly."
    assert counts["requests"] == 1
    assert counts["prompt_tokens"] > 100
    assert counts["completion_tokens"] == len(template.encode(f"{said}<|im_end|>"))


@pytest.mark.slow
async def test_a_published_model_judges_by_a_json_schema(
    ray_started: None, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """A model of 135 million parameters is no good judge, but its answers have the schema's form:
    those that do not end in time are counted, and the others are scores."""
    config = make_config(
        model={"path": "smollm2", "max_length": 2048},
        engine={"logits_processors": [], "kv_cache_gib": 0.25},
        serving={"port": 0},
    )
    judge_engine = await WorkerHandle.start(config, name="judge")
    server = OpenAIServer(config, judge_engine)
    try:
        url = await server.start()
        request = {"temperature": 0.7, "max_tokens": 300}
        keys: dict[str, Any] = {"request": request, "timeout": 300, "retries": 3}
        files = RunFiles(tmp_path)
        rewards, counts = rewards_of(url, files, scale=[1, 10], **keys), Counter[str]()
        trajectories = [answered(f"It is {number}.", number) for number in range(4)]
        asked = (rewards.reward(episode(), each, ROW, None, counts) for each in trajectories)
        failed = [one for one in await asyncio.gather(*asked, return_exceptions=True) if one]
        verdicts = [judgement for each in trajectories for judgement in each.judgements]
        assert verdicts
        assert all(0 <= judgement["score"] <= 1 for judgement in verdicts)
        assert all(isinstance(one, TrajectoryError) for one in failed)
        assert len(verdicts) + len(failed) == 4
        assert counts["completion_tokens"] > 0
        assert len((tmp_path / JUDGEMENTS).read_text().splitlines()) == len(verdicts)
        with suppress(TrajectoryError):
            rewards = rewards_of(url, files, compare=True, **keys)
            group, counts = await compared(rewards, "It is 42.", "It is 41.")
            assert all(each.judgements for each in group)
    finally:
        await server.stop()
        await judge_engine.shutdown()


@pytest.mark.slow
def test_the_example_learns_from_its_judge(tmp_path: Path) -> None:
    keys = {"output_dir": str(tmp_path), "steps": 2, "sampling": {"n": 4, "max_tokens": 64}}
    program = f"from examples.judge import train\ntrain.main(**{keys})"
    subprocess.run(  # with a Ray of its own
        [sys.executable, "-c", program], cwd=ROOT, env=own_environment(), check=True, timeout=600
    )
    run = tmp_path / "judge"
    rows = metrics_of(run)
    assert [row["step"] for row in rows][-2:] == [1, 2]
    assert rows[-1]["exact_percent"] == 100.0
    assert rows[-1]["judges"]["requests"] > 0
    assert rows[-1]["reward_parts"].keys() == {"rule"}
    for trajectory in read_jsonl(run / "trajectories" / "step-0002.jsonl"):
        assert trajectory.judgements[0]["score"] == trajectory.reward


async def test_the_rule_is_a_judge() -> None:
    import threading

    with Rule() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        rewards = rewards_of(server.url, row_fields=["a", "b", "c"])
        trajectory = answered("The answer is 6.")
        await rewards.reward(episode(), trajectory, {"a": 5, "b": 1, "c": 2}, None, Counter())
        assert trajectory.reward == 1.0
        server.shutdown()
