"""A script as users of TRL write it; only the module that it imports is an argument.

python script.py trl|turnwise.trl MODEL FOLDER
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

module, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
trl = importlib.import_module(module)
CALLS: list[dict[str, Any]] = []
"""The type of each argument of each call."""


def shape(value: Any) -> Any:
    """Return the form of an argument: types, keys of dictionaries, the form of a list's entries."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in sorted(value.items())}
    if isinstance(value, list):
        forms = sorted({json.dumps(shape(entry), sort_keys=True) for entry in value})
        return [json.loads(form) for form in forms]
    if callable(value):
        return "callable"
    return type(value).__name__ if isinstance(value, str | int | float) else "object"


def seen(kind: str, arguments: dict[str, Any]) -> None:
    counts = {len(value) for value in arguments.values() if isinstance(value, list)}
    assert len(counts) == 1, counts  # all of one length
    assert isinstance(arguments["trainer_state"].global_step, int)
    assert isinstance(arguments["trainer_state"].max_steps, int)
    CALLS.append({"kind": kind, "shape": shape(arguments)})


def length(prompts, completions, answer, log_metric, log_extra, **kwargs):  # type: ignore[no-untyped-def]
    """Reward short answers of odd rows, and nothing else."""
    named = {"prompts": prompts, "completions": completions, "answer": answer}
    seen("length", {**named, "log_metric": log_metric, "log_extra": log_extra, **kwargs})
    texts = [completion[0]["content"] for completion in completions]
    log_metric("characters", sum(map(len, texts)) / len(texts) + 1)
    log_extra("characters", [len(text) for text in texts])
    return [
        1 / (1 + len(text)) if number % 2 else None
        for text, number in zip(texts, answer, strict=True)
    ]


async def slow_length(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    """Reward answers of few tokens."""
    seen("slow_length", {"completion_ids": completion_ids, **kwargs})
    return [1 / (1 + len(ids)) for ids in completion_ids]


rows = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": f"What is {n} plus {n}?"}], "answer": n}
        for n in range(8)
    ]
)
arguments: dict[str, Any] = {
    "output_dir": str(folder / "run"),
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-4,
    "max_steps": 2,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
}
if module != "trl":
    arguments["turnwise"] = {"engine.kv_cache_gib": 0.0625, "model.max_length": 256}
trainer = trl.GRPOTrainer(
    model=model,
    reward_funcs=[length, slow_length],
    args=trl.GRPOConfig(**arguments),
    train_dataset=rows,
    eval_dataset=rows.select(range(2)),
)
output = trainer.train()
trainer.save_model(str(folder / "saved"))
calls, evaluation = list(CALLS), trainer.evaluate() if module != "trl" else {}
result = {
    "global_step": output.global_step,
    "log_history": [record for record in trainer.state.log_history if "reward" in record],
    "evaluation": evaluation,
    "calls": calls,
}
(folder / "seen.json").write_text(json.dumps(result, default=str))
