"""Samples trajectories for a batch of prompts, without a run: no trainer, no run folder."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from turnwise.config import Config, SamplingConfig
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.rollout.group import Group, check_failures
from turnwise.rollout.problems import Problem, Row
from turnwise.rollout.runner import Runner
from turnwise.trajectory import Message, Trajectory

_BATCHES = itertools.count(1)


class RolloutSampler:
    """Runs the agent loop of a configuration on a batch, and yields what is finished.

    Args:
        llm: What samples: an engine, or the scheduler before many.
        prompts: Rows of the configuration's environment; or texts and lists of messages, which are
            answered with `tools` and earn no reward.
        sampling_params: A `SamplingConfig`, or keys of it that differ from the configuration's;
            `n` is the number of trajectories of each prompt.
        config: Model, loop, environment and limits.
        tools: Plain functions for prompts that are no rows.
        tokenizer: The model's; loaded from `model.path` where it is None.

    Raises:
        InputError: when a prompt is neither, or the environment, the loop or the tokenizer cannot
            be loaded.

    Example:
        config = load_config("config.yaml")
        engine = VllmEngine(config.model, config.engine)
        async for trajectory in RolloutSampler(engine, rows, {"n": 4}, config=config):
            print(trajectory.problem_id, trajectory.reward, trajectory.final_text)
    """

    def __init__(
        self,
        llm: Generator,
        prompts: Sequence[Row | str | Sequence[Message]],
        sampling_params: SamplingConfig | Mapping[str, Any] | None = None,
        *,
        config: Config,
        tools: Sequence[Callable[..., Any]] = (),
        tokenizer: Any = None,
    ) -> None:
        if tokenizer is None:
            from transformers import AutoTokenizer  # takes seconds to import

            tokenizer = AutoTokenizer.from_pretrained(
                config.model.path, trust_remote_code=config.model.trust_remote_code
            )
        self.groups: list[Group] = []
        """Each prompt's trajectories and failures, in the prompts' order."""
        self._llm = llm
        self._config = config
        self._sampling = _sampling(config.sampling, sampling_params)
        rows = all(isinstance(prompt, Mapping) for prompt in prompts)
        if rows and tools:
            raise InputError("RolloutSampler: the tools of rows are those of their environment")
        self._runner = Runner(config, tokenizer, None if rows else _asking(tools))
        number = next(_BATCHES)
        self._tag = f"batch{number}"
        self._problems = [
            Problem(
                f"prompt:{place}",
                dict(prompt) if rows and isinstance(prompt, Mapping) else {"problem": prompt},
            )
            for place, prompt in enumerate(prompts, start=1)
        ]

    async def __aiter__(self) -> AsyncGenerator[Trajectory, None]:
        """Yield each trajectory as soon as it is finished; leaving the loop ends the others.

        Raises:
            InputError: when a row, a tool or the reward cannot be used.
            StepError: at the end, when more than `rollout.max_failed_fraction` of them failed.
        """
        self.groups = [Group(problem.id) for problem in self._problems]
        tasks = [
            asyncio.create_task(
                self._runner.run_one(self._llm, problem, index, self._sampling, self._tag, group)
            )
            for problem, group in zip(self._problems, self.groups, strict=True)
            for index in range(self._sampling.n)
        ]
        by_problem = {group.problem_id: group for group in self.groups}
        try:
            for ready in asyncio.as_completed(tasks):
                if (trajectory := await ready) is not None:
                    by_problem[trajectory.problem_id].trajectories.append(trajectory)
                    yield trajectory
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        check_failures(self.groups, self._config.rollout.max_failed_fraction, "sampling")


def _sampling(
    configured: SamplingConfig, given: SamplingConfig | Mapping[str, Any] | None
) -> SamplingConfig:
    if isinstance(given, SamplingConfig):
        return given
    unknown = set(given or ()) - set(SamplingConfig.model_fields)
    if unknown:
        raise InputError(f"sampling_params has no {', '.join(sorted(unknown))}")
    return SamplingConfig.model_validate({**configured.model_dump(), **(given or {})})


def _asking(tools: Sequence[Callable[..., Any]]) -> Callable[[Row], Any]:
    """The environment type of prompts that are no rows."""

    class Asked:
        def __init__(self, row: Row) -> None:
            self.problem = row["problem"]
            self.tools = list(tools)

        def reward(self, trajectory: Trajectory) -> float:
            return 0.0

    return Asked
