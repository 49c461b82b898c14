"""First prompts: rendered once for whoever begins with them."""

from collections.abc import Callable
from typing import Any

import pytest

from examples.calculator.tool import TOOL_SCHEMA
from tests.simulated import SimulatedEngine
from turnwise.chat.prompts import PromptCache
from turnwise.config import Config, SamplingConfig
from turnwise.rollouts import Runner
from turnwise.rollouts.data import load_training
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory import chat_template as templates


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_rendered_once_and_told_from_others(template: ChatTemplate) -> None:
    prompts = PromptCache(template)
    for _ in range(3):
        assert prompts.render(ask("1"), [TOOL_SCHEMA]) == template.render(
            ask("1"), tools=[TOOL_SCHEMA]
        )
        assert prompts.render(ask("1"), None) == template.render(ask("1"))
        assert prompts.render(ask("2"), None) == template.render(ask("2"))
    assert prompts.rendered == 3


def test_what_was_not_used_for_longest_is_forgotten(template: ChatTemplate) -> None:
    length = len(template.render(ask("1")))
    prompts = PromptCache(template, cached_tokens=2 * length + 1)
    for text in "1213":  # 3 takes the place of 2
        prompts.render(ask(text), None)
    assert prompts.rendered == 3
    prompts.render(ask("1"), None)
    assert prompts.rendered == 3
    prompts.render(ask("2"), None)
    assert prompts.rendered == 4


def test_many_short_prompts_are_forgotten_too(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes memory besides its tokens."""
    monkeypatch.setattr(templates, "CACHED_ENTRIES", 10)
    prompts = PromptCache(template)
    for number in [*range(20), *range(10, 20), 9]:
        prompts.render(ask(str(number)), None)
    assert prompts.rendered == 21


def test_what_json_does_not_know_is_rendered_each_time(template: ChatTemplate) -> None:
    prompts, messages = PromptCache(template), [{**ask("1")[0], "extra": object()}]
    for _ in range(2):
        assert prompts.render(messages, None) == template.render(ask("1"))
    assert prompts.rendered == 2


async def test_a_group_renders_its_prompt_once(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    runner = Runner(make_config(), tokenizer)
    problems = load_training(make_config())[:3]
    for problem in problems:
        runner.check(problem)
    engine = SimulatedEngine()
    for problem in problems:
        group = await runner.run_group(engine, problem, SamplingConfig(n=8, max_tokens=4), "once")
        assert len(group.trajectories) == 8
    assert runner._prompts.rendered == 3
