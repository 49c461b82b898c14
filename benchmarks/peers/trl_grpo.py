"""TRL's GRPOTrainer on the demo's model, tool and problems; its last line is JSON.

    python -m benchmarks.peers.trl_grpo --model FOLDER --problems FILE --prompts P --steps N \\
        [--long-tailed-steps M] [--rank R] [--tokens T] [--parity] [--micro-batch N]

Problems are used in the file's order. The tool answers at once in the first N steps, and with a
long tail in the following M. Each step prints its seconds and mean reward; the last line has the
seconds of all, mean rewards by question, the trained parameters and the peak memory. With --rank a
LoRA of that rank is trained by PEFT; --tokens limits a rollout; --parity rewards by
`benchmarks.lora:parity`.

Generation is Transformers' own, since TRL's vLLM mode needs a GPU.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.grpo_step import (
    GROUP,
    LEARNING_RATE,
    MAX_TURNS,
    SEQUENCE,
)
from benchmarks.lora import parity
from benchmarks.models import pause
from benchmarks.peers.trl_training import SETTINGS
from examples.calculator.environment import _ANSWER
from examples.calculator.tool import calculate as calculate_at_once

os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Clock(TrainerCallback):
    """Records the seconds of each step, and prints them with its mean reward."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        self._last = time.perf_counter()
        print("training", flush=True)

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        print("step", self.seconds[-1], statistics.mean(LATEST or [0.0]), flush=True)
        LATEST.clear()


REWARDS = defaultdict[str, list[float]](list)
"""Rewards by question."""
LATEST: list[float] = []
"""Rewards since the last step's end."""


def right(
    prompts: list[Any], completions: list[Any], answer: list[int], **others: Any
) -> list[float]:
    """Return the demo's reward of each completion."""
    rewards = []
    for prompt, messages, number in zip(prompts, completions, answer, strict=True):
        last = messages[-1]
        text = (last.get("content") or "") if last["role"] == "assistant" else ""
        stated = _ANSWER.findall(text)
        rewards.append(float(len(stated) == 1 and int(stated[0]) == number))
        REWARDS[prompt[0]["content"]].append(rewards[-1])
    LATEST.extend(rewards)
    return rewards


def odd_or_even(prompts: list[Any], completions: list[Any], **others: Any) -> list[float]:
    """Return a reward that has nothing to do with the problem."""
    return [parity(messages[-1].get("content") or "") for messages in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="of a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--long-tailed-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=SEQUENCE)
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--micro-batch", type=int, help="rows of a forward pass; default: all")
    options = parser.parse_args()
    torch.set_num_threads(2)
    steps, clock = options.steps + options.long_tailed_steps, Clock()

    def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
        """Calculates a + b, a - b or a * b.

        Args:
            a: The first number.
            operation: The operation.
            b: The second number.
        """
        tools = "instant" if len(clock.seconds) < options.steps else "long-tailed"
        time.sleep(pause(tools))
        return calculate_at_once(a, operation, b)

    rows = [json.loads(line) for line in options.problems.open()]
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "answer": int(row["answer"]),
            }
            for row in rows
        ]
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.response_template = qwen3_template
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows_at_once = options.micro_batch or options.prompts * GROUP
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            **SETTINGS,
            output_dir=folder,
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=options.prompts * GROUP // rows_at_once,
            num_generations=GROUP,
            max_completion_length=options.tokens,
            max_tool_calling_iterations=MAX_TURNS - 1,
            temperature=1.0,
            learning_rate=LEARNING_RATE,
            max_steps=steps,
            logging_steps=1,
            shuffle_dataset=False,
            seed=options.seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=odd_or_even if options.parity else right,
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            tools=[calculate],
            callbacks=[clock],
            peft_config=_adapters(options.rank) if options.rank else None,
        )
        trainer.train()
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rewards = {question: statistics.mean(each) for question, each in REWARDS.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    more = {"trained": trained, "memory_gib": peak}
    print(json.dumps({"seconds": clock.seconds, "rewards": rewards, **more}))


def _adapters(rank: int) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


if __name__ == "__main__":
    main()
