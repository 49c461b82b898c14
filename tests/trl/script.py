"""A script as users of TRL write it; only the module that it imports is an argument.

    python script.py trl|turnwise.trl answers|texts|tools MODEL FOLDER [STEPS]

`answers` has reward functions only, one of them async; `texts` has prompts that are no chats;
`tools` has an environment with a tool. With STEPS, the run of the folder is continued.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset

from examples.calculator.problems import train_problems

module, kind, model, folder = *sys.argv[1:4], Path(sys.argv[4])
steps = int(sys.argv[5]) if sys.argv[5:] else None
trl = importlib.import_module(module)
CALLS: list[dict[str, Any]] = []
"""The form of each argument of each call of a reward function."""


def form(value: Any) -> Any:
    """Return types and keys: of a list, the different forms of its entries; of messages, roles."""
    if isinstance(value, dict):
        return {
            key: entry if key in ("role", "name") else form(entry)
            for key, entry in sorted(value.items())
        }
    if isinstance(value, list):
        forms = sorted({json.dumps(form(entry), sort_keys=True) for entry in value})
        return [json.loads(one) for one in forms]
    if callable(value):
        return "callable"
    return type(value).__name__ if isinstance(value, str | int | float) else "object"


def seen(name: str, arguments: dict[str, Any]) -> None:
    counts = {len(value) for value in arguments.values() if isinstance(value, list)}
    assert len(counts) == 1, counts
    state = arguments["trainer_state"]
    assert isinstance(state.global_step, int)
    assert isinstance(state.max_steps, int)
    CALLS.append({"name": name, "form": form(arguments)})


def length(prompts, completions, answer, log_metric, log_extra, **kwargs):  # type: ignore[no-untyped-def]
    """Reward every second answer for being short, and no other."""
    named = {"prompts": prompts, "completions": completions, "answer": answer}
    seen("length", {**named, "log_metric": log_metric, "log_extra": log_extra, **kwargs})
    texts = [completion[0]["content"] for completion in completions]
    log_metric("characters", sum(map(len, texts)) / len(texts) + 1)
    log_extra("characters", [len(text) for text in texts])
    return [None if index % 2 else 1 / (1 + len(text)) for index, text in enumerate(texts)]


async def slow_length(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
    """Reward answers of few tokens."""
    seen("slow_length", {"completion_ids": completion_ids, **kwargs})
    return [1 / (1 + len(ids)) for ids in completion_ids]


def near_20(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
    """Reward texts of about 20 characters."""
    seen("near_20", {"prompts": prompts, "completions": completions, **kwargs})
    return [-abs(20 - len(text)) for text in completions]


class Desk:
    """A calculator, which counts how often it is used."""

    def reset(self, answer: int, **row: Any) -> None:
        self.answer, self.used, self.found = answer, 0, False

    def calculate(self, a: int, operation: Literal["+", "-", "*"], b: int) -> int:
        """Calculates a + b, a - b or a * b.

        Args:
            a: The first number.
            operation: The operation.
            b: The second number.
        """
        self.used += 1
        result = {"+": a + b, "-": a - b, "*": a * b}[operation]
        self.found = self.found or result == self.answer
        return result

    def get_reward(self) -> float:
        return float(self.found)


def thrift(environments, **kwargs):  # type: ignore[no-untyped-def]
    """Reward few uses of the calculator."""
    seen("thrift", {"environments": environments, **kwargs})
    return [1 / (1 + environment.used) for environment in environments]


arguments: dict[str, Any] = {
    "output_dir": str(folder / "run"),
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 128 if kind == "tools" else 8,
    "learning_rate": 1e-4,
    "max_steps": steps or 2,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
}
others: dict[str, Any] = {"reward_funcs": [length, slow_length]}
if kind == "texts":
    others = {"reward_funcs": near_20}
if kind == "tools":
    others = {"reward_funcs": thrift, "environment_factory": Desk}
if module != "trl":
    arguments["turnwise"] = {"engine.kv_cache_gib": 0.0625, "model.max_length": 512}
elif kind == "tools":  # TRL does not know the format of this model's calls
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    others["processing_class"] = AutoTokenizer.from_pretrained(model)
    others["processing_class"].response_template = qwen3_template
rows = Dataset.from_list(
    [
        {
            "prompt": row["question"]
            if kind == "texts"
            else [{"role": "user", "content": row["question"]}],
            "answer": int(row["answer"]),
        }
        for row in train_problems(8, seed=0)
    ]
)
trainer = trl.GRPOTrainer(
    model=model,
    args=trl.GRPOConfig(**arguments),
    train_dataset=rows,
    eval_dataset=rows.select(range(2)),
    **others,
)
before = {name: value.clone() for name, value in trainer.model.named_parameters()}
output = trainer.train(resume_from_checkpoint=steps is not None)
trainer.save_model(str(folder / "saved"))
calls, evaluation, last = list(CALLS), {}, trainer.state.log_history[-1]
if kind == "tools":
    evaluation = trainer.evaluate()
    evaluation |= trainer.evaluate({of: rows.select([n]) for n, of in enumerate(("one", "two"))})
result = {
    "global_step": output.global_step,
    "log_history": [record for record in trainer.state.log_history if "reward" in record],
    "changed": sum(
        bool((trainer.model.get_parameter(name) != old).any()) for name, old in before.items()
    ),
    "parameters": len(before),
    "reward_func_names": trainer.reward_func_names,
    "last": last,
    "evaluation": evaluation,
    "calls": calls,
}
(folder / "seen.json").write_text(json.dumps(result, default=str))
