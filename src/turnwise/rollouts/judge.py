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


class Judge:
    """The judge of an entry of `rollout.rewards`; `name` is the entry's in metrics.

    Raises:
        InputError: when the environment variable of its key is not set.
    """

    def __init__(
        self, config: JudgeConfig, name: str, rollout: RolloutConfig, files: RunFiles | None
    ) -> None:
        self._config, self._name, self._files = config, name, files
        try:
            self._endpoint = ChatEndpoint(
                config.url,
                config.model,
                who="the judge",
                reason="judge",
                timeout=config.timeout,
                retries=config.retries,
                key="judge.timeout",
                api_key_variable=config.api_key_variable,
            )
        except InputError as error:
            raise InputError(f"rollout.rewards: {name}: {error}") from None
        self._slots = asyncio.Semaphore(-(-config.concurrency // rollout.processes))
        self._clock = StallClock(rollout.stall_timeout)
        self._known: dict[str, list[Verdict]] | None = None  # by the requests' keys; None: not read
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reading = asyncio.Lock()

    async def score(
        self, read: Conversation, row: Row, trajectory: Trajectory, counts: Counter[str]
    ) -> float:
        """Return the score of a trajectory, from 0 to 1; adds the verdict to its `judgements`.

        Raises:
            TrajectoryError: `judge_error` or `judge_timeout`, if `on_error` is `drop`.
        """
        try:
            question = about_one(self._config, read, self._shown(row))
            key, (verdict,) = await self._judged(question, counts)
        except TrajectoryError as error:
            return await self._without(error, [trajectory], counts)
        self._record(trajectory, key, verdict)
        return verdict.score

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
        With `group`, one request scores all (RULER's way); with `pairs`, there is one request for
        each two, and a score is the share of the others that were beaten, where a tie is half.
        """
        texts = [json.dumps(read, default=str) for read in reads]
        distinct = [reads[texts.index(text)] for text in dict.fromkeys(texts)]
        place = {text: at for at, text in enumerate(dict.fromkeys(texts))}
        if len(distinct) < 2:
            return [_EVEN] * len(reads)
        try:
            own = await self._compared(distinct, self._shown(row), counts)
        except TrajectoryError as error:
            return [await self._without(error, trajectories, counts)] * len(reads)
        scores = []
        for text, trajectory in zip(texts, trajectories, strict=True):
            verdicts = own[place[text]]
            for key, verdict in verdicts:
                self._record(trajectory, key, verdict)
            scores.append(sum(verdict.score for _, verdict in verdicts) / len(verdicts))
        return scores

    async def _compared(
        self, reads: Sequence[Conversation], row: JsonObject, counts: Counter[str]
    ) -> list[list[tuple[str, Verdict]]]:
        """Return the verdicts on each of several different conversations, with their keys."""
        members, about = [list(range(len(reads)))], about_group
        if self._config.compare == "pairs":
            # Judges prefer a place: each conversation is first as often as second, or nearly so.
            pairs = [[a, b] for b in range(len(reads)) for a in range(b)]
            members, about = [[a, b] if (b - a) % 2 else [b, a] for a, b in pairs], about_pair
        asked = [
            self._judged(about(self._config, [reads[at] for at in each], row), counts)
            for each in members
        ]
        own: list[list[tuple[str, Verdict]]] = [[] for _ in reads]
        for each, (key, verdicts) in zip(members, await together(asked), strict=True):
            for at, verdict in zip(each, verdicts, strict=True):
                own[at].append((key, verdict))
        return own

    async def _judged(self, question: Question, counts: Counter[str]) -> tuple[str, list[Verdict]]:
        """Return the verdicts of a question and the key of its request, asked at most once."""
        response = {"name": "judgement", "strict": True, "schema": question.schema}
        request: JsonObject = {
            "response_format": {"type": "json_schema", "json_schema": response}
        } | self._config.request
        request = {name: value for name, value in request.items() if value is not None}
        asked = [self._config.url, self._config.model, request, question.messages]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        known = await self._cache()
        lock = self._locks.setdefault(key, asyncio.Lock())
        missed = f"{self._endpoint} judged nothing"
        try:
            async with self._clock.watching(missed, "rollout.stall_timeout"), lock:
                if self._config.cache and key in known:
                    counts["cached"] += 1
                    return key, known[key]
                async with self._slots:
                    reply = await self._endpoint.ask(
                        question.messages, counts, question.read, request
                    )
                self._clock.moved()
        except DeadlineError as error:
            raise TrajectoryError("judge_timeout", str(error)) from None
        known[key] = verdicts = question.read(reply.text)
        await self._keep(key, question, reply.text, verdicts)
        return key, verdicts

    async def _cache(self) -> dict[str, list[Verdict]]:
        """Return the verdicts so far, those of a resumed run's folder included."""
        async with self._reading:
            if self._known is None:
                self._known = {} if self._files is None else await run_in_thread(self._load)
        return self._known

    def _load(self) -> dict[str, list[Verdict]]:
        known = {}
        for line in self._files.lines(JUDGEMENTS) if self._files is not None else ():
            try:
                entry = json.loads(line)
                known[entry["key"]] = [Verdict(*verdict) for verdict in entry["verdicts"]]
            except (ValueError, LookupError, TypeError):  # a line that was never completed
                continue
        return known

    async def _keep(
        self, key: str, question: Question, answer: str, verdicts: Sequence[Verdict]
    ) -> None:
        if (files := self._files) is None:
            return
        entry = {"key": key, "judge": self._name, "messages": question.messages}
        line = json.dumps({**entry, "answer": answer, "verdicts": verdicts}) + "\n"
        try:
            await run_in_thread(files.append, JUDGEMENTS, line)
        except OSError as error:
            logger.warning("%s cannot be written: %s", files.path(JUDGEMENTS), error.strerror)

    async def _without(
        self, error: TrajectoryError, trajectories: Sequence[Trajectory], counts: Counter[str]
    ) -> float:
        """Return the score in place of a verdict that the judge did not give."""
        counts["failed"] += 1
        if self._files is not None:
            await self._files.log_error(error.reason, trajectories[0].problem_id, error)
        if self._config.on_error == "drop":
            raise error
        for trajectory in trajectories:
            trajectory.events[error.reason] += 1
        return float(self._config.on_error)

    def _shown(self, row: Row) -> JsonObject:
        missing = [name for name in self._config.row_fields if name not in row]
        if missing:
            raise InputError(
                f"rollout.rewards: judge.row_fields has {missing[0]}, and a row has no such field"
            )
        return {name: row[name] for name in self._config.row_fields}

    def _record(self, trajectory: Trajectory, key: str, verdict: Verdict) -> None:
        entry = {"judge": self._name, "score": verdict.score, "why": verdict.why, "request": key}
        trajectory.judgements.append(entry)
