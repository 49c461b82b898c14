"""The policy's own class in the run of `turnwise pipeline`.

The command's loop asks for one group at a time. Here the problems of groups that begin together
become a batch of the class's `forward_step` or `eval_forward`, as in ChatLearn; the command still
trains, evaluates, saves and resumes. The class is called outside the event loop, one call at a
time, each within a deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from turnwise.config import SamplingConfig
from turnwise.core.deadlines import deadline
from turnwise.core.json_types import JsonObject
from turnwise.core.loop_thread import EventLoopThread, Work
from turnwise.core.optional import Foreign, load_object
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.errors import InputError, TurnwiseError
from turnwise.pipeline.module import VLLMModule
from turnwise.pipeline.outputs import rewarded_groups
from turnwise.pipeline.pipeline import Pipeline
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.producer import RunGroup
from turnwise.run.runtime import Runtime, TrainingStep
from turnwise.training.model import ModelName

POLICY_CLASS = "models.policy.module"
_GATHER_SECONDS = 0.05  # time for groups that begin together to become one batch
_GRACE_SECONDS = 10.0  # time after a call's own deadline after which the event loop is stuck

_Result = TypeVar("_Result")
_Datasets = tuple[Sequence[Problem], Sequence[Problem]]


class _RunsPipeline(Pipeline):
    """A pipeline whose engines and trainer are those of the command's run."""

    def attach(self, runtime: Runtime) -> None:
        assert runtime.policy is not None
        parts = runtime, runtime.policy, cast(TrainingStep, None)  # which the loop has
        self._thread = EventLoopThread.around(parts, "the run")

    def _call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        async def within() -> _Result:  # the run has a watchdog already
            async with deadline(seconds, f"waited for {who}: no answer"):
                return await work()

        future = self.submit(within)
        try:
            return future.result(seconds + _GRACE_SECONDS)
        except CancelledError:
            raise TurnwiseError(f"{who} was cancelled") from None
        finally:
            future.cancel()

    def train(self, *outputs: Mapping[str, object]) -> NoReturn:
        _refuse("train")

    def score(
        self, name: ModelName, token_ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]
    ) -> NoReturn:
        _refuse("score")

    def load(self, folder: str | Path) -> NoReturn:
        _refuse("load")

    def save(self, folder: str | Path, state: Mapping[str, object] | None = None) -> NoReturn:
        _refuse("save")


def _refuse(method: str) -> NoReturn:
    raise InputError(
        f"{POLICY_CLASS}: `turnwise pipeline` trains, saves and resumes by itself (load in the "
        f"policy's file names the model to start from): leave out {method}, or write a program "
        "with Pipeline"
    )


class PolicyRun:
    """The policy's class, and its part in a run.

    Args:
        file: The pipeline's file.
        path: Class of the policy, package.module:Class, a subclass of `VLLMModule`.
    """

    def __init__(self, file: Path, overrides: Sequence[str], path: str) -> None:
        kind: Foreign = load_object(path, POLICY_CLASS)
        if not (isinstance(kind, type) and issubclass(kind, VLLMModule)):
            raise InputError(f"{POLICY_CLASS}: {path} is no subclass of turnwise.VLLMModule")
        self._policy: VLLMModule = kind("policy")
        self.pipeline = _RunsPipeline(file, self._policy, overrides=overrides)
        if self.pipeline.config.rollout.processes > 1:
            raise InputError(
                f"{POLICY_CLASS}: the policy's class makes its batches in one process; set "
                "rollout.processes to 1"
            )
        self._calls = 0

    async def join(self, runtime: Runtime, data: _Datasets) -> _Datasets:
        """Set the policy up; return its datasets, whose groups the runtime has it make."""
        config = self.pipeline.config
        self.pipeline.attach(runtime)
        seconds = config.engine.start_timeout
        start = partial(self._policy.start, self.pipeline)
        await self._called("setup", start, seconds, "engine.start_timeout")
        turn = asyncio.Lock()
        batches: dict[bool, _Batches] = {}
        problems: list[Sequence[Problem]] = []
        for is_eval, rows in enumerate(data):
            items: dict[str, object] = {}
            build = partial(self._built, rows, bool(is_eval), items)
            built = await self._called("build_dataset", build, seconds, "engine.start_timeout")
            problems.append(built)
            most = 0 if is_eval else config.rollout.prompts_per_step
            answers = partial(self._answers, items, bool(is_eval))
            batches[bool(is_eval)] = _Batches(answers, turn, most)

        def grouping(sampling: SamplingConfig) -> RunGroup:
            return batches[sampling is config.eval.sampling].run_group

        runtime.grouping = grouping
        return problems[0], problems[1]

    def _built(
        self, problems: Sequence[Problem], is_eval: bool, items: dict[str, object]
    ) -> list[Problem]:
        """Return the problems of `build_dataset`, and add its items by the problems' names."""
        if not problems:
            return []
        policy, prompts = self._policy, list[Foreign](problem.row for problem in problems)
        own = type(policy).build_dataset is not VLLMModule.build_dataset
        if own and policy.model_args["prompt_key"] is None and all(map(_is_text, prompts)):
            prompts = [row["prompt"] for row in prompts]  # as ChatLearn reads its files
        more = {"is_eval": True} if is_eval else {}
        made: list[Problem] = []
        for number, item in enumerate(policy.build_dataset(prompts, **more), start=1):
            name = f"{policy.name}-eval:{number}" if is_eval else f"{policy.name}:{number}"
            if not isinstance(item, Problem | Mapping):
                raise InputError(
                    f"{POLICY_CLASS}: build_dataset made {repr(item)[:80]}, which is neither a "
                    "problem nor a mapping with token ids"
                )
            made.append(item if isinstance(item, Problem) else Problem(name, dict(item)))
            items[made[-1].id] = item
        return made

    async def _answers(
        self, items: Mapping[str, object], is_eval: bool, problems: Sequence[Problem]
    ) -> list[Group]:
        """Return the groups of a batch."""
        policy, batch = self._policy, [items[problem.id] for problem in problems]
        hook, number = "eval_forward" if is_eval else "forward_step", self._calls
        self._calls += not is_eval

        def forward() -> list[Group]:
            data: Foreign = batch
            return rewarded_groups(
                policy.eval_forward(data) if is_eval else policy.forward_step(data, number)
            )

        rollout = self.pipeline.config.rollout
        seconds = policy.deadline(len(batch)) + rollout.environment_timeout
        groups = await self._called(hook, forward, seconds, "rollout.trajectory_timeout")
        if len(groups) != len(problems):
            raise InputError(
                f"{POLICY_CLASS}: {hook} returned groups of {len(groups)} of {len(problems)} "
                "prompts: it must answer all of a batch, in their order"
            )
        for group, problem in zip(groups, problems, strict=True):
            group.problem_id, group.environment = problem.id, problem.environment
            for trajectory in group.trajectories:
                trajectory.problem_id = problem.id
        return groups

    async def _called(
        self, hook: str, function: Callable[[], _Result], seconds: float, key: str
    ) -> _Result:
        """Call a method of the class; an error of its own becomes a sentence."""
        try:
            result: _Result = await call_user_code(
                function, name=f"{hook} of {POLICY_CLASS}", seconds=seconds, key=key
            )
        except (TurnwiseError, OSError):
            raise
        except Exception as error:
            why = await describe_user_error(error)
            raise InputError(f"{POLICY_CLASS}: {hook} failed: {why}") from error
        return result


def _is_text(row: JsonObject) -> bool:
    return row.keys() == {"prompt"} and isinstance(row["prompt"], str)


class _Batches:
    """Gathers the problems of groups that begin together, and answers one batch at a `turn`, of at
    most `most` problems; 0 means any number."""

    def __init__(
        self,
        answers: Callable[[Sequence[Problem]], Awaitable[list[Group]]],
        turn: asyncio.Lock,
        most: int = 0,
    ) -> None:
        self._answers = answers
        self._turn = turn
        self._most = most
        self._waiting: list[tuple[Problem, asyncio.Future[Group]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run_group(self, problem: Problem, tag: str) -> Group:
        answer: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self._waiting.append((problem, answer))
        if len(self._waiting) == 1:
            self._begin()
        return await answer

    def _begin(self) -> None:
        task = asyncio.create_task(self._next())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _next(self) -> None:
        """Answer those that wait once it is their turn."""
        async with self._turn:
            await asyncio.sleep(_GATHER_SECONDS)
            waiting = [(problem, answer) for problem, answer in self._waiting if not answer.done()]
            most = self._most or len(waiting)
            batch, self._waiting = waiting[:most], waiting[most:]
            if self._waiting:
                self._begin()
            if not batch:
                return
            try:
                groups = await self._answers([problem for problem, _ in batch])
            except BaseException as error:
                for _, answer in batch:
                    if isinstance(error, Exception) and not answer.done():
                        answer.set_exception(error)
                    answer.cancel()
                if not isinstance(error, Exception):
                    raise
                return
            for (_, answer), group in zip(batch, groups, strict=True):
                if not answer.done():  # or the run no longer needs it
                    answer.set_result(group)
