"""The user's own policy class in a run of `turnwise pipeline`.

The command's loop asks for one group at a time. Here the problems of groups that begin together
become one batch for the class's `forward_step` or `eval_forward`, as in ChatLearn. The command
still trains, evaluates, saves and resumes. The methods of the class are called outside the event
loop, only one `forward_step` or `eval_forward` at a time. Each call has a deadline.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from turnwise.compat.chatlearn.module import VLLMModule
from turnwise.compat.chatlearn.outputs import rewarded_groups
from turnwise.compat.chatlearn.pipeline import Parts, Pipeline
from turnwise.core.deadlines import deadline_error
from turnwise.core.loop_thread import Work
from turnwise.core.optional import Foreign, load_object
from turnwise.core.user_code import call_user_code, describe_user_error
from turnwise.errors import InputError, TurnwiseError
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.batch_sampler import OneCall
from turnwise.rollouts.producer import RunGroup
from turnwise.run.runtime import Runtime, TrainingStep

if TYPE_CHECKING:
    from turnwise.run.commands import Datasets

POLICY_CLASS = "models.policy.module"

_Result = TypeVar("_Result")


def _refused(method: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise InputError(
            f"{POLICY_CLASS}: `turnwise pipeline` trains, saves and resumes by itself (load in the "
            f"policy's file names the model to start from): leave out {method}, or write a program "
            "with Pipeline"
        )

    return refuse


class _RunsPipeline(Pipeline):
    """A pipeline that uses the engines and the trainer of the command's run."""

    train = _refused("train")
    score = _refused("score")
    load = _refused("load")
    save = _refused("save")

    _parts: Parts | None = None

    @contextmanager
    def attached(self, runtime: Runtime) -> Iterator[None]:
        assert runtime.policy is not None
        # The step is unused: the command's loop has its own, and methods that need it raise errors.
        self._parts = runtime, runtime.policy, cast(TrainingStep, None)
        self._loop, self._calls = asyncio.get_running_loop(), set[Future[Foreign]]()
        try:
            yield
        finally:
            self._parts = None
            self.cancel_calls()

    def cancel_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def _opened(self) -> Parts:
        if self._parts is None:
            raise InputError(f"{POLICY_CLASS}: the run has ended")
        return self._parts

    def submit(self, work: Work[_Result]) -> "Future[_Result]":
        _ = self._opened()
        call = asyncio.run_coroutine_threadsafe(work(), self._loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _call(self, work: Work[_Result], seconds: float, who: str) -> _Result:
        future = self.submit(work)  # without a watchdog, because the run has one
        try:
            return future.result(seconds)
        except TimeoutError:
            raise deadline_error(seconds, f"waited for {who}: no answer") from None
        except CancelledError:
            raise TurnwiseError(f"{who} was cancelled") from None
        finally:
            future.cancel()


class PolicyRun:
    """Runs the user's policy class as a part of the command's run.

    Args:
        file: The pipeline's file.
        path: The policy's class as package.module:Class, a subclass of `VLLMModule`.
    """

    def __init__(self, file: Path, overrides: Sequence[str], path: str) -> None:
        kind: Foreign = load_object(path, POLICY_CLASS)
        if not (isinstance(kind, type) and issubclass(kind, VLLMModule)):
            raise InputError(f"{POLICY_CLASS}: {path} is no subclass of VLLMModule")
        self._policy: VLLMModule = kind("policy")
        self.pipeline = _RunsPipeline(file, self._policy, overrides=overrides)
        config = self.pipeline.config
        given = {
            "rollout.processes": config.rollout.processes > 1,
            "environments": config.environments,
            "data.eval_sets": config.data.eval_sets,
            "eval.background": config.eval.background,
            "deterministic": config.deterministic,
        }
        if unusable := [key for key, value in given.items() if value]:
            raise InputError(
                f"{POLICY_CLASS}: the policy's class makes its batches in one process, as prompts "
                f"come, of one training and one held-out dataset, one after another: leave out "
                f"{', '.join(unusable)}"
            )
        self._calls = 0
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def join(self, runtime: Runtime, data: "Datasets") -> "AsyncIterator[Datasets]":
        """Set up the policy and make it produce the runtime's groups; yield the problems of its
        `build_dataset` for training and evaluation."""
        problems: list[Sequence[Problem]] = []
        run_groups: list[RunGroup] = []
        with self.pipeline.attached(runtime):
            await self._called("setup", partial(self._policy.start, self.pipeline))
            for rows, is_eval in zip(data, (False, True), strict=True):
                build = partial(self._built, rows, is_eval)
                built = await self._called("build_dataset", build)
                problems.append([problem for problem, _ in built])
                run_groups.append(self._in_batches(built, is_eval))
            held_out = self.pipeline.config.eval.sampling
            runtime.grouping = lambda sampling: run_groups[sampling is held_out]
            yield problems[0], problems[1]

    def _built(self, problems: Sequence[Problem], is_eval: bool) -> list[tuple[Problem, object]]:
        """Return pairs of a problem and the item of `build_dataset` from which the problem was
        made."""
        if not problems:
            return []
        policy, prompts = self._policy, list[Foreign](problem.row for problem in problems)
        own = type(policy).build_dataset is not VLLMModule.build_dataset
        bare = all(row.keys() == {"prompt"} and isinstance(row["prompt"], str) for row in prompts)
        if own and bare and policy.model_args["prompt_key"] is None:
            prompts = [row["prompt"] for row in prompts]  # ChatLearn passes such rows as texts
        more = {"is_eval": True} if is_eval else {}
        made: list[tuple[Problem, object]] = []
        for number, item in enumerate(policy.build_dataset(prompts, **more), start=1):
            name = f"{policy.name}-eval:{number}" if is_eval else f"{policy.name}:{number}"
            if not isinstance(item, Problem | Mapping):
                raise InputError(
                    f"{POLICY_CLASS}: build_dataset made {repr(item)[:80]}, which is neither a "
                    "problem nor a mapping with token ids"
                )
            made.append((item if isinstance(item, Problem) else Problem(name, dict(item)), item))
        return made

    def _in_batches(self, made: Sequence[tuple[Problem, object]], is_eval: bool) -> RunGroup:
        """Return a function that runs the group of one of these problems, in a batch with the
        problems that other calls ask for."""
        policy, rollout = self._policy, self.pipeline.config.rollout
        items = {problem.id: item for problem, item in made}
        size = len(made) if is_eval else rollout.prompts_per_step
        hook = "eval_forward" if is_eval else "forward_step"
        forward: Foreign = getattr(policy, hook)
        batch: OneCall[Problem, Group] | None = None

        async def answers(own: OneCall[Problem, Group]) -> list[Group]:
            async with self._turn:
                problems = await own.complete()
                rows = [items[problem.id] for problem in problems]
                iteration = () if is_eval else (self._calls,)
                self._calls += not is_eval
                seconds = policy.deadline(len(rows)) + rollout.environment_timeout
                groups = await self._called(
                    hook, lambda: rewarded_groups(forward(rows, *iteration)), seconds
                )
            if len(groups) != len(problems):
                raise InputError(
                    f"{POLICY_CLASS}: {hook} returned groups of {len(groups)} of {len(problems)} "
                    "prompts: it must answer all of a batch, in their order"
                )
            for group, problem in zip(groups, problems, strict=True):
                group.problem_id = problem.id
                for trajectory in group.trajectories:
                    trajectory.problem_id = problem.id
            return groups

        async def run_group(problem: Problem, tag: str) -> Group:
            nonlocal batch
            if batch is None or not batch.is_open:
                batch = OneCall(answers, size)
            return await batch.answer(problem)

        return run_group

    async def _called(
        self, hook: str, function: Callable[[], _Result], seconds: float | None = None
    ) -> _Result:
        """Call a method of the class; raise an error of the user's code as an `InputError`."""
        key = "rollout.trajectory_timeout"
        if seconds is None:
            seconds, key = self.pipeline.config.engine.start_timeout, "engine.start_timeout"
        try:
            result: _Result = await call_user_code(
                function, name=f"{hook} of {POLICY_CLASS}", seconds=seconds, key=key
            )
            return result
        except BaseException as error:
            self.pipeline.cancel_calls()  # the thread may continue, but it can no longer sample
            if not isinstance(error, Exception) or isinstance(error, TurnwiseError | OSError):
                raise
            why = await describe_user_error(error)
            raise InputError(f"{POLICY_CLASS}: {hook} failed: {why}") from error
