"""The runtime of training, evaluation and plain rollouts: engines, runner and trainer.

`open_runtime` starts them concurrently and always stops them all on exit. `TrainingStep` is the
trainer's half of a step: the samples of its groups, their loss, and the engines' new weights. The
training loop and pipelines share `TrainingStep`; each of them decides where groups come from and
what to write.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turnwise.chat.template import load_tokenizer
from turnwise.chat.tool_parser import check_parser_name
from turnwise.config import AlgorithmConfig, Config, SamplingConfig
from turnwise.config.gpus import gpu_share
from turnwise.core.admission import Priority
from turnwise.core.aio import run_in_thread, task_group, together
from turnwise.core.json_types import JsonObject
from turnwise.core.ray import watching_ray
from turnwise.core.user_code import call_user_code, import_user_code
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Generator
from turnwise.errors import ExactnessError
from turnwise.rollouts import Group, Problem, Runner
from turnwise.rollouts.environment import EnvironmentType
from turnwise.rollouts.processes import RolloutProcesses
from turnwise.rollouts.producer import RunGroup
from turnwise.rollouts.reward_model import RemoteRewardModel
from turnwise.run.checks import check_trainable
from turnwise.run.display import SILENT, Display, show_part
from turnwise.run.fleet import (
    begin_imports,
    count_of,
    make_manager,
    ray_running,
    starting_engines,
)
from turnwise.run.scaling import scaling
from turnwise.run.teachers import Teachers, check_teachers
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.seats import engine_admission, limits_of
from turnwise.training import checkpoint
from turnwise.training.algorithms import Loss, make_algorithm
from turnwise.training.reports import OptimSettings
from turnwise.training.sample import Sample
from turnwise.training.samples import (
    SampleBatch,
    make_samples,
)
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport
from turnwise.weights.sync import WeightSync

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # bfloat16's spacing from 16 to 32 is 1/8
_T = TypeVar("_T")


@dataclass(slots=True)
class Runtime:
    """The parts of a run; started and stopped by `open_runtime`."""

    manager: AsyncLLMServerManager
    runner: Runner
    policy: TrainerGroup | None
    """The trainer; None if nothing is trained."""
    teachers: Teachers | None
    """Teachers of the policy; None if nothing is trained."""
    processes: RolloutProcesses | None = None
    """Processes that run groups; None if the driver runs them."""
    grouping: Callable[[SamplingConfig], RunGroup] | None = None
    """A user module's replacement for `group_runner`; None without such a module."""

    @property
    def generator(self) -> Generator:
        """The interface to the engines from which agent loops sample."""
        return self.manager.scheduler

    def training_runner(self, sampling: SamplingConfig) -> RunGroup:
        """Return a function like the result of `group_runner`, which also lets the teachers score
        each group."""
        run_group = self.group_runner(sampling)

        async def run(problem: Problem, tag: str) -> Group:
            group = await run_group(problem, tag)
            if self.teachers is not None:
                await self.teachers.score(group)
            return group

        return run

    def group_runner(
        self, sampling: SamplingConfig, priority: Priority = Priority.TRAINING
    ) -> RunGroup:
        """Return a function that runs the group of a problem, under a unique tag."""
        if self.grouping is not None:
            return self.grouping(sampling)
        if (processes := self.processes) is not None:
            return lambda problem, tag: processes.run_group(problem, sampling, tag, priority)
        run_group, generator = self.runner.run_group, self.generator
        return lambda problem, tag: run_group(generator, problem, sampling, tag, priority=priority)


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
        check_trainable(config)
    else:
        check_parser_name(config.rollout.tool_parser)
    begin_imports(config)
    with progress.part("loading the tokenizer"):
        runner = await _load_runner(config, first, environment, training)
    async with AsyncExitStack() as stack:
        parser = asyncio.ensure_future(run_in_thread(lambda: runner.tool_parser))
        stack.callback(parser.cancel)
        config, gpus = await stack.enter_async_context(ray_running(config, progress))
        share = gpu_share(config, gpus, training=training)
        teachers = Teachers(config, runner.tokenizer, share) if training else None
        if teachers is not None:
            stack.push_async_callback(teachers.stop)
        closing = await stack.enter_async_context(AsyncExitStack())

        async def start_trainer() -> TrainerGroup | None:
            if folder is None:
                return None
            return await start_policy(config, folder, share, closing, progress)

        policy = await start_trainer() if config.training.colocated else None
        manager = make_manager(config, share, None if policy is None else policy.actors)
        runner.admission = engine_admission(limits_of(config), manager.scheduler)
        stack.push_async_callback(manager.shutdown)
        processes: RolloutProcesses | None = None
        if (count := config.rollout.processes) > 1:
            processes = RolloutProcesses(
                config, manager.scheduler, environment, admissions=runner.admissions
            )
            stack.push_async_callback(processes.stop)
        stack.callback(runner.rewards.end_models)
        async with task_group() as starting:
            starting.create_task(show_part(progress, starting_engines(config), manager.start))
            if processes is not None:
                name = f"starting {count} rollout processes"
                starting.create_task(show_part(progress, name, processes.start))
            starting.create_task(_add_reward_models(config, runner, progress))
            if teachers is not None:
                starting.create_task(teachers.start(progress))
            late = starting.create_task(start_trainer()) if policy is None else None
            await asyncio.shield(parser)
        policy = policy if late is None else late.result()
        if processes is None and (fronts := runner.fronts):
            with progress.part(" and ".join(fronts)):
                await stack.enter_async_context(runner.opened(manager.scheduler))
        async with watching_ray(config.ray_address), scaling(config, manager):
            yield Runtime(manager, runner, policy, teachers, processes)


async def start_policy(
    config: Config, folder: Path, share: float, stack: AsyncExitStack, progress: Display
) -> TrainerGroup:
    """Start the trainer; the exit stack closes it."""
    with progress.part("starting the trainer"):
        policy = await TrainerGroup.start(config, folder, num_gpus=share)
    progress.note(f"trained in {policy.dtype}, with learning rate {config.learning_rate:g}")
    stack.push_async_callback(policy.close)
    return policy


async def _add_reward_models(config: Config, runner: Runner, progress: Display) -> None:
    runner.rewards.models = await start_reward_models(config, progress)


async def start_reward_models(config: Config, progress: Display) -> dict[str, RemoteRewardModel]:
    """Start the models of `rollout.rewards` concurrently, and return them by path; if one fails to
    start, end them all."""
    wanted = {part.model: part.gpus for part in config.rollout.rewards if part.model}
    started: dict[str, RemoteRewardModel] = {}

    async def start(path: str, gpus: float) -> None:
        model = RemoteRewardModel(path, config, gpus)
        await model.start()
        started[path] = model

    name = f"starting {count_of(len(wanted), 'reward model')}"
    try:
        with progress.part(name) if wanted else nullcontext():
            await together(start(*each) for each in wanted.items())
    except BaseException:
        for model in started.values():
            model.kill()
        raise
    return started


async def _load_runner(
    config: Config,
    first: Problem | Sequence[Problem] | None,
    environment: EnvironmentType | None,
    training: bool,
) -> Runner:
    """Make the runner, and check what can be checked before anything is started."""

    def make() -> Runner:  # imports and calls user code
        tokenizer = load_tokenizer(config.model)
        runner = Runner(config, tokenizer, environment=environment)
        runner.load()
        for problem in [first] if isinstance(first, Problem) else first or ():
            runner.check(problem)
        if training:
            check_teachers(config, tokenizer)
        return runner

    what = "the environment, loop, rewards and tools"
    return await import_user_code(make, seconds=config.engine.start_timeout, what=what)


class TrainingStep:
    """Trains the policy of a runtime, and sends the trainer's weights to the engines."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        assert runtime.policy is not None
        self.versions = config.recent_versions()
        self.algorithm = make_algorithm(config.algorithm)
        self.has_new_weights = True
        """Whether the trainer's weights may differ from the engines' weights; set it after a
        load."""
        self._config = config
        self._manager = runtime.manager
        self._policy = runtime.policy
        self._teachers = runtime.teachers
        self._sync = WeightSync(
            self._policy,
            config.weights.update_timeout,
            config.engine.start_timeout,
            self._policy.offload if config.training.offload else None,
            config.weights.canary_tolerance or _TOLERANCE[self._policy.dtype],
        )

    async def make_samples(
        self, groups: Sequence[Group], discarded: Iterable[tuple[str, Group]] = ()
    ) -> SampleBatch:
        """Return a step's samples, scored by their teachers. Discarded groups, each with its
        reason, are only counted."""
        if self._teachers is not None:
            await together(self._teachers.score(group) for group in groups)
        version, oldest = self._policy.version, self.versions[0]
        batch = await self.by_algorithm(
            make_samples, groups, self._config, version, self.algorithm, oldest
        )
        for reason, group in discarded:
            await run_in_thread(batch.drop, group.trajectories, reason)
        return batch

    async def by_algorithm(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function that uses the algorithm. The call is made as user code, because the
        algorithm may be the user's own class."""
        seconds, key = self._config.training.step_timeout, "training.step_timeout"
        name = f"the advantage {self._config.algorithm.advantage.name}"
        value: _T = await call_user_code(function, *arguments, name=name, seconds=seconds, key=key)
        return value

    async def learn(self, batch: SampleBatch) -> JsonObject:
        """Train on a step's samples, if there are any, and end the step; return the trainer's
        metrics.

        Raises:
            ExactnessError: when a token differs from the sampled token, unless `exactness` is
                `warn`; the message names the first such token, and nothing is trained.
            TrainerError, DeadlineError: when a rank fails; the message names the rank.
        """
        self.check_exact(batch.report)
        metrics: JsonObject = {}
        if batch.samples:
            had, version = self.has_new_weights, self._policy.version
            self.has_new_weights = True  # stays true if the trainer fails half-way
            with waiting("the trainer to train"):
                async with self._trainers_turn():
                    metrics = await self._policy.train(batch.samples)
            # A step may skip all its updates, or train only the value model.
            self.has_new_weights = had or self._policy.version != version
        self.versions.append(self._policy.version)
        return metrics

    def check_exact(self, report: ExactnessReport) -> None:
        """Raise the `ExactnessError` that `learn` documents."""
        if report.first_violation is not None and self._config.exactness == "stop":
            raise ExactnessError(
                f"{report.violations} violations of exactness; the first: "
                f"{report.first_violation}; set exactness=warn to train anyway"
            )

    async def forward_backward(
        self,
        samples: Sequence[Sample],
        algorithm: AlgorithmConfig | None = None,
        loss: Loss | None = None,
    ) -> JsonObject:
        """Accumulate the gradient of samples; see `TrainerGroup.forward_backward`."""
        with waiting("the trainer to compute a gradient"):
            async with self._trainers_turn():
                return await self._policy.forward_backward(samples, algorithm, loss)

    async def optim_step(self, settings: OptimSettings) -> JsonObject:
        """Take an optimizer step with the accumulated gradients, and end the training step; return
        its metrics."""
        had, version = self.has_new_weights, self._policy.version
        self.has_new_weights = True  # stays true if the trainer fails half-way
        with waiting("the trainer to take a step"):
            async with self._trainers_turn():
                metrics = await self._policy.optim_step(settings)
        self.has_new_weights = had or self._policy.version != version
        self.versions.append(self._policy.version)
        return metrics

    async def forward(self, name: str, samples: Sequence[Sample]) -> list[list[float]]:
        """Score the trained tokens of samples; see `TrainerGroup.forward`."""
        with waiting(f"the {name} model"):
            async with self._trainers_turn():
                scored = await self._policy.forward(name, samples)
                if self._config.training.offload:
                    await self._policy.offload()
                return scored

    async def score(
        self, name: str, token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score sequences with a model of the trainer, under the settings of `sampling`, as in
        `forward`."""
        made = (Sample.to_score(*each) for each in zip(token_ids, masks, strict=True))
        return await self.forward(name, list(made))

    async def save(self, folder: Path, loop: JsonObject) -> Path:
        """Write a checkpoint atomically, with the state of the loop; return its absolute path.

        Raises:
            InputError: when the folder holds anything but an earlier checkpoint.
        """
        place = await run_in_thread(checkpoint.checked_target, folder)
        with waiting(f"the trainer to save {place}"):
            begun = await run_in_thread(checkpoint.begin, place)
            await self._policy.save(begun)
            state = loop | {"versions": list(self.versions)}
            await run_in_thread(checkpoint.write_loop, place, state)
            await run_in_thread(checkpoint.commit, place)
        return place

    async def load(self, folder: Path) -> JsonObject:
        """Load a checkpoint, and return the loop's state in it; `update_weights` then sends its
        weights to the engines."""
        place = await run_in_thread(checkpoint.checked_source, folder)
        with waiting(f"the trainer to load {place}"):
            loop = await run_in_thread(checkpoint.read_loop, place)
            self.has_new_weights = True
            version = await self._policy.load(place)
        self.versions = self._config.recent_versions(version, loop.get("versions"))
        return loop

    @asynccontextmanager
    async def _trainers_turn(self) -> AsyncIterator[None]:
        """Put engines that share the trainer's processes to sleep while the trainer computes."""
        if not self._config.training.colocated:
            yield
            return
        await self._manager.sleep()
        try:
            yield
        except Exception:  # the caller may continue, and its requests would wait forever
            await self._manager.wake_up()
            raise
        await self._manager.wake_up()

    async def update_weights(self) -> JsonObject:
        """Transfer the trainer's weights to the engines and check that they arrived; nothing is
        sent if no optimizer step was taken since the last transfer. Return the metrics."""
        if self.has_new_weights:
            metrics = await self._send_weights()
            self.has_new_weights = False
        else:
            metrics = {
                "engines": len(self._manager.engines),
                "weight_version": self._policy.version,
                "weight_update_seconds": 0.0,
                "weight_update_bytes": 0,
            }
        if self._config.training.offload:  # training that takes no optimizer step needs memory, too
            metrics["offloaded_gib"] = await self._policy.offload() / 2**30
        return metrics

    async def _send_weights(self) -> JsonObject:
        started = time.perf_counter()
        with waiting("the engines to load new weights"):
            published = await self._sync.publish()
            updated = await self._manager.update_weights(self._sync)
        return {
            "engines": len(updated),
            "weight_version": published.version,
            "weight_update_seconds": time.perf_counter() - started,
            "weight_update_bytes": published.sent_bytes,
            "weights_changed": published.changed,
            "canary_diff_mean": max((one.mean for one in updated), default=0.0),
            "canary_diff_max": max((one.largest for one in updated), default=0.0),
        }
