"""A reward model: a sequence classifier with one output, in a Ray actor of its own.

It reads a trajectory's messages as text of its own tokenizer: through that tokenizer's chat
template, or, where it has none, the messages' texts line by line. Calls that are waiting together
are scored together. Knows nothing of the policy or of its tokens.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import ray

from turnwise import logs
from turnwise.config import NO_DEADLINE, Config
from turnwise.deadlines import StallClock
from turnwise.errors import DeadlineError, InputError, TurnwiseError
from turnwise.ray_calls import is_death, reply_of
from turnwise.tasks import task_group
from turnwise.trajectory import Message

logger = logging.getLogger(__name__)

_MAX_CALLS = 4096
_NO_LIMIT = 10**9


class RewardModel:
    """The model itself; one coroutine scores what is queued, batch after batch.

    Args:
        path: Folder or Hugging Face name.
        batch_tokens: Tokens, padding included, of one forward pass; a longer sequence, and each
            sequence where this is 0, is one by itself.
        gpu: Whether it has one.
        trust_remote_code: Run model code that comes with the weights.
        dtype: Name of the weights' precision; `auto` is that in which they were saved.

    Raises:
        InputError: when the model cannot be loaded, or is no reward model.
    """

    def __init__(
        self,
        path: str,
        *,
        batch_tokens: int,
        gpu: bool,
        trust_remote_code: bool = False,
        dtype: str = "auto",
    ) -> None:
        import torch

        self._path = path
        self._batch_tokens = batch_tokens
        self._device = torch.device("cuda" if gpu else "cpu")
        self._model, self._tokenizer = _load(path, trust_remote_code, dtype)
        self._model.to(self._device).eval()
        self._max_length = min(
            getattr(self._model.config, "max_position_embeddings", None) or _NO_LIMIT,
            self._tokenizer.model_max_length or _NO_LIMIT,
        )
        self._queue: asyncio.Queue[tuple[list[int], asyncio.Future[float]]] = asyncio.Queue()
        self._scoring: asyncio.Task[None] | None = None

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's output for a conversation.

        Raises:
            TurnwiseError: when there are no messages, or more than the model can read.
        """
        if not messages:
            raise TurnwiseError("the trajectory has no messages to read")
        token_ids = self._encode(messages)
        if len(token_ids) > self._max_length:
            raise TurnwiseError(
                f"the trajectory has {len(token_ids)} tokens and the model reads "
                f"{self._max_length} at most"
            )
        if self._scoring is None:
            self._scoring = asyncio.create_task(self._score_queued())
        scored: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((token_ids, scored))
        return await scored

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(self._tokenizer.encode("\n".join(map(_text, messages))))

    async def _score_queued(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            waiting.sort(key=lambda item: len(item[0]))
            for batch in batches([ids for ids, _ in waiting], self._batch_tokens):
                futures = [waiting[index][1] for index in batch]
                try:
                    scores = await asyncio.to_thread(
                        self._forward, [waiting[index][0] for index in batch]
                    )
                except Exception as error:  # such as memory: it is these trajectories' trouble
                    for future in futures:
                        if not future.done():
                            future.set_exception(TurnwiseError(f"{type(error).__name__}: {error}"))
                    continue
                for future, score in zip(futures, scores, strict=True):
                    if not future.done():
                        future.set_result(score)

    def _forward(self, sequences: Sequence[list[int]]) -> list[float]:
        import torch

        longest = max(map(len, sequences))
        padding = self._model.config.pad_token_id or 0
        ids_BT = torch.full((len(sequences), longest), padding, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for row, sequence in enumerate(sequences):
            ids_BT[row, : len(sequence)] = torch.tensor(sequence)
            mask_BT[row, : len(sequence)] = 1
        with torch.inference_mode():
            logits_B1 = self._model(
                input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device)
            ).logits
        return [float(score) for score in logits_B1[:, 0].float().cpu()]


class RemoteRewardModel:
    """A reward model's actor, started and held; one that dies is started again.

    Args:
        path: Of the model; errors call it by this name.
        num_gpus: Of the actor.
    """

    def __init__(self, path: str, config: Config, num_gpus: float = 0) -> None:
        self.name = path
        self._config = config
        self._num_gpus = num_gpus
        self._actor: Any = None
        self._starting = asyncio.Lock()
        self._clock = StallClock(config.rollout.stall_timeout)
        self._restarts = 0
        """In a row: since the last score."""

    @classmethod
    async def start(cls, path: str, config: Config, *, num_gpus: float = 0) -> "RemoteRewardModel":
        """Start an actor and load the model in it.

        Raises:
            InputError: when it cannot be loaded, or is no reward model.
            DeadlineError: when it is not loaded after `engine.start_timeout` seconds.
        """
        remote = cls(path, config, num_gpus)
        await remote._start()
        return remote

    async def _start(self) -> None:
        config, num_gpus = self._config, self._num_gpus
        environment = {
            **logs.environment(config, f"reward-{Path(self.name).name}"),
            "OMP_NUM_THREADS": str(config.engine.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": _MAX_CALLS}
        actor = RewardModelActor.options(  # type: ignore[attr-defined]
            **options, runtime_env={"env_vars": environment}
        ).remote()
        try:
            await self._wait(
                actor.start.remote(self.name, config, num_gpus > 0),
                "start",
                config.engine.start_timeout,
            )
        except BaseException:
            ray.kill(actor)
            raise
        self._actor = actor

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's output for a conversation.

        Raises:
            TurnwiseError: when it cannot score this one, or the actor died with it twice, or
                died more than `serving.max_restarts` times in a row.
            DeadlineError: when it scored none at all for `rollout.stall_timeout` seconds.
        """
        actor = self._actor
        try:
            return await self._score(actor, messages)
        except TurnwiseError as error:
            if not is_death(error):
                raise
            await self._replace(actor, error)
        return await self._score(self._actor, messages)

    async def _score(self, actor: Any, messages: Sequence[Message]) -> float:
        reply = actor.score.remote(list(messages))
        try:
            async with self._clock.watching():  # there may be many before it
                score = float(await self._wait(reply, "score a trajectory", NO_DEADLINE))
        except TimeoutError:
            raise DeadlineError(
                f"the reward model {self.name} scored no trajectory in {self._clock.seconds:g} s "
                "(rollout.stall_timeout)"
            ) from None
        self._clock.moved()
        self._restarts = 0
        return score

    async def _replace(self, dead: Any, error: TurnwiseError) -> None:
        """Start another actor, unless somebody did; all who waited for the dead one come here."""
        async with self._starting:
            if self._actor is not dead:
                return
            if self._restarts >= self._config.serving.max_restarts:
                raise error
            self._restarts += 1
            started = asyncio.get_running_loop().time()
            await self._start()
            seconds = asyncio.get_running_loop().time() - started
            logger.warning("%s; it is back after %.1f s", error, seconds)

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _wait(self, reply: Awaitable[Any], what: str, seconds: float) -> Any:
        return await reply_of(reply, f"the reward model {self.name}", what, seconds)


@ray.remote
class RewardModelActor:
    """Hosts one `RewardModel`."""

    async def start(self, path: str, config: Config, gpu: bool) -> int:
        """Load the model; returns this process's id."""
        logs.follow()
        dtypes = {part.model: part.dtype for part in config.rollout.rewards}
        self._model = await asyncio.to_thread(
            lambda: RewardModel(
                path,
                # Of another batch's shape the last bits of a score depend.
                batch_tokens=0 if config.deterministic else config.training.micro_batch_tokens,
                gpu=gpu,
                trust_remote_code=config.model.trust_remote_code,
                dtype=dtypes.get(path, "auto"),
            )
        )
        return os.getpid()

    async def score(self, messages: list[Message]) -> float:
        return await self._model.score(messages)


async def start_reward_models(config: Config) -> dict[str, RemoteRewardModel]:
    """Start the models that `rollout.rewards` names, side by side.

    Returns them by their names, for `Rewards.models`; none is left running where one fails.

    Raises:
        InputError, DeadlineError: see `RemoteRewardModel.start`.
    """
    models = {part.model: part.gpus for part in config.rollout.rewards if part.model}
    started: dict[str, RemoteRewardModel] = {}

    async def start(path: str, gpus: float) -> None:
        started[path] = await RemoteRewardModel.start(path, config, num_gpus=gpus)

    try:
        async with task_group() as tasks:
            for path, gpus in models.items():
                tasks.create_task(start(path, gpus))
    except BaseException:
        for model in started.values():
            model.kill()
        raise
    return started


def batches(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Indices of neighbours whose padded batch stays within `max_tokens`; at least one each."""
    made: list[list[int]] = []
    longest = 0
    for index, sequence in enumerate(sequences):
        longest = max(longest, len(sequence))
        if made and longest * (len(made[-1]) + 1) <= max_tokens:
            made[-1].append(index)
        else:
            made.append([index])
            longest = len(sequence)
    return made


def _load(path: str, trust_remote_code: bool, dtype: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    where = f"rollout.rewards: the reward model {path}"
    options = {"trust_remote_code": trust_remote_code}
    try:
        labels = AutoConfig.from_pretrained(path, **options).num_labels
        model, told = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        folder = "" if Path(path).is_dir() else " (there is no such folder)"
        raise InputError(f"{where} cannot be loaded{folder}: {reason}") from error
    if labels != 1:
        raise InputError(f"{where} has {labels} outputs; a reward model has one")
    if told["missing_keys"]:
        missing = ", ".join(sorted(told["missing_keys"])[:3])
        raise InputError(f"{where} lacks weights: {missing}")
    if model.config.pad_token_id is None:
        own = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.eos_token_id if own is None else own
    return model, tokenizer


def _text(message: Message) -> str:
    parts = [str(message.get("content") or "")]
    parts += [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
    return "\n".join(filter(None, parts))
