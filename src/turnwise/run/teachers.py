"""Teachers of on-policy distillation: other models' log-probs of the policy's own tokens.

Each branch is scored as the engine had it, tool results included. Engines and servers score a group
when it ends, while others run; a teacher in the trainer's ranks scores before the step trains. A
trajectory that cannot be scored is dropped as `teacher_error`.
"""

import itertools
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from turnwise.chat.template import read_tokenizer
from turnwise.config import Config, ModelConfig, SamplingConfig, TeacherConfig, WeightsConfig
from turnwise.core.aio import run_in_thread, together
from turnwise.core.gguf import resolve_model
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Request, generate
from turnwise.errors import InputError, TrajectoryError, TurnwiseError, first_line
from turnwise.rollouts import Group, Problem
from turnwise.rollouts.producer import RunGroup
from turnwise.run.teacher_server import TEACHER_ERROR, TeacherServer
from turnwise.serving.manager import AsyncLLMServerManager
from turnwise.serving.placement import WorkerStarter
from turnwise.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from turnwise.serving.worker_handle import WorkerHandle

_Sequences = Sequence[Sequence[int]]
_SCORING = SamplingConfig(n=1, max_tokens=1, prompt_logprobs=True)
_LEAST = -9999.0  # stands for the log-prob of an impossible token, as in vLLM's answers


class TeacherEngines:
    """Engines of a teacher's own, each device of which has a share of a GPU."""

    def __init__(self, config: Config, teacher: TeacherConfig, name: str, share: float) -> None:
        self._config, self._teacher, self._name, self._share = config, teacher, name, share
        self._manager: AsyncLLMServerManager | None = None
        self._numbers = itertools.count()

    async def start(self) -> None:
        config = await run_in_thread(_engine_config, self._config, self._teacher)
        starter = WorkerStarter(config, self._share)
        seconds = config.engine.start_timeout + config.engine.request_timeout

        async def start(_: str, index: int) -> "WorkerHandle":
            return await starter(f"{self._name}-{index}", index)

        parts = start, config.serving, config.weights, seconds, starter.end
        self._manager = AsyncLLMServerManager(*parts)
        await self._manager.start()

    async def score(self, token_ids: Sequence[int]) -> Sequence[float | None]:
        """Return the log-prob of each token after those before it; None for the first."""
        assert self._manager is not None, "the teacher is not started"
        request = Request(list(token_ids), _SCORING, f"{self._name}:{next(self._numbers)}")
        try:
            return (await generate(self._manager.scheduler, request)).prompt_logprobs or []
        except InputError as error:  # such as a sequence of more than the model's context
            raise TrajectoryError(TEACHER_ERROR, str(error)) from error

    async def stop(self) -> None:
        if self._manager is not None:
            await self._manager.shutdown()


def _engine_config(config: Config, teacher: TeacherConfig) -> Config:
    from transformers import AutoConfig

    assert teacher.model is not None
    trust = config.model.trust_remote_code
    shape = AutoConfig.from_pretrained(resolve_model(teacher.model), trust_remote_code=trust)
    most = getattr(shape.get_text_config(), "max_position_embeddings", None) or math.inf
    model = ModelConfig(
        path=teacher.model,
        dtype=teacher.dtype or config.model.dtype,
        max_length=int(min(config.model.max_length + 1, most)),  # one token is sampled, too
        trust_remote_code=trust,
    )
    changes: dict[str, dict[str, object]] = {
        "serving": {"workers": teacher.engines, "adapters": {}, "worker_servers": False},
        "engine": {"routing_replay": False, "logits_processors": []},
        "training": {"colocated": False},
        "metrics": {"port": None},
    }
    parts = {key: getattr(config, key).model_copy(update=new) for key, new in changes.items()}
    return config.model_copy(update=parts | {"model": model, "weights": WeightsConfig()})


class Teachers:
    """The teachers of a run's environments; those that are started are outside the ranks.

    Args:
        share: Share of a GPU for each device of a teacher's engines.
    """

    def __init__(self, config: Config, tokenizer: "Tokenizer", share: float = 0.0) -> None:
        self._configs = config.teachers()
        self._outside: dict[str, TeacherEngines | TeacherServer] = {}
        self._started: dict[int, TeacherEngines | TeacherServer] = {}
        seconds = config.rollout.stall_timeout
        for name, teacher in self._configs.items():
            if teacher.in_ranks:
                continue
            if id(teacher) not in self._started:  # the environments that name none share one
                self._started[id(teacher)] = (
                    TeacherEngines(config, teacher, f"teacher{name and '-'}{name}", share)
                    if teacher.url is None
                    else TeacherServer(teacher, _key(name), tokenizer, seconds)
                )
            self._outside[name] = self._started[id(teacher)]

    async def start(self) -> None:
        await together(teacher.start() for teacher in self._started.values())

    async def stop(self) -> None:
        for teacher in self._started.values():
            await teacher.stop()

    def scoring(self, run_group: RunGroup) -> RunGroup:
        """Return a function that runs a group, and lets a teacher outside the ranks score it."""

        async def run(problem: Problem, tag: str) -> Group:
            group = await run_group(problem, tag)
            await self._score_outside(group)
            return group

        return run

    async def complete(
        self,
        groups: Sequence[Group],
        in_ranks: Callable[[_Sequences, _Sequences], Awaitable[list[list[float]]]],
    ) -> None:
        """Score the trajectories that have a teacher, and that none has scored yet; `in_ranks`
        scores sequences at the tokens of their masks, with the model in the ranks."""
        await together(self._score_outside(group) for group in groups)
        own = [g for g in groups if g.environment in self._configs.keys() - self._outside.keys()]
        missing = [t for group in own for t in group.trajectories if not t.teacher_logprobs]
        branches = [branch for trajectory in missing for branch in trajectory.samples()]
        if not branches:
            return
        began = time.perf_counter()
        masks = [branch.response_mask for branch in branches]
        scored = iter(await in_ranks([branch.token_ids for branch in branches], masks))
        own[0].seconds["teacher"] += time.perf_counter() - began
        for trajectory in missing:
            trajectory.teacher_logprobs = [next(scored) for _ in trajectory.samples()]

    async def _score_outside(self, group: Group) -> None:
        if (teacher := self._outside.get(group.environment)) is None:
            return
        missing = [t for t in group.trajectories if not t.teacher_logprobs]
        began = time.perf_counter()
        with waiting(f"the teacher of {group.problem_id}", "teacher"):
            failures = await together(_score(teacher, trajectory) for trajectory in missing)
        for trajectory, why in zip(missing, failures, strict=True):
            group.drop([trajectory] if why else [], TEACHER_ERROR, why)
        group.seconds["teacher"] += time.perf_counter() - began


async def _score(teacher: TeacherEngines | TeacherServer, trajectory: Trajectory) -> str:
    """Score a trajectory; return the reason why it cannot be, or ""."""
    found = list[list[float]]()
    try:
        for branch in trajectory.samples():
            row, mask = await teacher.score(branch.token_ids), branch.response_mask
            known = [value for value in row[1:] if value is not None and not math.isnan(value)]
            if 1 + len(known) != len(mask):
                said = f"the teacher gave {len(known)} log-probs for {len(mask)} tokens"
                raise TrajectoryError(TEACHER_ERROR, said)
            pairs = zip([0.0, *known], mask, strict=True)
            found.append([max(value, _LEAST) if trained else 0.0 for value, trained in pairs])
    except InputError:
        raise
    except TurnwiseError as error:
        return str(error)
    trajectory.teacher_logprobs = found
    return ""


def _key(environment: str) -> str:
    return f"environments.{environment}.teacher" if environment else "algorithm.teacher"


def check_teachers(config: Config, tokenizer: "Tokenizer") -> None:
    """Compare the tokenizers of teachers that are loaded with the policy's.

    Raises:
        InputError: naming the first token that differs, or a teacher without tokenizer.
    """
    for name, teacher in config.teachers().items():
        if teacher.url is not None or teacher.model is None:
            continue
        key, trust = f"{_key(name)}: {teacher.model}", config.model.trust_remote_code
        try:
            theirs = read_tokenizer(ModelConfig(path=teacher.model, trust_remote_code=trust))
        except Exception as error:
            raise InputError(f"{key} has no tokenizer: {first_line(error)}") from error
        tokens = {index: token for token, index in theirs.get_vocab().items()}
        for token, index in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
            if tokens.get(index) != token:
                raise InputError(
                    f"{key} has another tokenizer than the policy: token {index} is {token!r} in "
                    f"the policy's, and {tokens.get(index)!r} in the teacher's"
                )
