"""TRL's GRPOTrainer on given samples, without generation: the time of its optimizer steps.

TRL's own loop runs (`trainer.train()`): batches, forward and backward pass, clipping, AdamW. Only
the method that would generate and reward completions returns the given samples instead. As in TRL,
prompts are padded on the left, completions on the right, and rows are shuffled.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from turnwise.training import Sample

ROWS = 32
"""Sequences of a forward pass, which hold about as many tokens as a micro-batch of Turnwise."""

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
"""Settings of all of TRL's trainers: the demo's optimizer, on CPUs."""
SETTINGS: dict[str, Any] = COMMON | {
    "beta": 0.0,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
}
"""Settings of TRL in every comparison: the demo's optimizer and loss, on CPUs."""


class _Trainer(GRPOTrainer):
    """A trainer whose completions are given."""

    given: Sequence[Sequence[Sample]]

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, torch.Tensor]:
        return _tensors(self.given[self.state.global_step])


class Clock(TrainerCallback):
    """Measures each optimizer step, without what is called between them."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self.seconds: list[float] = []
        self._between = between

    def on_step_begin(self, *arguments: Any, **keywords: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        self._between(len(self.seconds) - 1)


def train(
    model: Path,
    steps: Sequence[Sequence[Sample]],
    learning_rate: float,
    group: int,
    between: Callable[[int], None],
    most: int = ROWS,
) -> list[float]:
    """Train on the samples of each step; return the steps' seconds.

    Args:
        model: Folder of the model and its tokenizer.
        steps: Samples of each step, all as many.
        learning_rate: Learning rate, constant.
        group: Number of samples of a prompt.
        between: Called after each step with its number, from 0; its time does not count.
        most: Sequences of a forward pass.
    """
    count, clock = len(steps[0]), Clock(between)
    rows = min(most, count)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **SETTINGS,
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count // rows,
            num_generations=group,
            learning_rate=learning_rate,
            max_steps=len(steps),
            logging_strategy="no",
        )
        trainer = _Trainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=_no_reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "none"}] * count),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[clock],
        )
        trainer.given = steps
        trainer.train()
    return clock.seconds


def _no_reward(completions: list[str], **others: Any) -> list[float]:
    return [0.0] * len(completions)


def _tensors(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return samples as TRL's generation does, a row each."""
    begins = [int(np.argmax(sample.response_mask_T)) for sample in samples]
    prompt, rest = (
        max(begins),
        max(sample.length - begin for sample, begin in zip(samples, begins, strict=True)),
    )
    tensors = {
        name: torch.zeros(len(samples), width, dtype=torch.long)
        for name, width in (
            ("prompt_ids", prompt),
            ("prompt_mask", prompt),
            ("completion_ids", rest),
            ("completion_mask", rest),
            ("tool_mask", rest),
        )
    }
    for row, (sample, begin) in enumerate(zip(samples, begins, strict=True)):
        ids = torch.from_numpy(sample.token_ids_T)
        left, right = slice(prompt - begin, None), slice(0, sample.length - begin)
        tensors["prompt_ids"][row, left] = ids[:begin]
        tensors["prompt_mask"][row, left] = 1
        tensors["completion_ids"][row, right] = ids[begin:]
        tensors["completion_mask"][row, right] = 1
        tensors["tool_mask"][row, right] = torch.from_numpy(sample.response_mask_T[begin:]).long()
    tensors["num_items_in_batch"] = tensors["tool_mask"].sum()
    tensors["advantages"] = torch.tensor([sample.advantage for sample in samples])
    return tensors
