"""Supervised training against TRL's SFTTrainer: the same rows, losses and steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.training.test_rank import train
from tests.training.test_supervised import read, solutions
from tests.trajectory.published import SOURCES
from turnwise.chat.template import load_template
from turnwise.config import Config
from turnwise.config.supervised import supervised_config
from turnwise.training.rank import TrainerRank
from turnwise.training.supervised import RowReader, supervised_samples

pytestmark = pytest.mark.slow
STEPS, RATE = 3, 1e-4


def marked(source: str) -> str:
    """The calculator's template with TRL's marks around what an assistant says, and no more."""
    begin, end = "{{- start + 'assistant\\n' + (message.content or '') }}", "        {{- end }}\n"
    assert source.count(begin) == 1
    before, after = source.split(begin)
    said, rest = after.split(end, 1)
    opening = "{{- start + 'assistant\\n' }}{%- generation %}{{- message.content or '' }}"
    closing = "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n"
    return before + opening + said + closing + rest


def trl_trainer(rows: list[dict[str, Any]], model: Path, tokenizer: Any, folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_length=None,
        assistant_only_loss=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=len(rows) // 4,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        gradient_checkpointing=False,
    )
    texts = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
    )


def test_losses_are_those_of_trls_trainer_on_the_same_rows(
    make_config: Callable[..., Config], build: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """All rows are one step, so that the order in which TRL shuffles them does not matter."""
    rows = solutions(16)
    training = {"learning_rate": RATE, "threads": 1, "micro_batch_tokens": 1024}
    config = supervised_config(make_config(training=training))
    reader = RowReader(
        config.model.max_length,
        load_template(config.model, config.sampling, config.engine, tokenizer),
    )
    policy, ours = TrainerRank(config), []
    samples = supervised_samples([read(reader, row) for row in rows], 0).samples
    for _ in range(STEPS):
        metrics = train(policy, samples)
        ours.append((metrics["loss"], metrics["grad_norm"], metrics["entropy"]))

    tokenizer.chat_template, own = marked(tokenizer.chat_template), tokenizer.chat_template
    try:
        trainer = trl_trainer(rows, build / "model", tokenizer, tmp_path)
        trainer.train()
    finally:
        tokenizer.chat_template = own
    for sample, row in zip(samples, trainer.train_dataset, strict=True):
        trained = [i for i, label in enumerate(row["labels"]) if label != -100]
        assert trained == sample.response_mask_T.nonzero()[0].tolist()
        assert row["input_ids"][: sample.length] == sample.token_ids_T.tolist()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    theirs = [(log["loss"], log["grad_norm"], log["entropy"]) for log in logs]
    assert len(theirs) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-5)
        assert mine[1:] == pytest.approx(other[1:], rel=1e-3)


def test_trls_template_also_trains_unsampled_line_breaks(
    make_config: Callable[..., Config], build: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Its marks of Qwen 2.5 take in the line breaks before and after each turn."""
    rows = solutions(4)
    model = {"path": str(build / "model"), "chat_template": SOURCES["qwen2_5"]}
    config = supervised_config(make_config(model=model))
    reader = RowReader(
        config.model.max_length,
        load_template(config.model, config.sampling, config.engine, tokenizer),
    )
    tokenizer.chat_template, own = SOURCES["qwen2_5_training"], tokenizer.chat_template
    try:
        trainer = trl_trainer(rows, build / "model", tokenizer, tmp_path)
    finally:
        tokenizer.chat_template = own
    for row, made in zip(trainer.train_dataset, rows, strict=True):
        trajectory = read(reader, made)
        labels = [label for label in row["labels"] if label != -100]
        said = [tokenizer.decode(turn.completion_token_ids) for turn in trajectory.turns]
        assert tokenizer.decode(labels) == "".join(f"\n{text}\n" for text in said)
