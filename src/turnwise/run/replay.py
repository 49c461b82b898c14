"""A step made again from a run's files: the trainer's samples, and what it computed from them.

The run's own code does everything a second time. Agent loops play with a `RecordedEngine`, so that
prompts, tools, environments and rewards are made again. The trainer is one rank in this process,
which begins with the last checkpoint before the step, or with the initial model, and trains the
steps in between from their files. Every value is compared with the value that the run wrote.
"""

import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from turnwise.chat.messages import said
from turnwise.chat.template import load_tokenizer
from turnwise.config import Config, load_config
from turnwise.config.base import NEEDED_KEYS
from turnwise.core import logs
from turnwise.core.actor import ActorHandle
from turnwise.core.aio import for_each, run_in_thread
from turnwise.core.files import number_of
from turnwise.core.json_types import JsonObject
from turnwise.core.optional import Foreign
from turnwise.core.user_code import call_user_code, import_user_code
from turnwise.errors import InputError
from turnwise.observe.conversations import read_trajectories, trajectory_file
from turnwise.observe.metrics import StepMetrics
from turnwise.rollouts import Batch, Group, Problem, Runner
from turnwise.rollouts.recorded import RecordedEngine
from turnwise.run.bundle import finder, opened_bundle, read_lines, trajectories_of
from turnwise.run.token_values import TokenColumns, columns_of
from turnwise.training import checkpoint
from turnwise.training.algorithms import make_algorithm
from turnwise.training.reports import RECORDED
from turnwise.training.samples import SampleBatch, make_samples
from turnwise.training.trainer_group import TrainerGroup
from turnwise.trajectory import ExactnessReport, Trajectory

if TYPE_CHECKING:
    from turnwise.training.rank import TrainerRank

Values = npt.NDArray[np.generic]
_AT_ONCE = 64  # groups that are played at once
_EXAMPLES = 5
_TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
_DRIFT = 10.0
"""Factor of the tolerance where steps were trained again: rounding differs, unless a run is
deterministic, and optimizers enlarge it."""
_PLACE = ("trajectory", "turn", "at")
_UNLIKE = ("seconds", "per_s", "gib", "bytes", "engine", "canary", "cached", "workers", "queue")
"""Parts of the names of metrics that a replay does not have, because they measure the machine."""


@dataclass(slots=True)
class Compared:
    """A quantity of a step, as the run wrote it and as it is now."""

    tolerance: float = 0.0
    count: int = 0
    different: int = 0
    max_difference: float = 0.0
    """Largest absolute difference of numbers."""
    examples: list[str] = field(default_factory=list)
    """The first differences."""

    def add(self, where: str, before: object, now: object) -> None:
        """Compare two values; numbers are equal within the tolerance, relative to values above
        1."""
        self.count += 1
        equal = before == now
        if isinstance(before, int | float) and isinstance(now, int | float):
            off = abs(before - now)
            equal = equal or off <= self.tolerance * max(1.0, abs(before))
            equal = equal or (math.isnan(before) and math.isnan(now))
            self.max_difference = max(self.max_difference, off)
        if not equal:
            self.note(where, f"{_short(before)} is {_short(now)} now")

    def add_array(self, where: Callable[[int], str], before_N: Values, now_N: Values) -> None:
        """Compare `N` numbers, each as `add` does; `where` names the place of a number."""
        self.count += len(before_N)
        old_N, new_N = before_N.astype(np.float64), now_N.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite values
            off_N = np.abs(old_N - new_N)
        equal_N = off_N <= self.tolerance * np.maximum(1.0, np.abs(old_N))
        equal_N |= (old_N == new_N) | (np.isnan(old_N) & np.isnan(new_N))
        finite_N = off_N[np.isfinite(off_N)]
        self.max_difference = max(self.max_difference, float(finite_N.max(initial=0.0)))
        different = np.flatnonzero(~equal_N).tolist()
        for index in different[:_EXAMPLES]:
            self.note(where(index), f"{old_N[index]:.6g} is {new_N[index]:.6g} now")
        self.different += max(0, len(different) - _EXAMPLES)

    def note(self, where: str, how: str) -> None:
        """Count a difference."""
        self.different += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{where}: {how}")


@dataclass(slots=True)
class StepReplay:
    """A step that was made again."""

    step: int
    trajectories: int
    groups: int
    quantities: dict[str, Compared] = field(default_factory=dict)
    """By name: conversations, rewards, masks, advantages, log-probs, metrics ..."""
    notes: list[str] = field(default_factory=list)
    """Reasons why parts could not be made again."""
    metrics: JsonObject = field(default_factory=dict)
    """The step's metrics now."""

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal."""
        return not any(each.different for each in self.quantities.values())

    def to_json(self) -> JsonObject:
        return {
            "step": self.step,
            "trajectories": self.trajectories,
            "groups": self.groups,
            "equal": self.equal,
            "quantities": {
                name: {key: getattr(each, key) for key in Compared.__slots__}
                for name, each in self.quantities.items()
            },
            "notes": self.notes,
            "metrics": self.metrics,
        }


class _LocalRank(ActorHandle):
    """The trainer's only rank, in this process."""

    def __init__(self, rank: "TrainerRank") -> None:
        self.name, self._rank = "the trainer", rank

    async def call(self, method: str, *arguments: object, what: str, seconds: float) -> Foreign:
        name, *given = arguments
        return await run_in_thread(getattr(self._rank, str(name)), *given)


class Replay:
    """Steps of one run, made again one after another; `open_replay` opens it."""

    def __init__(
        self,
        config: Config,
        run: Path,
        runner: Runner | None,
        find: Callable[[str], Problem],
        policy: TrainerGroup | None,
    ) -> None:
        self._config = config
        self._run = run
        self._runner = runner
        self._find = find
        self._policy = policy
        self._algorithm = make_algorithm(config.algorithm)
        self._versions = config.recent_versions()
        self._step = 0
        """Step after which the trainer has its weights."""
        self._rounded = False
        """Whether the weights were trained here, so that they differ from the run's by rounding."""
        self._lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}

    async def begin(self, step: int) -> str:
        """Bring the trainer to the run's weights before a step, by the newest checkpoint and the
        files of the steps after it; return why this is impossible, or ""."""
        if self._policy is None:
            return "nothing is trained"
        newest = checkpoint.newest_before(checkpoint.checkpoints_of(self._run), step)
        begins = max(self._step, 0 if newest is None else number_of(newest))
        between = range(begins + 1, step)
        lacking = [each for each in between if not trajectories_of(self._run, each).is_file()]
        if lacking:
            self._policy = None
            return (
                f"no weights of step {step - 1}: there is no checkpoint after step {begins}, and "
                f"no trajectories of step {lacking[0]}"
            )
        if newest is not None and (number_of(newest) > self._step or self._rounded):
            version = await self._policy.load(newest)
            known = checkpoint.read_loop(newest).get("versions")
            self._versions = self._config.recent_versions(version, known)
            self._step, self._rounded = begins, False
        for each in between:
            await self.play(each, judge=False)
        return ""

    async def play(self, step: int, *, judge: bool = True) -> StepReplay:
        """Make a step again; without `judge`, with the rewards of its files."""
        file = trajectory_file(self._run, step)
        stored = await run_in_thread(lambda: list(read_trajectories(file)))
        if all(each.reward is None for each in stored):  # make_samples compares rewards
            raise InputError(f"{file} has no rewards: supervised steps cannot be made again")
        groups = groups_of(stored)
        made = StepReplay(step, len(stored), len(groups))
        if judge and self._runner is not None:
            await self._judge(groups, made)
        line = self._lines.get(step, {})
        version, oldest = self._version(step, stored), self._versions[0]
        given = groups, self._config, version, self._algorithm, oldest
        seconds = self._config.training.step_timeout
        batch = await call_user_code(make_samples, *given, name="the advantage", seconds=seconds)
        metrics = StepMetrics(step=step)
        metrics.add_rollouts(Batch(groups), Counter())
        metrics.add_samples(batch)
        if self._policy is not None and batch.samples:
            metrics.add(await self._policy.train(batch.samples))
        if self._policy is not None:
            self._versions.append(self._policy.version)
        made.metrics = _numbers(metrics.to_json())
        if self._policy is None:  # they are 0 until the trainer reports them
            made.metrics.pop("trained_tokens", None)
            made.metrics.pop("staleness_max", None)
        if judge:
            columns = self._columns(batch, stored, version)
            self._compare_columns(made, columns)
            self._compare_metrics(made, line)
        self._step, self._rounded = step, True
        return made

    @property
    def _tolerance(self) -> float:
        dtype = self._config.model.dtype or "float32"
        return _TOLERANCE[dtype] * (_DRIFT if self._rounded else 1.0)

    def _version(self, step: int, stored: Sequence[Trajectory]) -> int:
        """Return the number of optimizer steps before a step."""
        if self._policy is not None:
            return self._policy.version
        before = self._lines.get(step - 1, {}).get("weight_version")
        known = (v for each in stored for turn in each.turns for v in turn.weight_versions)
        return int(before) if before is not None else max(known, default=0)

    async def _judge(self, groups: Sequence[Group], made: StepReplay) -> None:
        """Play the groups again, and give their trajectories the new rewards."""
        runner = self._runner
        assert runner is not None
        conversations, rewards = Compared(), Compared(1e-9)
        made.quantities |= {"conversations": conversations, "rewards": rewards}
        problems: dict[int, Problem] = {}
        for number, group in enumerate(groups):
            try:
                problems[number] = await run_in_thread(self._find, group.problem_id)
            except InputError as error:
                made.notes.append(f"the stored rewards of {group.problem_id} are used: {error}")
        stored = {
            f"step{made.step}.{number}-{each.problem_id}-{each.sample_index}": each
            for number in problems
            for each in groups[number].trajectories
        }
        engine = RecordedEngine(stored, runner.template.decode)

        async def play(number: int) -> None:
            group, tag = groups[number], f"step{made.step}.{number}"
            n = 1 + max(each.sample_index for each in group.trajectories)
            changes = {"n": n, "use_beam_search": False}
            sampling = self._config.sampling.model_copy(update=changes)
            again = await runner.run_group(engine, problems[number], sampling, tag)
            for old in group.trajectories:
                where = f"step {made.step}, {old.problem_id} #{old.sample_index}"
                how = engine.differences.get(f"{tag}-{old.problem_id}-{old.sample_index}", "")
                new = _counterpart(old, again.trajectories)
                if new is None or how:
                    conversations.count += 1
                    why = how or "; ".join(again.causes.values()) or "it sampled other turns"
                    conversations.note(where, f"cannot be repeated: {why}" if not new else why)
                else:
                    _add_messages(conversations, where, old, new)
                if new is not None:
                    rewards.add(where, old.reward, new.reward)
                    for kind in ("parts", "turns", "players"):
                        _add_parts(rewards, f"{where}, {kind}", old, new, kind)
                    old.outcome = new.outcome

        async with runner.opened(engine):
            await for_each(problems, play, _AT_ONCE)

    def _columns(
        self, batch: SampleBatch, stored: Sequence[Trajectory], version: int
    ) -> TokenColumns:
        """Return the values of the step's trained tokens, as a run writes them."""
        trained = [] if self._policy is None else self._policy.trained_tokens
        if self._policy is None:  # only masks and advantages are known
            row = RECORDED.index("advantage")
            for sample in batch.samples:
                if id(sample) in batch.origins and not sample.counted_only:
                    values_KN = np.zeros((len(RECORDED), sample.trained), np.float32)
                    values_KN[row] = sample.advantages_T[sample.response_mask_T]
                    trained = [*trained, (sample, values_KN)]
        if not batch.samples or not trained:
            return {}
        return columns_of(trained, batch.origins, stored, version)

    def _compare_columns(self, made: StepReplay, columns: TokenColumns) -> None:
        path = self._run / "training" / f"step-{made.step:04d}.safetensors"
        if not path.is_file():  # as in a step that trained nothing
            why = f"no values of tokens are compared: the run has not written {path.name}"
            made.notes += [why] if columns else []
            return
        before = _ordered(load_file(path))
        now = _ordered(columns) if columns else {n: v[:0] for n, v in before.items()}
        masks = made.quantities["masks"] = Compared()
        places = [np.stack([each[name] for name in _PLACE], 1).tolist() for each in (before, now)]
        old, new = ({*map(tuple, each)} for each in places)
        masks.count = len(old | new)
        for place in sorted(old ^ new):
            how = "trained before" if place in old else "not trained before"
            masks.note(_at(made.step, place), how)
        if old != new:
            return
        computed = [name for name in RECORDED if name != "advantage" and self._policy is not None]
        for name in ("advantage", *computed):
            if name in before:
                compared = made.quantities[name] = Compared(self._tolerance)
                compared.add_array(
                    lambda index: _at(made.step, places[0][index]), before[name], now[name]
                )

    def _compare_metrics(self, made: StepReplay, line: JsonObject) -> None:
        compared = made.quantities["metrics"] = Compared(10 * self._tolerance)
        for name, value in _numbers(line).items():
            if name in made.metrics:
                compared.add(name, value, made.metrics[name])

    async def save(self, folder: Path, step: int) -> Path:
        """Write the trainer's weights as a checkpoint."""
        if self._policy is None:
            raise InputError("there is nothing to save: no weights were trained")
        place = await run_in_thread(checkpoint.checked_target, folder)
        await self._policy.save(await run_in_thread(checkpoint.begin, place))
        loop = {"step": step, "versions": [*self._versions], "problems": {}, "groups": 0}
        loop |= {"exactness": ExactnessReport().to_dict(), "replayed": str(self._run)}
        await run_in_thread(checkpoint.write_loop, place, loop)
        await run_in_thread(checkpoint.commit, place)
        return place


@dataclass(frozen=True, slots=True)
class Replayed:
    """Steps of a run that were made again."""

    steps: list[StepReplay]
    notes: list[str]
    """Reasons why parts could not be made again in any step."""
    checkpoint: Path | None
    """Folder of the weights after the last step, if they were asked for."""

    def lines(self) -> Iterator[str]:
        """Yield the lines that tell people what is equal and what is not."""
        yield from self.notes
        for made in self.steps:
            yield f"step {made.step}: {made.trajectories} trajectories of {made.groups} groups"
            for name, each in made.quantities.items():
                result = f"{each.different:,} differ" if each.different else "equal"
                off = f", at most {each.max_difference:.2g} apart" if each.max_difference else ""
                yield f"  {name:<16} {each.count:>8,}  {result}{off}"
                yield from (f"    {example}" for example in each.examples)
            yield from (f"  {note}" for note in made.notes)
        if self.checkpoint is not None:
            yield str(self.checkpoint)


async def replay_steps(
    source: Path,
    step: str | None = None,
    overrides: Sequence[str] = (),
    trains: bool = True,
    output: Path | None = None,
) -> Replayed:
    """Make steps of a run, or of a bundle's file, again.

    Args:
        step: `N`, or `A-B` for several; None takes the last step.
        overrides: Changes to the run's configuration, such as `algorithm.loss.name=gspo`.
        trains: Whether to compute log-probs, loss and gradients, which needs the model.
        output: Folder in which the weights after the last step become a checkpoint.

    Raises:
        InputError: when the run does not have the steps, or the changes cannot be used.
    """
    async with AsyncExitStack() as stack:
        run = await run_in_thread(lambda: stack.enter_context(opened_bundle(source)))
        first, last = _steps(run, step)
        if output is not None:
            await run_in_thread(checkpoint.checked_target, output)
        temporary = stack.enter_context(TemporaryDirectory(prefix="turnwise-"))
        stack.enter_context(logs.open_logs(Path(temporary), "warning"))  # vLLM's, of a server
        opened = open_replay(run, overrides, trains=trains)
        replay, notes = await stack.enter_async_context(opened)
        steps = list[StepReplay]()
        for number in range(first, last + 1):
            # With `output`, the weights go on from those that were made here.
            if trains and (output is None or number == first):
                why = await replay.begin(number)
                trains = not why
                notes += [f"log-probs, loss and gradient are not made again: {why}"] if why else []
            steps.append(await replay.play(number))
        place = None if output is None else await replay.save(output, last)
        return Replayed(steps, notes, place)


def _steps(run: Path, step: str | None) -> tuple[int, int]:
    """Return the first and the last step that `N` or `A-B` names; None is the last step."""
    if step is None:
        last = number_of(trajectory_file(run))
        return last, last
    if (found := re.fullmatch(r"(\d+)(?:-(\d+))?", step)) is None:
        raise InputError(f"--step {step}: write a number such as 3, or a range such as 3-5")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise InputError(f"--step {step}: steps begin with 1, and a range with its smaller number")
    return first, last


@asynccontextmanager
async def open_replay(
    run: Path, overrides: Sequence[str] = (), *, trains: bool = True
) -> AsyncIterator[tuple[Replay, list[str]]]:
    """Open a run, or a bundle's folder, to make its steps again.

    Args:
        overrides: Changes to the run's configuration, such as `rollout.rewards=[...]`.
        trains: Whether to compute log-probs, loss and gradients.

    Returns:
        The replay, and notes of what cannot be made again.
    """
    config, notes = replay_config(run, overrides), list[str]()
    tokenizer = await run_in_thread(load_tokenizer, config.model)
    runner: Runner | None = None
    find: Callable[[str], Problem] = _no_problem

    def load() -> tuple[Runner, Callable[[str], Problem]]:
        made = Runner(config, tokenizer)
        made.load()
        return made, finder(config, run)

    if config.environment or config.environments:
        what = "the environment, rewards and data"
        seconds = config.engine.start_timeout
        runner, find = await import_user_code(load, seconds=seconds, what=what)
    else:
        notes.append("a program gave the environment as an object: rewards are those of the files")
    policy, rank = None, None
    if trains:
        from transformers.utils.logging import disable_progress_bar

        from turnwise.training.rank import TrainerRank

        disable_progress_bar()
        rank = await run_in_thread(TrainerRank, config, run)
        policy = TrainerGroup(config, [_LocalRank(rank)])
        policy.layouts = rank.layouts
    try:
        yield Replay(config, run, runner, find, policy), notes
    finally:
        if rank is not None:
            await run_in_thread(rank.close)


def replay_config(run: Path, overrides: Sequence[str]) -> Config:
    """Return a run's configuration for one rank in this process."""
    if not (run / "config.yaml").is_file():
        raise InputError(f"there is no run in {run} (a folder with config.yaml)")
    config = load_config(run / "config.yaml", overrides, optional=NEEDED_KEYS)
    alone = {"ranks": 1, "context_parallel": 1, "colocated": False, "offload": []}
    parts = {
        "output_dir": str(run.resolve().parent),
        "name": run.resolve().name,
        "training": config.training.model_copy(update=alone | {"resources": {}}),
        "rollout": config.rollout.model_copy(update={"retries": 0, "processes": 1}),
        "weights": config.weights.model_copy(update={"delta": False}),
    }
    return config.model_copy(update=parts)


def groups_of(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Return the groups of a step's file, in its order."""
    groups: list[Group] = []
    for each in trajectories:
        last = groups[-1] if groups else None
        same = last is not None and last.problem_id == each.problem_id
        if last is None or not same or last.trajectories[-1].sample_index >= each.sample_index:
            last = Group(each.problem_id, environment=each.environment)
            groups.append(last)
        last.trajectories.append(each)
    return groups


def _no_problem(name: str) -> Problem:
    raise InputError(f"the row {name} is not known")


def _ordered(columns: TokenColumns) -> TokenColumns:
    order = np.lexsort([columns[name] for name in reversed(_PLACE)])
    return {name: values[order] for name, values in columns.items()}


def _at(step: int, place: Sequence[int]) -> str:
    trajectory, turn, at = place
    return f"step {step}, trajectory {trajectory}, turn {turn}, token {at}"


def _numbers(line: JsonObject) -> JsonObject:
    """Return the metrics that do not depend on the machine."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and not any(part in name for part in _UNLIKE)
    }


def _counterpart(old: Trajectory, made: Sequence[Trajectory]) -> Trajectory | None:
    """Return the trajectory that repeats a stored one: of the same number or, if an agent's
    requests came in another order, with the same sampled turns."""
    ids = [turn.completion_token_ids for turn in old.turns]
    ranked = sorted(made, key=lambda each: each.sample_index != old.sample_index)
    same = (each for each in ranked if ids == [turn.completion_token_ids for turn in each.turns])
    alone = (each for each in ranked if each.sample_index == old.sample_index)
    return next(same, next(alone, None))


def _add_messages(compared: Compared, where: str, old: Trajectory, new: Trajectory) -> None:
    """Compare the texts and calls of conversations; servers draw other ids of calls each time."""
    compared.count += 1
    before, now = ([(m.get("role"), said(m)) for m in each.messages] for each in (old, new))
    for index, (one, other) in enumerate(zip(before, now, strict=False)):
        if one != other:
            what = f"{_short(one[1])} is {_short(other[1])} now"
            compared.note(where, f"message {index} ({one[0]}): {what}")
            return
    if len(before) != len(now):
        compared.note(where, f"{len(before)} messages are {len(now)} now")


def _add_parts(compared: Compared, where: str, old: Trajectory, new: Trajectory, kind: str) -> None:
    before, now = getattr(old.outcome, kind), getattr(new.outcome, kind)
    if isinstance(before, Mapping):
        pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
    else:
        pairs = dict(enumerate(zip(before, now, strict=False)))
    different = Compared(compared.tolerance)
    for name, (one, other) in pairs.items():
        different.add(f"{where} {name}", one, other)
    if different.different or len(before) != len(now):
        compared.note(where, (different.examples or ["other names"])[0])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
