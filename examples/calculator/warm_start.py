"""Warm start: supervised training that stops while there is still much to learn.

It ends at the first check in which an attempt sampled at temperature 1 would solve at least
`goal` of the validation problems. That expectation is the mean probability of the perfect
conversation, computed in one pass: nothing is sampled, and other right solutions do not count.
Checks depend on the number of updates and never on the clock, so the same seed gives the same
model.

Beside the solved problems it learns to repeat rows of numbers. A model that copies digits
surely is left with what reinforcement learning teaches well: which number goes where.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from .conversations import IGNORED, Example, encode, encode_copying
from .problems import number_rows, validation_problems, warm_start_problems


@dataclass(frozen=True)
class WarmStart:
    """How to train and when to stop."""

    goal: float = 0.28
    slow_from: float = 0.05
    """The accuracy from which the learning rate is lowered, so that the model that is left
    knows what it knows surely: sampled at temperature 1 it then does nearly as well as greedily."""
    slow_factor: float = 0.25
    updates: int = 2000
    conversations: int = 32
    learning_rate: float = 4e-3
    warmup: int = 20
    check_every: int = 3
    validation: int = 200
    copying: float = 0.5
    """The weight of repeating numbers in the loss, beside 1 for solving problems."""


@dataclass(frozen=True)
class Progress:
    """The state of training at one check."""

    updates: int
    loss: float
    accuracy: float
    seconds: float


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    options: WarmStart,
    report: Callable[[Progress], None],
) -> Progress:
    """Trains `model` in place and returns the last check, which `report` saw too."""
    began = time.monotonic()
    optimizers = _optimizers(model)
    accuracy = 0.0
    validation = encode(tokenizer, validation_problems(options.validation, seed))
    batches = _batches(tokenizer, seed, options.conversations)
    copying = _copying_batches(tokenizer, seed, options.conversations)
    model.train()
    for update in itertools.count(1):
        rate = options.learning_rate * min(1.0, update / options.warmup)
        if accuracy >= options.slow_from:
            rate *= options.slow_factor
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = _loss(model, next(batches))
        loss.backward()
        (options.copying * _loss(model, next(copying))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if update % options.check_every == 0 or update == options.updates:
            accuracy = expected_accuracy(model, validation)
            progress = Progress(update, loss.item(), accuracy, time.monotonic() - began)
            report(progress)
            if accuracy >= options.goal or update == options.updates:
                model.eval()
                return progress
    raise AssertionError("unreachable")


@torch.inference_mode()
def expected_accuracy(model: Qwen3ForCausalLM, examples: list[Example]) -> float:
    """The mean probability, from 0 to 1, of a conversation's assistant tokens taken together."""
    total = 0.0
    for start in range(0, len(examples), 100):
        batch = examples[start : start + 100]
        logits, targets, owners = _assistant_logits(model, batch)
        logprobs = -functional.cross_entropy(logits, targets, reduction="none")
        total += torch.zeros(len(batch)).index_add(0, owners, logprobs).exp().sum().item()
    return total / len(examples)


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (a third of AdamW's updates), AdamW for the rest."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    matrices = {id(parameter) for parameter in inner}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in matrices]
    return [
        torch.optim.Muon(inner, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def _batches(
    tokenizer: PreTrainedTokenizerBase, seed: int, size: int, pool: int = 16
) -> Iterator[list[Example]]:
    """Endless batches of conversations of like length, never the same one twice."""
    rng = random.Random(seed)
    problems = warm_start_problems(seed)
    while True:
        rows = list(itertools.islice(problems, size * pool))
        examples = sorted(encode(tokenizer, rows), key=lambda example: len(example.ids))
        batches = [examples[i : i + size] for i in range(0, len(examples), size)]
        rng.shuffle(batches)
        yield from batches


def _copying_batches(
    tokenizer: PreTrainedTokenizerBase, seed: int, size: int
) -> Iterator[list[Example]]:
    rows = number_rows(seed)
    while True:
        yield encode_copying(tokenizer, list(itertools.islice(rows, size)))


def _loss(model: Qwen3ForCausalLM, examples: list[Example]) -> torch.Tensor:
    logits, targets, _ = _assistant_logits(model, examples)
    return functional.cross_entropy(logits, targets)


def _assistant_logits(
    model: Qwen3ForCausalLM, examples: list[Example]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [N, V], targets [N] and owning example [N] of the N assistant tokens."""
    length = max(len(example.ids) for example in examples)
    pad = model.config.pad_token_id
    ids_BT = torch.tensor([e.ids + [pad] * (length - len(e.ids)) for e in examples])
    labels_BT = torch.tensor([e.labels + [IGNORED] * (length - len(e.ids)) for e in examples])
    hidden_BTD = model.model(ids_BT, use_cache=False).last_hidden_state[:, :-1]
    trained_BT = labels_BT[:, 1:] != IGNORED
    logits = model.lm_head(hidden_BTD[trained_BT])
    return logits, labels_BT[:, 1:][trained_BT], trained_BT.nonzero()[:, 0]
