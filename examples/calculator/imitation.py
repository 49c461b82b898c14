"""A plain training loop, without other processes: a small model learns to imitate conversations.

The other examples make their initial models with it, from token ids with labels. The demo's initial
model learns from rows with `turnwise.sft` instead: see `warm_start`.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from .conversations import IGNORED, Example, encode, encode_copying
from .model import build_model
from .problems import demonstrations, number_rows
from .tokenizer import build_tokenizer


@dataclass(frozen=True)
class WarmStart:
    """Training settings; `WarmStart(updates=5)` makes a barely trained model within seconds."""

    updates: int = 800
    conversations: int = 32
    """Number of conversations in one update, and also of rows of numbers."""
    learning_rate: float = 4e-3
    """Peak, kept from the end of the warm-up to half of the training; then it falls to about 0."""
    warmup: int = 20
    copying: float = 0.5
    """Weight of repeating numbers in the loss; conversations weigh 1."""


def make_model(
    output: Path,
    seed: int,
    options: WarmStart,
    report: Callable[[int, float], None] = lambda update, loss: None,
) -> None:
    """Train a model from scratch and write it, with its tokenizer, to a folder.

    The same seed gives the same model on the same machine.

    Args:
        report: Called after each update with its number and the loss of its conversations.
    """
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer, seed)
    warm_start(model, tokenizer, seed, options, report)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    options: WarmStart,
    report: Callable[[int, float], None],
) -> None:
    """Train `model` in place."""
    batches = _batches(tokenizer, seed, options.conversations)
    copying = _copying_batches(tokenizer, seed, options.conversations)
    imitate(model, batches, options, report, lambda: options.copying * _loss(model, next(copying)))


def imitate(
    model: Qwen3ForCausalLM,
    batches: Iterator[list[Example]],
    options: WarmStart,
    report: Callable[[int, float], None],
    other_loss: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Train `model` in place on the assistant tokens of `options.updates` batches.

    Args:
        other_loss: Computes an additional term of each update's loss.
    """
    optimizers = _optimizers(model)
    model.train()
    for update in range(1, options.updates + 1):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * _rate(update, options)
        loss = _loss(model, next(batches))
        loss.backward()
        if other_loss is not None:
            other_loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report(update, loss.item())
    model.eval()


def _rate(update: int, options: WarmStart) -> float:
    """Return the factor of the learning rate at update `update` (from 1)."""
    left = (options.updates - update) / (options.updates / 2)
    return min(1.0, update / options.warmup, max(left, 0.02))


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, where it needs a third of AdamW's updates,
    and AdamW for the rest."""
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
    """Yield endless batches of conversations of similar length, without repetition."""
    rng = random.Random(seed)
    rows = demonstrations(seed)
    while True:
        examples = encode(tokenizer, list(itertools.islice(rows, size * pool)))
        examples.sort(key=lambda example: len(example.ids))
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
    """Return the mean cross-entropy of the assistant tokens."""
    length = max(len(example.ids) for example in examples)
    pad = model.config.pad_token_id
    ids_BT = torch.tensor([e.ids + [pad] * (length - len(e.ids)) for e in examples])
    labels_BT = torch.tensor([e.labels + [IGNORED] * (length - len(e.ids)) for e in examples])
    hidden_BTD = model.model(ids_BT, use_cache=False).last_hidden_state[:, :-1]
    trained_BT = labels_BT[:, 1:] != IGNORED
    logits = model.lm_head(hidden_BTD[trained_BT])
    return functional.cross_entropy(logits, labels_BT[:, 1:][trained_BT])
