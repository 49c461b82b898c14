"""A recipe on the cookbook's `tool_use`: an agent with a local tool, trained by `rl.train`.

The cookbook's search_tool does the same with a tool that needs Chroma and Gemini.

    python -m tests.tinker.recipes --only tool_use
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated, Any

import chz
from tinker_cookbook import cli_utils, renderers, tokenizer_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.tool_use import ToolResult, build_agent_tool_env, simple_tool_result, tool

CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo"}


class Atlas:
    @tool
    async def look_up(self, country: Annotated[str, "A country."]) -> ToolResult:
        """Return the capital of a country."""
        return simple_tool_result(CAPITALS.get(country, "unknown"))


class Question(EnvGroupBuilder):
    def __init__(self, country: str, model: str, renderer: str, group_size: int) -> None:
        self.country, self.model, self.renderer = country, model, renderer
        self.group_size = group_size

    async def make_envs(self) -> Sequence[Env]:
        renderer = renderers.get_renderer(self.renderer, tokenizer_utils.get_tokenizer(self.model))
        atlas = Atlas()
        opening = renderer.create_conversation_prefix_with_tools(
            tools=[atlas.look_up.to_spec()], system_prompt="Look capitals up."
        )
        question = {"role": "user", "content": f"The capital of {self.country}?"}

        async def reward(history: list[Any]) -> tuple[float, dict[str, float]]:
            said = renderers.get_text_content(history[-1])
            return float(CAPITALS[self.country] in said) + len(re.findall(r"\w", said)) / 1e4, {}

        return [
            build_agent_tool_env(
                renderer=renderer,
                tools=[atlas.look_up],
                initial_messages=[*opening, question],
                reward_fn=reward,
                max_turns=2,
            )
            for _ in range(self.group_size)
        ]

    def logging_tags(self) -> list[str]:
        return ["atlas"]


class Questions(RLDataset):
    def __init__(self, builders: list[Question], batch_size: int) -> None:
        self.builders, self.batch_size = builders, batch_size

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.builders[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return len(self.builders) // self.batch_size


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    model_name: str
    renderer_name: str
    group_size: int = 2
    batch_size: int = 2

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        made = [
            Question(country, self.model_name, self.renderer_name, self.group_size)
            for country in CAPITALS
        ]
        return Questions(made, self.batch_size), None


@chz.chz
class CLIConfig:
    model_name: str
    renderer_name: str
    log_path: str
    max_tokens: int = 16
    lora_rank: int = 8
    max_steps: int = 2
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "delete"


def main(config: CLIConfig) -> None:
    cli_utils.check_log_dir(config.log_path, config.behavior_if_log_dir_exists)
    asyncio.run(
        train.main(
            train.Config(
                model_name=config.model_name,
                recipe_name="recipe_tool_use",
                renderer_name=config.renderer_name,
                log_path=config.log_path,
                dataset_builder=QuestionsBuilder(
                    model_name=config.model_name, renderer_name=config.renderer_name
                ),
                learning_rate=1e-4,
                max_tokens=config.max_tokens,
                lora_rank=config.lora_rank,
                max_steps=config.max_steps,
                eval_every=0,
            )
        )
    )


if __name__ == "__main__":
    main(chz.entrypoint(CLIConfig))
