"""A judge: another model that scores trajectories by a rubric, over Chat Completions.

Each request is written with its answer to judge.jsonl in the run folder, under a key made of the
request: the same request is asked once. A judge without a usable answer drops what it should have
judged, under `judge_error` or `judge_timeout`, or gives the number of `on_error` and counts it.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from turnwise.config import JudgeConfig, RolloutConfig
from turnwise.core.aio import run_in_thread, together
from turnwise.core.deadlines import StallClock
from turnwise.core.files import JUDGEMENTS
from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, InputError, TrajectoryError
from turnwise.rollouts.chat_endpoint import ChatEndpoint
from turnwise.rollouts.judge_prompts import (
    Conversation,
    Question,
    Verdict,
    about_group,
    about_one,
    about_pair,
)
from turnwise.rollouts.problems import Row
from turnwise.rollouts.run_files import RunFiles
from turnwise.trajectory import Trajectory

logger = logging.getLogger(__name__)

_EVEN = 0.5  # score of trajectories of which there are no two different ones to compare
_Keyed = tuple[str, Verdict]  # a verdict with the key of its request


class Judge:
    """The judge of an entry of `rollout.rewards`; `name` is the entry's in metrics. Reads the
    verdicts in the run folder. InputError when the variable of the server's key is not set."""

    def __init__(
        self, config: JudgeConfig, name: str, rollout: RolloutConfig, files: RunFiles | None
    ) -> None:
        self._config, self._name, self._files = config, name, files or RunFiles(None)
        try:
            self._endpoint = ChatEndpoint(
                config.url,
                config.model,
                who="the judge",
                reason="judge",
                timeout=config.timeout,
                retries=config.retries,
                api_key_variable=config.api_key_variable,
                key="judge.timeout",
            )
        except InputError as error:
            raise InputError(f"rollout.rewards: {name}: {error}") from None
        self._slots = asyncio.Semaphore(-(-config.concurrency // rollout.processes))
        self._clock = StallClock(rollout.stall_timeout)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known: dict[str, list[Verdict]] = {}  # by the keys of the requests
        for line in self._files.lines(JUDGEMENTS) if config.cache else ():
            with suppress(ValueError, LookupError, TypeError):  # a line that was never completed
                entry = json.loads(line)
                self._known[entry["key"]] = [Verdict(*verdict) for verdict in entry["verdicts"]]

    async def score(
        self, read: Conversation, row: Row, trajectory: Trajectory, counts: Counter[str]
    ) -> float:
        """Return the score of a trajectory, from 0 to 1; adds the verdict to its `judgements`.
        TrajectoryError, `judge_error` or `judge_timeout`, if `on_error` is `drop`."""
        try:
            question = about_one(self._config, read, self._shown(row))
            (keyed,) = await self._judged(question, counts)
        except TrajectoryError as error:
            return await self._without(error, [trajectory], counts)
        return self._record(trajectory, [keyed])

    async def compare(
        self,
        reads: Sequence[Conversation],
        row: Row,
        trajectories: Sequence[Trajectory],
        counts: Counter[str],
    ) -> list[float]:
        """Return the scores of a group's trajectories, from 0 to 1, by comparing them; adds the
        verdicts to their `judgements`, and raises as `score` does.

        Equal conversations are judged as one. If all are equal, each has 0.5 without a request.
        With `group`, one request scores all, as in RULER (OpenPipe's ART); with `pairs`, there is
        one request for each two, and a score is the share of the others that were beaten, where a
        tie is half.
        """
        texts = [json.dumps(read, default=str) for read in reads]
        distinct = list(dict.fromkeys(texts))
        if len(distinct) < 2:
            return [_EVEN] * len(reads)
        try:
            different = [reads[texts.index(text)] for text in distinct]
            own = await self._compared(different, self._shown(row), counts)
        except TrajectoryError as error:
            return [await self._without(error, trajectories, counts)] * len(reads)
        of = dict(zip(distinct, own, strict=True))
        return [self._record(one, of[text]) for text, one in zip(texts, trajectories, strict=True)]

    async def _compared(
        self, reads: Sequence[Conversation], row: JsonObject, counts: Counter[str]
    ) -> list[list[_Keyed]]:
        """Return the verdicts on each of several different conversations."""
        members, about = [list(range(len(reads)))], about_group
        if self._config.compare == "pairs":
            # Judges prefer a place: each conversation is first as often as second, or nearly so.
            pairs = [[a, b] for b in range(len(reads)) for a in range(b)]
            members, about = [[a, b] if (b - a) % 2 else [b, a] for a, b in pairs], about_pair
        asked = [
            self._judged(about(self._config, [reads[at] for at in each], row), counts)
            for each in members
        ]
        own: list[list[_Keyed]] = [[] for _ in reads]
        for each, verdicts in zip(members, await together(asked), strict=True):
            for at, keyed in zip(each, verdicts, strict=True):
                own[at].append(keyed)
        return own

    async def _judged(self, question: Question, counts: Counter[str]) -> list[_Keyed]:
        """Return the verdicts of a question, which is asked at most once."""
        config, known = self._config, self._known
        response = {"name": "judgement", "strict": True, "schema": question.schema}
        form = {"type": "json_schema", "json_schema": response}
        request: JsonObject = {"response_format": form, **config.request}
        request = {name: value for name, value in request.items() if value is not None}
        asked = json.dumps([config.url, config.model, request, question.messages], default=str)
        key = hashlib.sha256(asked.encode()).hexdigest()
        lock = self._locks.setdefault(key, asyncio.Lock())
        missed = f"{self._endpoint} judged nothing"
        try:
            async with self._clock.watching(missed, "rollout.stall_timeout"), lock:
                if config.cache and key in known:
                    counts["cached"] += 1
                else:
                    async with self._slots:
                        reply = await self._endpoint.ask(
                            question.messages, request, counts, question.read
                        )
                    self._clock.moved()
                    known[key] = question.read(reply.text)
                    await self._keep(key, question, reply.text)
                return [(key, verdict) for verdict in known[key]]
        except DeadlineError as error:
            raise TrajectoryError("judge_timeout", str(error)) from None

    async def _keep(self, key: str, question: Question, answer: str) -> None:
        entry = {"key": key, "judge": self._name, "messages": question.messages, "answer": answer}
        line = json.dumps(entry | {"verdicts": self._known[key]}) + "\n"
        try:
            await run_in_thread(self._files.append, JUDGEMENTS, line)
        except OSError as error:
            path = self._files.path(JUDGEMENTS)
            logger.warning("%s cannot be written: %s", path, error.strerror)

    async def _without(
        self, error: TrajectoryError, trajectories: Sequence[Trajectory], counts: Counter[str]
    ) -> float:
        """Return the score in place of a verdict that the judge did not give."""
        counts["failed"] += 1
        await self._files.log_error(error.reason, trajectories[0].problem_id, error)
        if self._config.on_error == "drop":
            raise error
        for trajectory in trajectories:
            trajectory.events[error.reason] += 1
        return float(self._config.on_error)

    def _shown(self, row: Row) -> JsonObject:
        for name in self._config.row_fields:
            if name not in row:
                what = f"judge.row_fields has {name}, and a row has no such field"
                raise InputError(f"rollout.rewards: {what}")
        return {name: row[name] for name in self._config.row_fields}

    def _record(self, trajectory: Trajectory, verdicts: Sequence[_Keyed]) -> float:
        """Add verdicts to a trajectory, and return its score: their mean."""
        trajectory.judgements += [
            {"judge": self._name, "score": verdict.score, "why": verdict.why, "request": key}
            for key, verdict in verdicts
        ]
        return sum(verdict.score for _, verdict in verdicts) / len(verdicts)
