"""NeMo-RL's environments: Ray actors whose `step` reads message logs and answers them.

A message log is a list of messages with their token ids. As in NeMo-RL, the prompt is the ids of a
problem's messages, and the text of an observation follows the answer without a chat template.
"""

import abc
import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypedDict, TypeVar

import torch

from turnwise.core.aio import run_in_thread
from turnwise.core.optional import Foreign
from turnwise.errors import InputError
from turnwise.rollouts.agent_loop import RolloutContext
from turnwise.rollouts.environment import Environment, Rewards
from turnwise.rollouts.problems import Row
from turnwise.trajectory import Message, Prompt, Trajectory, status_after

LLMMessageLogType = list[dict[str, Foreign]]
"""Messages with `role`, `content`, and `token_ids`, a tensor [L]."""
_MetadataT = TypeVar("_MetadataT")
_ValueT = TypeVar("_ValueT")


class _DatumFields(TypedDict):
    message_log: LLMMessageLogType
    length: int
    extra_env_info: dict[str, Foreign] | None
    loss_multiplier: float
    idx: int


class DatumSpec(_DatumFields, total=False):
    """A problem of a NeMo-RL dataset; `extra_env_info` is what its environment needs to know."""

    task_name: str
    stop_strings: list[str]


class BatchedDataDict(UserDict[str, Foreign], Generic[_ValueT]):
    """A dictionary whose values are lists or tensors with one item for each row."""


class EnvironmentReturn(NamedTuple, Generic[_MetadataT]):
    """An environment's answers to a batch of message logs, one item for each log."""

    observations: list[dict[str, str]]
    metadata: list[_MetadataT]
    next_stop_strings: Sequence[list[str] | None]
    rewards: torch.Tensor | dict[str, torch.Tensor]
    terminateds: torch.Tensor
    answers: list[str | None] | None


class EnvironmentInterface(abc.ABC, Generic[_MetadataT]):
    """Base class of NeMo-RL's environments."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[_MetadataT]
    ) -> EnvironmentReturn[_MetadataT]:
        """Answer message logs, each with its metadata: `extra_env_info` at first, and then what the
        previous step returned."""

    @abc.abstractmethod
    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Foreign]
    ) -> tuple[BatchedDataDict[Foreign], dict[str, float]]:
        """Return the batch and its metrics. Turnwise passes one trajectory at a time, and averages
        the metrics."""


def row_of(datum: Mapping[str, Foreign]) -> Row:
    """Return a problem of a NeMo-RL dataset as a row, with lists in place of tensors."""
    log = []
    for message in datum["message_log"]:
        if (ids := message.get("token_ids")) is None:
            raise InputError(f"datum {datum.get('idx')}: each message needs token_ids")
        log.append({**message, "token_ids": [int(token) for token in ids]})
    return {**datum, "message_log": log}


class TaskEnvironment(Environment):
    """The environment of a row's task, an actor or an object.

    Args:
        row: A row that `row_of` made.
        task_to_env: Environments by the row's `task_name`.
    """

    def __init__(self, row: Row, task_to_env: Mapping[str, Foreign]) -> None:
        name: Foreign = row.get("task_name")
        if name not in task_to_env:
            raise InputError(f"task_to_env has no environment for the task {name}")
        self.stop_strings: Sequence[str] = row.get("stop_strings") or ()
        self._actor, self._row = task_to_env[name], row
        self._log = [
            {"role": each["role"], "content": each["content"]} for each in row["message_log"]
        ]
        self.problem = [dict(message) for message in self._log]
        self._metadata = copy.deepcopy(row.get("extra_env_info"))
        self._rewards: list[float] = []
        self._parts: dict[str, float] = {}

    async def step(self, message: Message) -> list[Message]:
        self._log.append({"role": "assistant", "content": message["content"]})
        log = [dict(each) for each in self._log]
        made = EnvironmentReturn(*await self._ask("step", [log], [self._metadata]))
        if isinstance(made.rewards, dict):
            for name, values in made.rewards.items():
                self._parts[name] = self._parts.get(name, 0.0) + float(values[0])
        else:
            self._rewards.append(float(made.rewards[0]))
        self.done = bool(made.terminateds[0])
        self.stop_strings = (made.next_stop_strings or [None])[0] or ()
        if made.metadata[0] is not None:
            self._metadata = made.metadata[0]
        observation = dict(made.observations[0])
        self._log.append(observation)
        return [observation]

    def reward(self, trajectory: Trajectory) -> Rewards:
        return Rewards(turns=self._rewards, parts=self._parts)

    async def metrics(self, trajectory: Trajectory) -> Mapping[str, float]:
        total = Rewards(turns=self._rewards, parts=self._parts).total
        fields = {key: [value] for key, value in self._row.items()}
        batch: BatchedDataDict[Foreign] = BatchedDataDict(
            {
                **fields,
                "message_log": [self._log],
                "total_reward": torch.tensor([total]),
                "truncated": torch.tensor([trajectory.status == "length"]),
            }
        )
        _, metrics = await self._ask("global_post_process_and_metrics", batch)
        return {name: float(value) for name, value in metrics.items()}

    async def _ask(self, method: str, *arguments: object) -> Foreign:
        function = getattr(self._actor, method)
        if remote := getattr(function, "remote", None):
            return await remote(*arguments)
        return await run_in_thread(lambda: function(*arguments))


class MessageLogLoop:
    """NeMo-RL's rollout: each answer is followed by the text of the environment's observation."""

    async def run(self, environment: TaskEnvironment, context: RolloutContext) -> None:
        trajectory, cut = context.trajectory, False
        trajectory.messages = [dict(message) for message in context.problem]
        log = context.row["message_log"]
        prompt = Prompt([token for message in log for token in message["token_ids"]])
        for _ in range(context.rollout.max_turns):
            completion = await context.sample(prompt, stop=environment.stop_strings)
            if completion is None:
                return
            cut = cut or status_after(completion.finish_reason) == "length"
            ids = completion.token_ids
            text = context.template.tokenizer.decode(ids, skip_special_tokens=True)
            answer: Message = {"role": "assistant", "content": text}
            trajectory.messages.append(answer)
            replies = await context.step(answer) or []
            trajectory.messages += replies
            if await context.episode.done():
                trajectory.status = "length" if cut else "completed"
                return
            observed = [await context.encode(message["content"]) for message in replies]
            prompt = Prompt.joined(prompt, ids, *observed)
        trajectory.status = "length" if cut else "max_turns"
