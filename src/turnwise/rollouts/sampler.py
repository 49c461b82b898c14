"""Sampling of trajectories for a batch of prompts, without a trainer or a run folder."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence

from pydantic import ValidationError

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import for_each
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.evaluation import groups_at_once
from turnwise.rollouts.group import Group, check_failures
from turnwise.rollouts.problems import Problem, Row
from turnwise.rollouts.runner import Runner
from turnwise.tools import ToolFunction
from turnwise.trajectory import Message, Trajectory
from turnwise.trajectory.chat_template import Tokenizer

_BATCHES = itertools.count(1)


def changed_sampling(sampling: SamplingConfig, keys: Mapping[str, object]) -> SamplingConfig:
    """Return sampling parameters with new values for some keys; raise InputError that names a wrong
    key or value."""
    if unknown := keys.keys() - SamplingConfig.model_fields.keys():
        raise InputError(f"sampling_params has no {', '.join(sorted(unknown))}")
    try:
        return SamplingConfig.model_validate({**sampling.model_dump(), **keys})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(f"sampling_params: {name}: {first['msg']}") from error


class TrajectorySampler:
    """Runs the configured agent loop on a batch of prompts, and yields finished trajectories.

    Args:
        llm: An engine, or the scheduler in front of several.
        prompts: Rows of the configured environment; or texts and lists of messages, which the model
            answers with `tools`, and whose reward is 0.
        sampling_params: A `SamplingConfig`, or only the keys that differ from `config.sampling`;
            `n` is the number of trajectories for each prompt.
        config: Model, loop, environment and limits.
        tools: Plain functions, for prompts that are texts or messages.
        tokenizer: The model's tokenizer; None loads the configured tokenizer.

    Raises:
        InputError: when a prompt has an unsupported type, or the environment, the loop or the
            tokenizer cannot be loaded.

    Example:
        config = load_config("config.yaml")
        engine = VllmEngine(config.model, config.engine)
        async for trajectory in TrajectorySampler(engine, rows, {"n": 4}, config=config):
            print(trajectory.problem_id, trajectory.reward, trajectory.final_text)
    """

    def __init__(
        self,
        llm: Generator,
        prompts: Sequence[Row | str | Sequence[Message]],
        sampling_params: SamplingConfig | Mapping[str, object] | None = None,
        *,
        config: Config,
        tools: Sequence[ToolFunction] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if tokenizer is None:
            tokenizer = load_tokenizer(config.model)
        self.groups: list[Group] = []
        """Trajectories and failures of each prompt, in the order of the prompts."""
        self._llm = llm
        self._config = config
        if not isinstance(sampling_params, SamplingConfig):
            sampling_params = changed_sampling(config.sampling, sampling_params or {})
        self._sampling = sampling_params
        self._tag = f"batch{next(_BATCHES)}"

        class PromptEnvironment:
            """The environment for prompts that are not rows, but texts or lists of messages."""

            def __init__(self, row: Row) -> None:
                self.problem: Sequence[Message] = row["problem"]
                self.tools = list(tools)

            def reward(self, trajectory: Trajectory) -> float:
                return 0.0

        rows = [dict(prompt) for prompt in prompts if isinstance(prompt, Mapping)]
        environment: EnvironmentType | None = None
        if len(rows) < len(prompts):
            rows = [{"problem": prompt} for prompt in prompts]
            environment = PromptEnvironment
        elif tools:
            raise InputError(
                "TrajectorySampler: prompts that are rows have the tools of their environment; "
                "leave out tools"
            )
        self._runner = Runner(config, tokenizer, environment)
        self._problems = [Problem(f"prompt:{n}", row) for n, row in enumerate(rows, start=1)]

    async def __aiter__(self) -> AsyncGenerator[Trajectory, None]:
        """Yield each trajectory as soon as it is finished; leaving the `async for` loop cancels the
        remaining trajectories.

        Raises:
            InputError: when a row, a tool or the reward cannot be used.
            StepError: at the end, when more than `rollout.max_failed_fraction` of the trajectories
                failed.
        """
        self.groups = groups = [Group.of(problem) for problem in self._problems]
        ready = asyncio.Queue[Trajectory | None]()

        async def play(place: int) -> None:
            await self._runner.run_group(
                *(self._llm, self._problems[place], self._sampling, self._tag),
                into=groups[place],
                on_trajectory=ready.put_nowait,
            )

        count = len(self._problems)
        at_once = min(count, groups_at_once(self._config, self._sampling.n))
        running = asyncio.ensure_future(for_each(range(count), play, at_once))
        running.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (trajectory := await ready.get()) is not None:
                yield trajectory
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
        check_failures(groups, self._config.rollout.max_failed_fraction, "sampling")
