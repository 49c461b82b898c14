"""Teachers of on-policy distillation: other models' log-probs of the policy's own tokens.

Each branch of a trajectory is scored with the tokens that the engine processed, tool results
included. Teachers with their own engines or servers score a group when it ends, while other groups
run; a trajectory that they cannot score is dropped, with the reason `teacher_error` or
`teacher_timeout`. A teacher in the trainer's ranks scores as part of the training step.

To add a source of a teacher's log-probs: write a class with `start` and `score`, like the classes
here, and choose it in `Teachers`.
"""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.chat.template import read_tokenizer
from turnwise.config import Config, ModelConfig, SamplingConfig, TeacherConfig
from turnwise.core.admission import Admission, Limits, Priority
from turnwise.core.aio import run_in_thread, together
from turnwise.core.endpoint import Endpoint
from turnwise.core.untrusted import Number, read_answer
from turnwise.core.watchdog import waiting
from turnwise.engine.protocol import Request, generate
from turnwise.errors import InputError, TrajectoryError, TurnwiseError, first_line
from turnwise.rollouts import Group
from turnwise.run.display import SILENT, Display
from turnwise.run.fleet import make_manager
from turnwise.serving.seats import engine_admission, limits_of
from turnwise.trajectory import Prompt, Trajectory
from turnwise.trajectory.turn import TEACHER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_ERROR = "teacher_error"
_SCORING = SamplingConfig(n=1, max_tokens=1, prompt_logprobs=True)
_MIN_LOGPROB = -9999.0  # used as the log-prob of an impossible token, as in vLLM's answers
_AT_ONCE, _RETRIES = 64, 10  # maximum requests to a server in flight; retries of each
_PROBED = 128  # tokens whose texts are compared before anything is sampled
_BYTES, _VALUES = 512, 64  # limits of an answer, per token of the prompt plus 1,000


class TeacherEngines:
    """A teacher's own engines; each of their devices gets a `share` of a GPU."""

    def __init__(self, config: Config, name: str, share: float) -> None:
        self._manager = make_manager(config, share, prefix=f"{name}-")
        self._admission = engine_admission(limits_of(config), self._manager.scheduler)
        self.start, self.stop = self._manager.start, self._manager.shutdown
        self._numbers = itertools.count()

    async def score(self, prompt: Prompt) -> Sequence[float | None]:
        """Return the log-prob of each token given the tokens before it; None for the first
        token."""
        request = Request(prompt, _SCORING, f"teacher:{next(self._numbers)}")
        try:
            async with self._admission.admitted(Priority.SCORING):
                return (await generate(self._manager.scheduler, request)).prompt_logprobs or []
        except TurnwiseError as error:  # such as a sequence longer than the model's context
            raise TrajectoryError(_ERROR, str(error)) from error


class _Logprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[Number | None]


class _ScoreChoice(TypedDict):
    logprobs: _Logprobs | None


class _ScoreAnswer(TypedDict):
    choices: list[_ScoreChoice]


_ANSWER = TypeAdapter(_ScoreAnswer)
_NOTHING = _Logprobs(tokens=[], token_logprobs=[])


class TeacherServer:
    """A teacher behind a `url`, whose completions API echoes prompts with their log-probs.

    The server's text of every token is compared with the text in the policy's tokenizer, so that no
    log-prob of a different text is used.
    """

    def __init__(
        self, config: Config, key: str, teacher: TeacherConfig, tokenizer: "Tokenizer"
    ) -> None:
        assert teacher.url is not None
        self._endpoint = Endpoint(
            teacher.url,
            teacher.model,
            who=f"{key}: the teacher",
            reason="teacher",
            timeout=config.rollout.stall_timeout,
            retries=_RETRIES,
            api_key_variable=teacher.api_key_variable,
            key="rollout.stall_timeout",
        )
        self._tokenizer = tokenizer
        self._texts = cache(self._texts_of)
        self._admission = Admission(Limits(_AT_ONCE))

    async def start(self) -> None:
        """Check that the server scores prompts, and that a sample of tokens has the same texts at
        the server as in the policy's tokenizer; raise InputError that names the first different
        token."""
        known = sorted(self._tokenizer.get_vocab().values())
        probe = known[:: max(1, len(known) // _PROBED)] + self._tokenizer.all_special_ids[:_PROBED]
        try:
            await self.score(Prompt(probe))
        except TrajectoryError as error:
            raise InputError(f"{error}: it cannot teach") from error

    async def score(self, prompt: Prompt) -> Sequence[float | None]:
        """Return the log-prob of each token given the tokens before it; None for the first token.

        Raises:
            InputError: when a token's text at the server differs from its text in the policy's
                tokenizer; names the first such token.
            TrajectoryError: when the server refuses the sequence, or cannot answer in time.
        """
        if prompt.images:
            raise TrajectoryError(_ERROR, f"{self._endpoint} scores no images")
        token_ids, size = prompt.tolist(), len(prompt) + 1000

        async def read(said: bytes) -> Sequence[float | None]:
            return await run_in_thread(self._read, said, token_ids, _VALUES * size)

        asked = {"prompt": token_ids, "echo": True, "logprobs": 1}
        body = {**asked, "max_tokens": 1, "temperature": 0}
        async with self._admission.admitted(Priority.SCORING):
            return await self._endpoint.post("completions", body, read, Counter(), _BYTES * size)

    def _read(
        self, said: bytes, token_ids: Sequence[int], max_values: int
    ) -> Sequence[float | None]:
        choices = read_answer(said, _ANSWER, max_values)["choices"]
        found = (choices[0]["logprobs"] if choices else None) or _NOTHING
        texts, logprobs = found["tokens"], found["token_logprobs"]
        if min(len(texts), len(logprobs)) < len(token_ids) or None in logprobs[1:]:
            gave = f"gave no log-probs of all {len(token_ids)} tokens of a prompt"
            raise TrajectoryError(_ERROR, f"{self._endpoint} {gave}")
        for token, text in zip(token_ids, texts, strict=False):  # the server samples one token more
            own = self._texts(token)
            # The text of a token that is part of a character depends on the tokens next to it.
            partial = any("\ufffd" in one for one in (*own, text))
            if text and text not in own and not partial:
                raise InputError(
                    f"{self._endpoint} has another tokenizer than the policy: token {token} is "
                    f"{own[0]!r} in the policy's, and {text!r} in the teacher's"
                )
        return logprobs[: len(token_ids)]

    def _texts_of(self, token: int) -> tuple[str, ...]:
        """Return the texts that a server may return for a token of the policy's tokenizer."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        return str(self._tokenizer.decode([token])), piece, piece.replace("\u2581", " ")


class Teachers:
    """The teachers of a run's environments, except teachers in the trainer's ranks.

    Args:
        share: Share of a GPU for each device of a teacher's engines.
    """

    def __init__(self, config: Config, tokenizer: "Tokenizer", share: float) -> None:
        self._outside: dict[str, TeacherEngines | TeacherServer] = {}  # by environment
        started: dict[tuple[object, ...], TeacherEngines | TeacherServer] = {}
        for name, teacher in config.teachers().items():
            if teacher.in_ranks:
                continue
            if teacher.source not in started:
                engines = f"teacher{name and '-'}{name}"
                started[teacher.source] = (
                    TeacherEngines(config.for_teacher(teacher), engines, share)
                    if teacher.url is None
                    else TeacherServer(config, config.teacher_key(name), teacher, tokenizer)
                )
            self._outside[name] = started[teacher.source]
        self._started = list(started.values())

    async def start(self, progress: Display = SILENT) -> None:
        with progress.part("starting teachers") if self._started else nullcontext():
            await together(teacher.start() for teacher in self._started)

    async def stop(self) -> None:
        await together(t.stop() for t in self._started if isinstance(t, TeacherEngines))

    async def score(self, group: Group) -> None:
        """Score the trajectories of a group that have no scores yet. Do nothing if the group has no
        teacher outside the trainer's ranks."""
        if (teacher := self._outside.get(group.environment)) is None:
            return
        missing = [
            t for t in group.trajectories if not any(TEACHER in turn.streams for turn in t.turns)
        ]
        began = time.perf_counter()
        with waiting(f"the teacher of {group.problem_id}", "teacher"):
            failures = await together(_score(teacher, trajectory) for trajectory in missing)
        for trajectory, error in zip(missing, failures, strict=True):
            if error is not None:
                group.drop([trajectory], error.reason, str(error))
        group.seconds["teacher"] += time.perf_counter() - began


async def _score(
    teacher: TeacherEngines | TeacherServer, trajectory: Trajectory
) -> TrajectoryError | None:
    """Score a trajectory; return the error if it cannot be scored, else None."""
    branches, found = trajectory.samples(), list[list[float]]()
    try:
        for branch in branches:
            given = await teacher.score(branch.ids)
            found.append([max(value or 0.0, _MIN_LOGPROB) for value in given])
    except TrajectoryError as error:
        return error
    except InputError as error:  # the tokenizers differ at a token that `start` did not compare
        return TrajectoryError(_ERROR, str(error))
    for branch, values in zip(branches, found, strict=True):
        branch.scatter(TEACHER, values)
    return None


def check_teachers(config: Config, tokenizer: "Tokenizer") -> None:
    """Check that each teacher that Turnwise loads has the policy's tokenizer.

    Raises:
        InputError: when a teacher has no tokenizer, or a different one; names the first different
            token.
    """
    trust = config.model.trust_remote_code
    for key, path in config.other_models().items():
        if not key.endswith(".teacher"):
            continue
        who = f"{key}: {path}"
        try:
            theirs = read_tokenizer(ModelConfig(path=path, trust_remote_code=trust))
        except Exception as error:
            raise InputError(f"{who} has no tokenizer: {first_line(error)}") from error
        tokens = {index: token for token, index in theirs.get_vocab().items()}
        for token, index in sorted(tokenizer.get_vocab().items(), key=itemgetter(1)):
            if tokens.get(index) != token:
                raise InputError(
                    f"{who} has another tokenizer than the policy: token {index} is {token!r} in "
                    f"the policy's, and {tokens.get(index)!r} in the teacher's"
                )
