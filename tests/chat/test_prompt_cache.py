"""First prompts: rendered once for whoever begins with them."""

from collections.abc import Callable
from typing import Any

import pytest

from examples.calculator.tool import TOOL_SCHEMA
from tests.simulated import SimulatedEngine
from turnwise.config import Config, SamplingConfig
from turnwise.rollouts import Runner
from turnwise.rollouts.data import load_training
from turnwise.trajectory import ChatTemplate
from turnwise.trajectory import chat_template as templates
from turnwise.trajectory.chat_template import IdCache


@pytest.fixture
def fresh(template: ChatTemplate) -> ChatTemplate:
    """The template with caches of its own."""
    return template.with_variables()


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_rendered_once_and_told_from_others(fresh: ChatTemplate) -> None:
    for _ in range(3):
        assert fresh.render_first(ask("1"), [TOOL_SCHEMA]) == fresh.render(
            ask("1"), tools=[TOOL_SCHEMA]
        )
        assert fresh.render_first(ask("1"), None) == fresh.render(ask("1"))
        assert fresh.render_first(ask("2"), None) == fresh.render(ask("2"))
    assert fresh.first_prompts.made == 3


def test_what_was_not_used_for_longest_is_forgotten(fresh: ChatTemplate) -> None:
    length = len(fresh.render(ask("1")))
    fresh.first_prompts = IdCache(2 * length + 1)
    for text in "1213":  # 3 takes the place of 2
        fresh.render_first(ask(text), None)
    assert fresh.first_prompts.made == 3
    fresh.render_first(ask("1"), None)
    assert fresh.first_prompts.made == 3
    fresh.render_first(ask("2"), None)
    assert fresh.first_prompts.made == 4


def test_many_short_prompts_are_forgotten_too(
    fresh: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes memory besides its tokens."""
    monkeypatch.setattr(templates, "CACHED_ENTRIES", 10)
    for number in [*range(20), *range(10, 20), 9]:
        fresh.render_first(ask(str(number)), None)
    assert fresh.first_prompts.made == 21


def test_what_json_does_not_know_is_rendered_each_time(fresh: ChatTemplate) -> None:
    messages = [{**ask("1")[0], "extra": object()}]
    for _ in range(2):
        assert fresh.render_first(messages, None) == fresh.render(ask("1"))
    assert fresh.first_prompts.made == 2


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
    assert runner.template.first_prompts.made == 3
