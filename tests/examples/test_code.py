"""The code example: its evaluator, and code in the middle of an answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.code.evaluator import CodeError, evaluate
from tests.plain_scoring import token_logprobs
from turnwise.config import Config, SamplingConfig, load_config
from turnwise.rollouts import Problem, Runner
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, audit

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("48 + 48 // 2", "72"),
        ("total = 0\nfor n in range(1, 251):\n    total += n\nprint(total)", "31375"),
        (
            "n = 0\nfor i in range(1, 101):\n  if i % 3 == 0 and i % 5:\n    n += 1\nn",
            "27",
        ),
        ("x = [3, 1, 2]\nprint(sorted(x)[0], max(x), len(x))\n'done'", "1 3 3\ndone"),
        ("a = 10\nwhile a > 3:\n    a = a - 4\nprint(a if a else 'none')", "2"),
        ("1 < 2 < 3", "True"),
        ("round(2 ** 0.5, 3)", "1.414"),
        ("", ""),
    ],
)
def test_arithmetic_runs(code: str, printed: str) -> None:
    assert evaluate(code) == printed


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os", "line 1 is not understood"),
        ("().__class__", "not understood"),
        ("__import__('os')", "there is no function '__import__'"),
        ("print.__self__", "not understood"),
        ("(lambda: 1)()", "not understood"),
        ("def f(): pass", "line 1 is not understood"),
        ("open('/etc/passwd')", "there is no function 'open'"),
        ("x", "there is no name 'x'"),
        ("1 / 0", "ZeroDivisionError"),
        ("while True:\n    pass", "more than 20000 steps"),
        ("9 ** 9 ** 9", "too large"),
        ("x = 2\nfor i in range(99):\n    x = x * x", "too large"),
        ("'a' * 10 ** 9", "cannot be multiplied"),
        ("'%999999999d' % 3", "cannot be multiplied or formatted"),
        ("x = 'a'\nfor i in range(99):\n    x += x", "longer than 1000"),
        ("x = [1]\nfor i in range(99):\n    x = [x, x]", "numbers and texts only"),
        ("sum(range(10 ** 30))", "OverflowError"),
        ("sum(range(10 ** 6))", "more than 10000 numbers"),
        ("(" * 300 + ")" * 300, "cannot be read"),
        ("-" * 5000 + "1", "nested too deeply|cannot be read"),
        ("if", "cannot be read"),
        ("x: int = 3", "line 1 is not understood"),
        ("f'{1}'", "not understood"),
    ],
)
def test_what_is_not_arithmetic_is_refused(code: str, why: str) -> None:
    with pytest.raises(CodeError, match=why):
        evaluate(code)


async def test_code_is_run_inside_the_answer(
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
    model_path: str,
) -> None:
    """A result is spliced into the turn, masked, in one branch, and what is sampled after it has
    the log-probs that Transformers gives for these very ids. Its tags are those of
    `rollout.result_format`."""
    example = load_config(EXAMPLE / "config.yaml")
    config = make_config(
        environment=example.environment,
        rollout=example.rollout.model_dump(),
        model={"path": model_path, "max_length": 1024},
        engine={},
    )
    said = [
        "I add.\n<code>\n```python\nx = 17 * 23\nprint(x - 46)\n```\n</code>",
        " Again: <code>x</code>",
    ]
    turns = [template.encode(text) for text in said]
    sampling = SamplingConfig(
        n=1, max_tokens=80, ignore_eos=True, logits_processor_args={"script": turns}
    )
    row = {"question": "How many?", "answer": 345}
    group = await Runner(config, tokenizer).run_group(
        engine, Problem("code:1", row), sampling, "c39"
    )
    assert group.dropped == {}
    (trajectory,) = group.trajectories
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"]
    first, second, *free = trajectory.turns
    assert [first.completion_token_ids, second.completion_token_ids] == turns
    results = [template.decode(turn.added_token_ids) for turn in (second, free[0])]
    assert results[0] == "\n<interpreter>\n345\n</interpreter>\n"
    assert results[1].startswith("\n<interpreter>\nError: run failed: CodeError: there is no name")
    assert trajectory.final_text.startswith("".join([said[0], results[0], said[1], results[1]]))
    assert trajectory.events["tool_call"] == 2
    assert trajectory.reward == 0.0
    assert audit(trajectory).first_violation is None
    (branch,) = trajectory.branches()
    sampled = [token for turn in trajectory.turns for token in turn.completion_token_ids]
    pairs = list(zip(branch.token_ids, branch.response_mask, strict=True))
    assert [token for token, mask in pairs if mask] == sampled
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    own = sum(len(turn.completion_token_ids) for turn in free)
    assert own >= 80
    mask = [*[0] * (len(branch.token_ids) - own), *[1] * own]
    assert mask == [*[0] * (len(mask) - own), *branch.response_mask[-own:]]
    with torch.no_grad():
        expected = token_logprobs(
            model, torch.tensor([branch.token_ids]), torch.tensor([mask]).bool(), SamplingConfig()
        )
    assert branch.logprobs[-own:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_reward_is_for_the_answer_after_the_last_result() -> None:
    from examples.code.environment import CodeProblem

    class Said:
        def __init__(self, text: str) -> None:
            self.final_text = text

    problem = CodeProblem({"question": "?", "answer": 345})
    assert problem.reward(Said("<interpreter>\n345\n</interpreter>\nThe answer is 345.")) == 1.0
    assert problem.reward(Said("The answer is 345.\n<interpreter>\n1\n</interpreter>")) == 0.0
    assert problem.run("```python\n1 + 1\n```") == "2"
