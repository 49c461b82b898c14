"""The runtime of training, evaluation and plain rollouts: engines, runner and trainer.

`open_runtime` starts them concurrently and always stops them all on exit. It is independent of
training steps.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, SamplingConfig
from turnwise.core.aio import run_in_thread, task_group
from turnwise.core.ray import watching_ray
from turnwise.core.user_code import import_user_code
from turnwise.engine.adapters import EngineAdapters
from turnwise.engine.protocol import Generator
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner
from turnwise.rollouts.agents import import_chat_scheduler
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.processes import RolloutProcesses, open_front
from turnwise.rollouts.producer import RunGroup
from turnwise.rollouts.reward_model import start_reward_models
from turnwise.run.display import SILENT, Display, show_part
from turnwise.run.fleet import (
    FRONTS,
    begin_imports,
    count_of,
    make_manager,
    ray_running,
    starting_engines,
)
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.placement import gpu_share
from turnwise.training.algorithms import make_algorithm
from turnwise.training.samples import check_group_size
from turnwise.training.trainer_group import TrainerGroup
from turnwise.weights.transport import find_transport


@dataclass(slots=True)
class Runtime:
    """The parts of a run; started and stopped by `open_runtime`."""

    manager: AsyncLLMServerManager
    runner: Runner
    policy: TrainerGroup | None
    """The trainer; None if nothing is trained."""
    processes: RolloutProcesses | None = None
    """Processes that run groups; None if the driver runs them."""

    @property
    def generator(self) -> Generator:
        """The engines, in the form that agent loops sample from."""
        return self.manager.scheduler

    def group_runner(self, sampling: SamplingConfig) -> RunGroup:
        """Return a function that runs the group of a problem, under a unique tag."""
        if (processes := self.processes) is not None:
            return lambda problem, tag: processes.run_group(problem, sampling, tag)
        run_group, generator = self.runner.run_group, self.generator
        return lambda problem, tag: run_group(generator, problem, sampling, tag)


@asynccontextmanager
async def open_runtime(
    config: Config,
    first: Problem | Sequence[Problem] | None,
    *,
    folder: Path | None = None,
    progress: Display = SILENT,
    environment: EnvironmentType | None = None,
) -> AsyncIterator[Runtime]:
    """Start Ray, the engines and, for training, the trainer; stop them all on exit.

    Args:
        first: A problem of each environment, which is checked before anything is started; None if
            the problems are not known yet.
        folder: Run folder for training; None starts no trainer.
        environment: Makes an environment from a row; None uses the configuration's.
    """
    if training := folder is not None:
        _check_trainable(config)
    begin_imports(config)
    with progress.part("loading the tokenizer"):
        runner = await _load_runner(config, first, environment, training)
    async with AsyncExitStack() as stack:
        parser = asyncio.ensure_future(run_in_thread(lambda: runner.tool_parser))
        stack.callback(parser.cancel)
        gpus = await stack.enter_async_context(ray_running(config, progress))
        share = gpu_share(config, gpus, training=training)
        policy: TrainerGroup | None = None

        async def start_policy() -> TrainerGroup | None:
            nonlocal policy
            if folder is not None and policy is None:
                with progress.part("starting the trainer"):
                    policy = await TrainerGroup.start(config, folder, num_gpus=share)
            return policy

        async def start_rewards() -> None:
            count = sum(1 for part in config.rollout.rewards if part.model)
            name = f"starting {count_of(count, 'reward model')}"
            with progress.part(name) if count else nullcontext():
                runner.rewards.models = await start_reward_models(config)

        async def close_policy() -> None:
            if policy is not None:
                await policy.close()

        stack.push_async_callback(close_policy)
        hosts = None
        if config.training.colocated and (trainer := await start_policy()) is not None:
            hosts = trainer.actors  # engines run in its processes
        manager = make_manager(config, share, hosts)
        stack.push_async_callback(manager.shutdown)
        processes: RolloutProcesses | None = None
        if (count := config.rollout.processes) > 1:
            processes = RolloutProcesses(config, manager.scheduler, environment)
            stack.push_async_callback(processes.stop)
        async with task_group() as starting:
            starting.create_task(show_part(progress, starting_engines(config), manager.start))
            if processes is not None:
                name = f"starting {count} rollout processes"
                starting.create_task(show_part(progress, name, processes.start))
            starting.create_task(start_rewards())
            starting.create_task(start_policy())
            await asyncio.shield(parser)
        if processes is None and (fronts := config.loops & FRONTS.keys()):
            with progress.part(" and ".join(FRONTS[loop] for loop in sorted(fronts))):
                await stack.enter_async_context(open_front(config, runner, manager.scheduler))
        async with watching_ray(config.ray_address):
            yield Runtime(manager, runner, policy, processes)


def _check_trainable(config: Config) -> None:
    if config.model.adapter is not None:
        raise InputError(
            "model.adapter: training does not start from an adapter; merge it into a model first"
        )
    if config.serving.adapters and EngineAdapters.of(config).trained is None:
        raise InputError(
            "serving.adapters: training replaces the weights under the adapters, unless it trains "
            "an adapter itself (model.lora.rank) and weights.lora is adapter"
        )


async def _load_runner(
    config: Config,
    first: Problem | Sequence[Problem] | None,
    environment: EnvironmentType | None,
    training: bool,
) -> Runner:
    """Make the runner, and check what can be checked before anything is started."""

    def make() -> Runner:  # imports and calls user code
        runner = Runner(config, load_tokenizer(config), environment=environment)
        for problem in [first] if isinstance(first, Problem) else first or ():
            runner.check(problem)
        if training:
            check_group_size(config, make_algorithm(config.algorithm))
            find_transport(config.weights.transport)
        return runner

    what = "the environment, loop, rewards and tools"
    runner = await import_user_code(make, config=config, what=what)
    await import_chat_scheduler(config)
    return runner
