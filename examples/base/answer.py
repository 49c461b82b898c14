"""An exported model answers in a program that knows nothing of Turnwise.

python -m examples.base.answer transformers|vllm FOLDER ROWS.jsonl
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from .stories import calculate

_TURN_END = "<eos>"
_CALL = re.compile(r'\[calculate\(expression="([-+ \d]+)"\)\]')
_ROWS = 8
_MAX_TOKENS = 48
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Continues prompts greedily to the end of the turn."""


def main(program: str, folder: str, rows: str) -> None:
    """Print the first conversation, and how many of the first rows are solved."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(_TURN_END)
    generate = (with_vllm if program == "vllm" else with_transformers)(folder, end)
    problems = [json.loads(line) for line in Path(rows).read_text().splitlines()[:_ROWS]]
    talks: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": row["question"]}] for row in problems
    ]
    for _ in range(2):
        prompts = [
            tokenizer.apply_chat_template(
                talk, tools=[calculate], add_generation_prompt=True, return_dict=False
            )
            for talk in talks
        ]
        for talk, ids in zip(talks, generate(prompts), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True).strip()
            talk.append({"role": "assistant", "content": text})
            if call := _CALL.fullmatch(text):
                talk.append({"role": "tool", "content": str(calculate(call[1]))})
    print("\n".join(f"{message['role']:>12}  {message['content']}" for message in talks[0]))
    right = sum(t[-1]["content"] == row["answer"] for t, row in zip(talks, problems, strict=True))
    print(f"{right} of {len(problems)} held-out stories are right")


def with_transformers(folder: str, end: int) -> Generate:
    """Load the model in Transformers."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(folder)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        found = []
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=_MAX_TOKENS,
                eos_token_id=end,
                do_sample=False,
            )
            found.append(ids[0, len(prompt) :].tolist())
        return found

    return generate


def with_vllm(folder: str, end: int) -> Generate:
    """Load the model in vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(folder, dtype="float32", max_model_len=512, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, stop_token_ids=[end])

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        results = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return [list(each.outputs[0].token_ids) for each in results]

    return generate


if __name__ == "__main__":
    main(*sys.argv[1:])
