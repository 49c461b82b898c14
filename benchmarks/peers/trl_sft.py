"""TRL's SFTTrainer on given samples, in their order: the time of its optimizer steps.

It gets token ids and labels, so that nothing is left of its tokenisation but the padding.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.trl_training import COMMON, ROWS, Clock
from turnwise.training import Sample

_IGNORED = -100


class _Trainer(SFTTrainer):
    """A trainer that takes rows in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def train(
    model: Path,
    steps: Sequence[Sequence[Sample]],
    learning_rate: float,
    between: Callable[[int], None],
    most: int = ROWS,
) -> list[float]:
    """Train on the samples of each step; arguments and result as `trl_training.train`'s."""
    count, clock = len(steps[0]), Clock(between)
    rows = min(most, count)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            **COMMON,
            output_dir=folder,
            max_length=None,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=count // rows,
            learning_rate=learning_rate,
            max_steps=len(steps),
            logging_strategy="no",
        )
        trainer = _Trainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list([_row(s) for samples in steps for s in samples]),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[clock],
        )
        trainer.train()
    return clock.seconds


def _row(sample: Sample) -> dict[str, list[int]]:
    ids = sample.token_ids_T.tolist()
    mask = sample.response_mask_T.tolist()
    labels = [i if m else _IGNORED for i, m in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}
