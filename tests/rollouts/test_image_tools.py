"""Tools that return images: in this process, in the environment's own, and to who cannot see them.

The engine says what a function of its prompt's text says, so a tool's image is a marker there.
"""

import json
import sys
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import turnwise
from tests.rollouts.test_context_window import Rule, Say, call
from tests.vision import asked, encoded, picture, vision_config
from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core.run_files import RunFiles
from turnwise.engine.protocol import Chunk, Request
from turnwise.engine.vllm_images import ImageInputs
from turnwise.errors import TrajectoryError
from turnwise.rollouts import Group, Problem, RolloutContext, Runner
from turnwise.rollouts.context_window import COMPACTED, LEFT_OUT, REQUEST
from turnwise.trajectory import Trajectory, audit

MARKER = "<|image_pad|>"
WHOLE = (84, 56)


class Magnifier(turnwise.Environment):
    """A picture, and a tool that returns the left part of it, or what the row says."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.picture = picture(*WHOLE, seed=row.get("seed", 0))
        self.problem = [asked("Look closely.", self.picture)]
        self.tools = [self.zoom]

    def zoom(self, width: int) -> object:
        """Return the left part of the picture.

        Args:
            width: Its width in pixels.
        """
        if "returns" in self.row:
            return [{"type": "image", "image": self.row["returns"]}]
        return ["Here:", self.picture.crop((0, 0, width, WHOLE[1]))]

    def step(self, message: dict[str, Any]) -> Any:
        return [asked("And this?", self.picture)] if self.row.get("steps") else None

    def reward(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.images))


class Stopping(Rule):
    """Stops behind a call, where a loop asks for it."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().stream(request):
            called = self.template.decode(chunk.token_ids).endswith("</tool_call>")
            cut = -1 if called and request.sampling.stop else None
            ids, logprobs, versions = chunk.token_ids, chunk.logprobs, chunk.weight_versions
            yield Chunk(ids[:cut], logprobs[:cut], versions[:cut], chunk.finish_reason)


def turns(*script: str) -> Say:
    """Says the texts in their order, and a summary where one is asked for."""
    left = [*script]
    return lambda prompt: "I looked." if prompt.count(REQUEST) else left.pop(0)


@pytest.fixture(scope="module")
def play(vision_path: str) -> Callable[..., Any]:
    runners: dict[str, Runner] = {}

    async def run(
        say: Say, row: dict[str, Any] | None = None, **sections: Any
    ) -> tuple[Group, Rule]:
        key = repr(sorted(sections.items()))
        if key not in runners:
            rollout = {"loop": "tool_calling", "tools_in_prompt": False, "max_turns": 6}
            sections["rollout"] = rollout | sections.get("rollout", {})
            sections["model"] = {"path": vision_path, "max_length": 2048}
            config = vision_config(vision_path, **sections)
            runners[key] = Runner(config, load_tokenizer(config.model), Magnifier, RunFiles(None))
        runner = runners[key]
        rule = Stopping(runner.template, say)
        sampling = SamplingConfig(n=1, max_tokens=128)
        return await runner.run_group(rule, Problem("rows:1", row or {}), sampling, "t"), rule

    return run


@pytest.mark.parametrize("process", [False, True], ids=["here", "in a process"])
async def test_a_tools_image_is_exact_wherever_the_environment_is(
    play: Callable[..., Any], process: bool
) -> None:
    script = turns(call("zoom", width=28), call("zoom", width=56), "a cat")
    group, rule = await play(script, rollout={"environment_process": process})
    assert not group.dropped, group.causes
    (trajectory,) = group.trajectories
    report = audit(trajectory)
    assert (report.violations, report.percent, report.bridged) == (0, 100.0, 2)
    assert [[each.length for each in turn.images] for turn in trajectory.turns] == [[6], [2], [4]]
    assert [turn.fork_reason for turn in trajectory.turns] == [None] * 3
    assert rule.prompts[-1].count(MARKER) == 12
    shown = trajectory.messages[2]
    assert shown["role"] == "tool"
    assert [part["type"] for part in shown["content"]] == ["text", "image"]
    crop = picture(*WHOLE).crop((0, 0, 28, 56))
    image = shown["content"][1]["image"]
    assert (image.width, image.height, image.read()) == (28, 56, encoded(crop))
    assert trajectory.reward == 3.0
    assert Group.from_dict(group.to_dict()).trajectories == group.trajectories


async def test_images_of_step_come_from_a_process_too(play: Callable[..., Any]) -> None:
    group, _ = await play(
        turns(*["a cat"] * 6), {"steps": 1}, rollout={"environment_process": True}
    )
    (trajectory,) = group.trajectories
    assert [len(turn.images) for turn in trajectory.turns] == [1] * 6
    assert len(trajectory.images) == 1
    assert audit(trajectory).percent == 100.0


@pytest.mark.parametrize("process", [False, True], ids=["here", "in a process"])
async def test_the_model_reads_an_error_for_a_tools_broken_image(
    play: Callable[..., Any], process: bool
) -> None:
    row = {"returns": encoded(picture())[:200]}
    script = turns(call("zoom", width=28), "a cat")
    group, rule = await play(script, row, rollout={"environment_process": process})
    (trajectory,) = group.trajectories
    assert trajectory.events["tool_error"] == 1
    assert "an image of the result is a broken png file" in rule.prompts[-1]
    assert audit(trajectory).percent == 100.0


async def test_an_image_that_the_model_refuses_costs_its_trajectory(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise TrajectoryError("image_refused", "too thin")

    def say(prompt: str) -> str:
        monkeypatch.setattr("turnwise.chat.vision.ModelImages.processed", refuse)
        return call("zoom", width=28)

    group, _ = await play(say)
    assert dict(group.dropped) == {"image_refused": 1}


async def test_more_images_than_the_engine_takes_cost_the_trajectory(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(supports_multimodal_inputs=True, is_mm_prefix_lm=False)
    inputs = ImageInputs(SimpleNamespace(model_config=model), 3)  # type: ignore[arg-type]
    stream = Stopping.stream

    async def limited(rule: Stopping, request: Request) -> AsyncGenerator[Chunk, None]:
        if len(request.prompt.images) > 3:
            await inputs.prepare(request.prompt)
        async for chunk in stream(rule, request):
            yield chunk

    monkeypatch.setattr(Stopping, "stream", limited)
    group, rule = await play(turns(*[call("zoom", width=28)] * 6))
    assert dict(group.dropped) == {"too_many_images": 1}
    assert "has 4 images; engine.images_per_prompt is 3" in group.causes["too_many_images"]
    assert len(rule.prompts) == 3


class Textual(Magnifier):
    """The same, whose problem is text."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.problem = "Look closely."


async def test_a_model_of_text_reads_that_the_image_is_left_out(
    make_config: Callable[..., Config], tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(rollout={"loop": "tool_calling"})
    runner = Runner(config, tokenizer, Textual, RunFiles(None))
    rule = Rule(runner.template, turns(call("zoom", width=28), call("zoom", width=28), "a cat"))
    sampling = SamplingConfig(n=1, max_tokens=128)
    group = await runner.run_group(rule, Problem("rows:1", {}), sampling, "t")
    (trajectory,) = group.trajectories
    assert trajectory.messages[2]["content"] == "Here:\n[image left out]"
    assert trajectory.events["image_left_out"] == 2
    assert trajectory.images == {}
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 1
    assert "takes text alone" in said[0]


async def test_an_engine_without_images_is_shown_none(vision_path: str) -> None:
    rollout = {"loop": "tool_calling", "tools_in_prompt": False}
    config = vision_config(vision_path, engine={"images_per_prompt": 0}, rollout=rollout)
    runner = Runner(config, load_tokenizer(config.model), Textual, RunFiles(None))
    rule = Rule(runner.template, turns(call("zoom", width=28), "a cat"))
    sampling = SamplingConfig(n=1, max_tokens=128)
    group = await runner.run_group(rule, Problem("rows:1", {}), sampling, "t")
    (trajectory,) = group.trajectories
    assert trajectory.messages[2]["content"] == "Here:\n[image left out]"
    assert trajectory.events["image_left_out"] == 1


async def test_inside_a_turn_images_are_left_out(play: Callable[..., Any]) -> None:
    script = turns(call("zoom", width=28), "a cat")
    group, _ = await play(script, rollout={"loop": "interleaved"})
    assert not group.dropped, group.causes
    (trajectory,) = group.trajectories
    assert trajectory.events["image_left_out"] == 1
    assert "Here:[image, 28 x 56]" in trajectory.final_text
    assert audit(trajectory).percent == 100.0


async def test_dropped_results_take_their_images_with_them(play: Callable[..., Any]) -> None:
    script = turns(call("zoom", width=56), call("zoom", width=28), "a cat")
    group, rule = await play(script, rollout={"context": {"compact": "drop_results", "limit": 90}})
    assert not group.dropped, group.causes
    (trajectory,) = group.trajectories
    assert trajectory.turns[-1].fork_reason == COMPACTED
    assert LEFT_OUT in rule.prompts[-1]
    assert rule.prompts[-1].count(MARKER) == 6 + 2  # the problem's and the last result's
    assert audit(trajectory).percent == 100.0
    branches = [[each.length for each in branch.images] for branch in trajectory.branches()]
    assert branches[-1] == [6, 2]


async def test_a_summary_keeps_the_images_of_the_problem(play: Callable[..., Any]) -> None:
    script = turns(call("zoom", width=56), call("zoom", width=28), "a cat")
    group, rule = await play(script, rollout={"context": {"compact": "summarise", "limit": 90}})
    assert not group.dropped, group.causes
    (trajectory,) = group.trajectories
    assert trajectory.events[COMPACTED] >= 1
    assert "I looked." in rule.prompts[-1]
    last = rule.prompts[-1].partition("Summary of the conversation")[0]
    assert last.count(MARKER) == 6
    assert audit(trajectory).percent == 100.0


class Lying(Magnifier):
    """In its own process, as code of a model may change it: the row says what is sent."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)

        async def tool(player: object, name: str, arguments: str) -> object:
            return {"text": "", "outcome": "ok", "error": None, "parts": row["parts"]}

        sys.modules["__main__"]._Player.tool = tool  # type: ignore[attr-defined]


class Zooms:
    """Calls the tool once."""

    async def run(self, environment: Any, context: RolloutContext) -> None:
        context.trajectory.add_turn([1], [2], [-0.1], [0], "stop")
        await context.toolbox.call("zoom", json.dumps({"width": 28}))


SENT = {
    "data:image/png;base64,AAAA": {"environment_reply": 1},
    "data:image/png;base64,%%": {"environment_reply": 1},
    "data:nothing": {"environment_reply": 1},
    "/etc/hostname": {},  # a text, and no file of this process
}


@pytest.fixture(scope="module")
def liar(vision_path: str) -> Runner:
    """Its process is forked for each trajectory, and imports this module once."""
    rollout = {"loop": f"{__name__}:Zooms", "environment_process": True}
    config = vision_config(vision_path, rollout=rollout)
    return Runner(config, load_tokenizer(config.model), Lying, RunFiles(None))


@pytest.mark.parametrize(("image", "dropped"), SENT.items(), ids=SENT)
async def test_a_false_image_of_a_process_costs_at_most_its_trajectory(
    liar: Runner, image: str, dropped: dict[str, int]
) -> None:
    row = {"parts": [{"type": "image", "image": image}]}
    engine = Rule(liar.template, turns())
    group = await liar.run_group(engine, Problem("rows:1", row), SamplingConfig(n=1), "t")
    assert dict(group.dropped) == dropped, group.causes
