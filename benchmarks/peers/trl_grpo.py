"""TRL's GRPOTrainer on the demo's model, tool and problems; its last line is JSON.

    python -m benchmarks.peers.trl_grpo --model FOLDER --problems FILE --prompts P --steps N \\
        [--long-tailed-steps M] [--turns T] [--turn-tokens K] [--tokens K] [--learning-rate L]
        [--sums] [--rank R] [--parity] [--micro-batch N]

Problems are used in the file's order. The tool answers at once in the first N steps, and with a
long tail in the following M. Each step prints its seconds and mean reward; the last line has the
seconds of all, mean rewards by question, the mean tokens of a rollout after its prompt, the trained
parameters and the peak memory. With --sums the problems, tool, prompts and rewards are those of
`examples.smollm2`. With --rank a LoRA of that rank is trained by PEFT; --turns, --turn-tokens and
--tokens limit a rollout; --parity rewards by `benchmarks.lora:parity`.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.grpo_step import (
    GROUP,
    LEARNING_RATE,
    MAX_TOKENS,
    MAX_TURNS,
    SEQUENCE,
)
from benchmarks.lora import parity
from benchmarks.models import pause
from benchmarks.peers.trl_training import SETTINGS
from examples.calculator.environment import _ANSWER
from examples.calculator.tool import calculate as calculate_at_once
from turnwise.chat.template import read_tokenizer
from turnwise.config import ModelConfig

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


@dataclass
class Task:
    """Rows of a data set, with a `question` each; what answers a tool's call; the score of a
    question's last message, and the chat template, None for the tokenizer's own."""

    rows: list[dict[str, Any]]
    tool: Callable[..., int]
    score: Callable[[str, str], float]
    template: str | None = None


REWARDS = defaultdict[str, list[float]](list)
"""Rewards by question."""
LATEST: list[float] = []
"""Rewards since the last step's end."""
LENGTHS: list[int] = []
"""Tokens of each rollout after its prompt."""


def reward_by(score: Callable[[str, str], float]) -> Callable[..., list[float]]:
    """Return TRL's function of the scores of completions' last messages, which notes them."""

    def reward(
        completions: list[Any], completion_ids: list[list[int]], question: list[str], **_: Any
    ) -> list[float]:
        rewards = []
        for asked, messages in zip(question, completions, strict=True):
            last = messages[-1]
            text = (last.get("content") or "") if last["role"] == "assistant" else ""
            rewards.append(score(asked, text))
            REWARDS[asked].append(rewards[-1])
        LATEST.extend(rewards)
        LENGTHS.extend(map(len, completion_ids))
        return rewards

    return reward


def demo(problems: list[dict[str, Any]], tools: Callable[[], str]) -> Task:
    """Return the demo's task, with a tool of the kind that `tools` says at the time of a call."""
    answers = {row["question"]: int(row["answer"]) for row in problems}

    def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
        """Calculates a + b, a - b or a * b.

        Args:
            a: The first number.
            operation: The operation.
            b: The second number.
        """
        time.sleep(pause(tools()))
        return calculate_at_once(a, operation, b)

    def right(question: str, text: str) -> float:
        stated = _ANSWER.findall(text)
        return float(len(stated) == 1 and int(stated[0]) == answers[question])

    rows = [
        {"prompt": [{"role": "user", "content": question}], "question": question}
        for question in answers
    ]
    return Task(rows, calculate, right)


def sums(problems: list[dict[str, Any]]) -> Task:
    """Return the task of `examples.smollm2`."""
    from examples.smollm2.environment import Sums, calculate  # with reasoning-gym

    made = {row["question"]: Sums(row) for row in problems}
    rows = [{"prompt": each.problem, "question": asked} for asked, each in made.items()]
    return Task(rows, calculate, lambda asked, text: made[asked].score(text), "hermes")


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="of a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--long-tailed-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--turns", type=int, default=MAX_TURNS)
    parser.add_argument("--turn-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--tokens", type=int, default=SEQUENCE)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--micro-batch", type=int, help="rows of a forward pass; default: all")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    torch.set_num_threads(2)
    steps, clock = options.steps + options.long_tailed_steps, Clock()

    def tools_now() -> str:
        return "instant" if len(clock.seconds) < options.steps else "long-tailed"

    problems = [json.loads(line) for line in options.problems.open()]
    task = sums(problems) if options.sums else demo(problems, tools_now)
    # A parity has nothing to do with the problem.
    score = (lambda asked, text: parity(text)) if options.parity else task.score
    tokenizer = read_tokenizer(ModelConfig(path=str(options.model), chat_template=task.template))
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
            generation_kwargs={"max_new_tokens": options.turn_tokens},
            max_tool_calling_iterations=options.turns - 1,
            temperature=1.0,
            learning_rate=options.learning_rate,
            max_steps=steps,
            logging_steps=1,
            shuffle_dataset=False,
            seed=options.seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_by(score),
            args=config,
            train_dataset=Dataset.from_list(task.rows),
            processing_class=tokenizer,
            tools=[task.tool],
            callbacks=[clock],
            peft_config=_adapters(options.rank) if options.rank else None,
        )
        trainer.train()
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rewards = {question: statistics.mean(each) for question, each in REWARDS.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    more = {"trained": trained, "memory_gib": peak}
    result = {"seconds": clock.seconds, "rewards": rewards, "tokens": statistics.mean(LENGTHS)}
    print(json.dumps({**result, **more}))


def _adapters(rank: int) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


if __name__ == "__main__":
    main()
