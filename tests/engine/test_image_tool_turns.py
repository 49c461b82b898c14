"""A real engine reads the images that tools return."""

from collections.abc import AsyncIterator

import pytest

from tests.rollouts.test_context_window import call
from tests.rollouts.test_image_tools import Magnifier
from tests.vision import vision_config
from turnwise.chat.template import load_template, load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core.run_files import RunFiles
from turnwise.rollouts import Problem, Runner
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import audit


@pytest.fixture(scope="module")
def forced(vision_path: str) -> Config:
    processors = ["tests.forced_tokens:ForcedTokens"]
    engine = {"kv_cache_gib": 0.0625, "logits_processors": processors}
    rollout = {"loop": "tool_calling", "tools_in_prompt": False, "max_turns": 3}
    return vision_config(vision_path, engine=engine, rollout=rollout)


@pytest.fixture(scope="module")
async def seeing(ray_started: None, forced: Config) -> AsyncIterator[WorkerHandle]:
    engine = await WorkerHandle.start(forced)
    yield engine
    await engine.shutdown()


@pytest.mark.slow
async def test_the_crops_of_a_tool_are_exact_in_a_real_engine(
    seeing: WorkerHandle, forced: Config
) -> None:
    tokenizer = load_tokenizer(forced.model)
    template = load_template(forced.model, forced.sampling, forced.engine, tokenizer)
    said = [call("zoom", width=28), call("zoom", width=56), "a cat"]
    script = [template.encode(text + "<|im_end|>") for text in said]
    sampling = SamplingConfig(n=2, max_tokens=128, logits_processor_args={"script": script})
    runner = Runner(forced, tokenizer, Magnifier, RunFiles(None))
    group = await runner.run_group(seeing, Problem("rows:1", {}), sampling, "t")
    assert not group.dropped, group.causes
    for trajectory in group.trajectories:
        report = audit(trajectory)
        assert (report.violations, report.percent, report.bridged) == (0, 100.0, 2)
        assert [[each.length for each in turn.images] for turn in trajectory.turns] == [
            [6],
            [2],
            [4],
        ]
