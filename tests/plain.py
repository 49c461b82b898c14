"""Does a checkpoint give a run's greedy answers in plain Transformers and in plain vLLM?

    python -m tests.plain runs/NAME

Takes the run's last checkpoint and its last evaluation, replays each turn's prompt greedily in
both, without turnwise, and prints the number of turns that are the same, token for token.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from turnwise.trajectory import read_jsonl

Turn = tuple[list[int], list[int]]


def recorded_turns(run: Path) -> list[Turn]:
    """Return prompt and completion of every turn of the last evaluation."""
    turns: list[Turn] = []
    for trajectory in read_jsonl(max((run / "trajectories").glob("eval-*.jsonl"))):
        turns += [
            (trajectory.prompt_token_ids(index), turn.completion_token_ids)
            for index, turn in enumerate(trajectory.turns)
        ]
    return turns


def last_checkpoint(run: Path) -> str:
    return str(max((run / "checkpoints").iterdir()))


def same_in_transformers(checkpoint: str, turns: list[Turn]) -> int:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    same = 0
    with torch.inference_mode():
        for prompt, completion in turns:
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=len(completion),
                do_sample=False,
            )
            same += made[0, len(prompt) :].tolist() == completion
    return same


def same_in_vllm(checkpoint: str, turns: list[Turn]) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    llm = LLM(
        checkpoint,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        # In this process: each further one would import vLLM again.
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        kv_cache_memory_bytes=2**28,
    )
    outputs = llm.generate(
        [tokens_input(prompt) for prompt, _ in turns],
        [SamplingParams(temperature=0, max_tokens=len(done)) for _, done in turns],
        use_tqdm=False,
    )
    return sum(
        list(output.outputs[0].token_ids) == completion
        for output, (_, completion) in zip(outputs, turns, strict=True)
    )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    folder = Path(sys.argv[1])
    checkpoint, turns = last_checkpoint(folder), recorded_turns(folder)
    in_transformers = same_in_transformers(checkpoint, turns)
    in_vllm = same_in_vllm(checkpoint, turns)
    sys.stdout.write(
        f"{checkpoint}: of {len(turns)} greedy turns the same in "
        f"Transformers: {in_transformers}, vLLM: {in_vllm}\n"
    )
