"""A reward model: a sequence classifier with one output, in its own Ray actor.

The reward model reads a trajectory's messages as text. The chat template of the reward model's own
tokenizer renders the text; if it has no template, the messages are joined line by line. If a
trajectory is a plain text and not a chat, the reward model reads this text without a template.
Calls that wait at the same time are scored in one batch. The model does not depend on the policy or
the policy's tokens.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import NO_DEADLINE, Config, RewardConfig
from turnwise.core import logs
from turnwise.core.actor import ActorHandle, is_death, killed_on_failure
from turnwise.core.aio import run_in_thread
from turnwise.core.deadlines import StallClock
from turnwise.errors import InputError, TurnwiseError, first_line
from turnwise.trajectory import Message
from turnwise.trajectory.images import images_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAX_CALLS = 4096
_NO_LIMIT = 10**9
_BATCH_TOKENS = 16_384  # tokens of a forward pass if training.micro_batch_tokens is null


class RewardModel:
    """The model in its actor; one coroutine scores the queue, batch after batch."""

    def __init__(self) -> None:
        logs.redirect_output()
        self._queue: asyncio.Queue[tuple[list[int], asyncio.Future[float]]] = asyncio.Queue()
        self._scoring: asyncio.Task[None] | None = None

    def load(
        self,
        path: str,
        batch_tokens: int,
        gpu: bool,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        tokenizer_path: str | None = None,
    ) -> None:
        """Load the model from a folder, or by its name on the Hub. `batch_tokens` is the maximum
        number of tokens in a forward pass, including padding; a sequence with more tokens is scored
        alone."""
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        where = f"rollout.rewards: the reward model {path}"
        options = {"trust_remote_code": trust_remote_code}
        try:
            labels = AutoConfig.from_pretrained(path, **options).num_labels
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or path, **options)
        except Exception as error:
            folder = "" if Path(path).is_dir() else " (there is no such folder)"
            raise InputError(f"{where} cannot be loaded{folder}: {first_line(error)}") from error
        if labels != 1:
            raise InputError(f"{where} has {labels} outputs; a reward model must have one")
        if loaded["missing_keys"]:
            missing = ", ".join(sorted(loaded["missing_keys"])[:3])
            raise InputError(f"{where} lacks weights: {missing}")
        if model.config.pad_token_id is None:
            own = tokenizer.pad_token_id
            model.config.pad_token_id = tokenizer.eos_token_id if own is None else own
        self._batch_tokens = batch_tokens
        self._device = torch.device("cuda" if gpu else "cpu")
        self._model: PreTrainedModel = model.to(self._device).eval()
        self._tokenizer: PreTrainedTokenizerBase = tokenizer
        self._max_length = min(
            getattr(model.config, "max_position_embeddings", None) or _NO_LIMIT,
            tokenizer.model_max_length or _NO_LIMIT,
        )

    async def score(self, messages: Sequence[Message] | str) -> float:
        if not messages:
            raise TurnwiseError("the trajectory has no messages to read")
        if not isinstance(messages, str) and images_in(messages):
            raise TurnwiseError("the trajectory has images, and a reward model reads text alone")
        if isinstance(messages, str):
            token_ids = list(self._tokenizer.encode(messages, add_special_tokens=False))
        elif getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
            token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        else:
            texts = list[str]()
            for message in messages:
                parts = [str(message.get("content") or "")]
                parts += [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
                texts.append("\n".join(filter(None, parts)))
            token_ids = list(self._tokenizer.encode("\n".join(texts)))
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

    async def _score_queued(self) -> None:
        while True:
            waiting = [await self._queue.get()]
            while not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            waiting.sort(key=lambda item: len(item[0]))
            for batch in batches([ids for ids, _ in waiting], self._batch_tokens):
                sequences = [waiting[index][0] for index in batch]
                futures = [waiting[index][1] for index in batch]
                try:
                    scores = await run_in_thread(self._forward, sequences)
                except Exception as error:  # such as out of memory: fail only this batch
                    for future in futures:
                        if not future.done():
                            future.set_exception(TurnwiseError(f"{type(error).__name__}: {error}"))
                    continue
                for future, score in zip(futures, scores, strict=True):
                    if not future.done():
                        future.set_result(score)

    def _forward(self, sequences: Sequence[list[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
        padding = self._model.config.pad_token_id or 0
        ids_BT = pad_sequence(rows, batch_first=True, padding_value=padding)
        mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        with torch.inference_mode():
            logits_B1 = self._model(
                input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device)
            ).logits
        return [float(score) for score in logits_B1[:, 0].float().cpu()]


class RemoteRewardModel:
    """Handle of a reward model's actor, which is restarted if it dies."""

    def __init__(self, path: str, config: Config, num_gpus: float = 0) -> None:
        self.name = path
        self._config = config
        self._num_gpus = num_gpus
        self._actor: ActorHandle  # set by `start`
        self._starting = asyncio.Lock()
        self._clock = StallClock(config.rollout.stall_timeout)
        self._restarts = 0  # number of restarts since the last score

    async def start(self) -> None:
        """Start an actor and load the model in it, within `engine.start_timeout`."""
        config = self._config
        actor = ActorHandle.create(
            RewardModel,
            name=f"the reward model {self.name}",
            config=config,
            log=f"reward-{Path(self.name).name}",
            threads=config.engine.threads,
            num_gpus=self._num_gpus,
            max_concurrency=_MAX_CALLS,
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
        )
        of_models = {part.model: part for part in config.rollout.rewards}
        part = of_models.get(self.name, RewardConfig())
        with killed_on_failure(actor):
            # A batch's shape changes the last bits of a score, so deterministic runs set a limit of
            # 0, which means that each sequence is scored alone.
            tokens = config.training.micro_batch_tokens or _BATCH_TOKENS
            await actor.call(
                *("load", self.name, 0 if config.deterministic else tokens, self._num_gpus > 0),
                *(config.model.trust_remote_code, part.dtype, part.tokenizer),
                what="start",
                seconds=config.engine.start_timeout,
            )
        self._actor = actor

    async def score(self, messages: Sequence[Message] | str) -> float:
        """Return the model's output for a conversation, or for a text. Raise an error if the actor
        dies twice during the call, or more than `serving.max_restarts` times without a score in
        between, or if it scores nothing within `rollout.stall_timeout`."""
        actor = self._actor
        try:
            return await self._score(actor, messages)
        except TurnwiseError as error:
            if not is_death(error):
                raise
            async with self._starting:
                if self._actor is actor:  # no other caller has replaced it
                    if self._restarts >= self._config.serving.max_restarts:
                        raise
                    self._restarts += 1
                    started = time.monotonic()
                    await self.start()
                    seconds = time.monotonic() - started
                    logger.warning("%s; it is back after %.1f s", error, seconds)
        return await self._score(self._actor, messages)

    async def _score(self, actor: ActorHandle, messages: Sequence[Message] | str) -> float:
        missed = f"{actor.name} scored no trajectory"
        async with self._clock.watching(missed, "rollout.stall_timeout"):  # any score counts
            what = "score a trajectory"
            read = messages if isinstance(messages, str) else list(messages)
            score = await actor.call("score", read, what=what, seconds=NO_DEADLINE)
        self._clock.moved()
        self._restarts = 0
        return float(score)

    def kill(self) -> None:
        self._actor.kill()


def batches(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Split sequences, in order, into batches of at most `max_tokens` tokens, including padding;
    return the indices of each batch's sequences."""
    split: list[list[int]] = []
    longest = 0
    for index, sequence in enumerate(sequences):
        longest = max(longest, len(sequence))
        if split and longest * (len(split[-1]) + 1) <= max_tokens:
            split[-1].append(index)
        else:
            split.append([index])
            longest = len(sequence)
    return split
