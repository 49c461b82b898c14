"""The example of code in a sandbox: its solutions, and code inside an answer."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.calculator.conversations import IGNORED
from examples.calculator.problems import demonstrations, train_problems
from examples.retool.environment import CodeArithmetic
from examples.retool.prepare import encode, prepare, solution
from tests.tools import sandboxes
from turnwise.config import Config, SamplingConfig, load_config
from turnwise.rollouts import Problem, Runner
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, audit

EXAMPLE = Path(__file__).parents[2] / "examples" / "retool"


def reward(text: str, answer: int = 5) -> float:
    environment = CodeArithmetic({"question": "?", "answer": answer})
    return environment.reward(SimpleNamespace(final_text=text))


def test_the_code_of_a_solution_gives_its_result_and_the_reward() -> None:
    session = sandboxes.session("first")
    try:
        for row in train_problems(20, seed=1):
            code, result, end = solution(row)
            computed = session.run(code.removeprefix("<code>").removesuffix("</code>"))
            assert result == f"\n<interpreter>\n{computed}\n</interpreter>\n"
            assert reward(code + result + end, row["answer"]) == 1.0
    finally:
        session.close()


def test_the_reward_is_for_the_answer_after_the_last_result() -> None:
    assert reward("<interpreter>\n5\n</interpreter>\nThe answer is 5.") == 1.0
    assert reward("The answer is 5.<interpreter>\n1\n</interpreter>") == 0.0
    assert reward("The answer is 5. The answer is 5.") == 0.0


def test_results_are_not_imitated(tokenizer: Any) -> None:
    for row in itertools.islice(demonstrations(0), 5):
        example = encode(tokenizer, row)
        code, result, end = solution(row)
        trained = [label for label in example.labels if label != IGNORED]
        assert len(example.ids) == len(example.labels)
        assert tokenizer.decode(trained) == code + end
        assert tokenizer.decode(example.ids).endswith(code + result + end)


async def test_code_runs_in_a_sandbox_inside_the_answer(
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
) -> None:
    sandboxes.backend("first")
    example = load_config(EXAMPLE / "config.yaml")
    config = make_config(environment=example.environment, rollout=example.rollout.model_dump())
    said = [
        "<code>\nx = 17 * 23\nx\n</code>",
        "<code>\nopen('note', 'w').write(str(x)); x - int(open('note').read())\n</code>",
    ]
    script = [*map(template.encode, said), template.encode("The answer is 391.<|im_end|>")]
    sampling = SamplingConfig(
        n=2, max_tokens=80, ignore_eos=True, logits_processor_args={"script": script}
    )
    row = {"question": "How many?", "answer": 391}
    group = await Runner(config, tokenizer).run_group(
        engine, Problem("retool:1", row), sampling, "retool"
    )
    assert group.dropped == {}
    for trajectory in group.trajectories:
        results = [template.decode(turn.added_token_ids) for turn in trajectory.turns[1:]]
        assert results == [f"\n<interpreter>\n{n}\n</interpreter>\n" for n in (391, 0)]
        assert audit(trajectory).first_violation is None
        assert trajectory.events["tool_call"] == 2


def test_the_example_is_prepared(tmp_path: Path) -> None:
    prepare(tmp_path, updates=1, train=4, heldout=2)
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert (tmp_path / "model" / "tokenizer.json").is_file()
