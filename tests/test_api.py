"""The public face: names imported when they are used, and plain calls that run everything."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turnwise
from tests.conftest import ROOT, command_environment
from tests.conftest import python as forked
from tests.test_cli import metrics_of
from turnwise.config import Config, dump_config
from turnwise.errors import InputError
from turnwise.run.api import _prepare
from turnwise.trajectory import read_jsonl


def python(code: str, *, cwd: Path = ROOT, timeout: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**command_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(code: str, folder: Path) -> str:
    """Run a program of a file in this folder, with the imports of the session's fork server."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [*forked(), "script.py"],
        cwd=folder,
        env={**command_environment(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_turnwise_imports_nothing_slow() -> None:
    code = "import sys, turnwise; print([m for m in ('torch', 'vllm', 'ray', 'yaml', 'pydantic')"
    assert python(f"{code} if m in sys.modules])") == "[]\n"


def test_every_public_name_is_there_and_has_one_home() -> None:
    for name in [*turnwise.__all__, "open"]:
        assert getattr(turnwise, name) is not None
        assert name in dir(turnwise)
    assert set(turnwise._HOMES) - {"open"} < set(turnwise.__all__)
    assert "open" not in turnwise.__all__  # a star import would hide Python's
    with pytest.raises(AttributeError, match="module 'turnwise' has no attribute 'nothing'"):
        turnwise.nothing  # noqa: B018


@pytest.mark.parametrize(
    "imports",
    [
        "import turnwise",
        "import turnwise.rollouts",
        "from turnwise.rollouts import Environment; import turnwise",
        "import turnwise; turnwise.train; from turnwise.rollouts import Environment",
        "from turnwise import rollout; import turnwise; assert rollout is turnwise.rollout",
        "import turnwise; turnwise.rollout; import turnwise.tools.toolbox",
    ],
)
def test_rollout_is_a_call_in_any_order_of_imports(imports: str) -> None:
    check = (
        "try: turnwise.rollout(model='/no/such/model', environment='a:B', data=[{}])\n"
        "except turnwise.InputError as error: print(error)\n"
        "from turnwise.rollouts import Environment, Problem\n"
        "import turnwise.tools.toolbox\n"
        "assert turnwise.rollouts.Problem is Problem\n"
    )
    said = python(f"{imports}\n{check}")
    assert said.startswith("model.path: there is no model in /no/such/model")


class Weather:
    def __init__(self, row: dict[str, object]) -> None: ...


def test_arguments_override_keywords_which_override_the_config(
    tmp_path: Path,
) -> None:
    base = {"model": {"path": "a"}, "data": {"path": "p", "limit": 5}, "training": {"steps": 1}}
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(base))
    keys = {"model": {"dtype": "bfloat16"}, "training": {"steps": 2}, "seed": 7}
    values = {"training.steps": 3, "model.path": None}
    rows = [{"q": 1}]
    dotted = {"rollout.max_turns": 4, "algorithm": {"loss": {"clip_high": 0.3}}}
    for config in (base, file, str(file)):
        resolved, inputs = _prepare(config, {**keys, **dotted}, values, Weather, rows)
        assert (resolved.model.path, resolved.model.dtype) == ("a", "bfloat16")
        assert (resolved.training.steps, resolved.seed, resolved.rollout.max_turns) == (3, 7, 4)
        assert (resolved.data.path, resolved.data.limit) == (None, 5)
        assert resolved.environment == f"{__name__}:Weather"
        assert resolved.algorithm.loss.clip_high == 0.3
    assert _prepare(resolved, {"seed": 8}, {}, Weather, rows)[0].seed == 8
    assert inputs.rows == rows
    assert inputs.environment is Weather
    with pytest.raises(InputError, match=r"there is no key training\.stepz; did you mean"):
        _prepare(base, {"training.stepz": 1}, values, Weather, rows)
    with pytest.raises(InputError, match=r"^sampling\.n is given twice"):
        _prepare(base, {"sampling": {"n": 2}, "sampling.n": 4}, values, Weather, rows)


class OwnSampler:
    """A sampler, given as the class itself."""


def own_reward(trajectory: Any, row: dict[str, Any]) -> float:
    return 1.0


def test_a_class_or_function_is_given_where_a_path_is() -> None:
    """Also below sections and in lists; `rollout.sampler` is the class itself."""
    keys: dict[str, Any] = {
        "environment": "a:B",
        "rollout": {"sampler": OwnSampler, "rewards": [{"name": "own", "function": own_reward}]},
        "rollout.chat_scheduler": None,
    }
    config, _ = _prepare({"data": {"path": "d"}}, keys, {"model.path": "m"})
    assert config.rollout.sampler == f"{__name__}:OwnSampler"
    assert config.rollout.rewards[0].function == f"{__name__}:own_reward"

    class Inner:
        pass

    for wrong in (Inner, lambda trajectory, row: 1.0):
        with pytest.raises(InputError, match=r"rollout\.sampler: .* must be at the top level of a"):
            _prepare({}, {"rollout.sampler": wrong}, {})


@pytest.mark.parametrize(
    ("data", "message"),
    [([], "data has no rows"), ([{}, "row"], r"data\[1\] is not a dictionary: 'row'")],
)
def test_rows_that_are_no_rows_are_one_sentence(
    data: list[object], message: str, model_path: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        turnwise.train(model_path, Weather, data, 1, output_dir=tmp_path, progress=False)


def test_an_evaluation_without_rows_is_one_sentence(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.eval_path or data\.path must be set"):
        turnwise.evaluate(model_path, Weather, output_dir=tmp_path, progress=False)


ENVIRONMENT = """
class Weather:
    def __init__(self, row):
        self.problem, self.tools = row["question"], []

    def reward(self, trajectory):
        return float(sum(trajectory.turns[-1].completion_token_ids) % 2 == 0)
"""
TRAIN = """
import turnwise
{environment}
rows = [{{"question": f"{{n}} + 1?"}} for n in range(8)]
result = turnwise.train(model={model!r}, environment=Weather, data=rows, steps=2, **{keys!r})
print("steps", [row["step"] for row in result.metrics], result.checkpoint.name)
sampled = turnwise.rollout(model=result.checkpoint, environment=Weather, data=rows[:2], **{keys!r})
print("sampled", len(sampled), {{t.reward for t in sampled}} <= {{0.0, 1.0}})
"""
NOTEBOOK = """
import asyncio, urllib.request
import turnwise
{environment}
async def cell():
    rows = [{{"question": f"{{n}} + 1?"}} for n in range(4)]
    evaluation = turnwise.evaluate({model!r}, Weather, rows, progress=False, **{keys!r})
    print("evaluated", len(evaluation.trajectories), 0 <= evaluation.accuracy <= 1)
    with turnwise.serve({model!r}, progress=False, serving={{"port": 0}}, **{keys!r}) as server:
        with urllib.request.urlopen(server.base_url + "/models") as reply:
            print("served", reply.status)

asyncio.run(cell())
"""


@pytest.fixture
def keys(make_config: Callable[..., Config], tmp_path: Path) -> dict[str, object]:
    config = make_config()
    return {
        "output_dir": str(tmp_path / "runs"),
        "name": "weather",
        "model.max_length": config.model.max_length,
        "sampling": {"n": 4, "max_tokens": 8},
        "engine.kv_cache_gib": config.engine.kv_cache_gib,
        "rollout.prompts_per_step": 2,
        "training.learning_rate": 1e-3,
    }


def test_ten_lines_train_a_class_of_the_script_itself(
    model_path: str, keys: dict[str, object], tmp_path: Path
) -> None:
    script = TRAIN.format(environment=ENVIRONMENT, model=model_path, keys=keys)
    said = run_script(script, tmp_path)
    assert "steps [0, 1, 2] step-0002" in said or "steps [1, 2] step-0002" in said
    assert "sampled 8 True" in said
    run = tmp_path / "runs" / "weather"
    assert [row["trajectories"] for row in metrics_of(run)][-1] == 8
    assert "environment: __main__:Weather" in (run / "config.yaml").read_text()
    trajectories = list(read_jsonl(run / "trajectories" / "step-0001.jsonl"))
    assert all(t.problem_id.startswith("data:") for t in trajectories)


@pytest.mark.slow  # calls from a loop, without a run: core/test_loop_thread.py
def test_a_running_event_loop_is_no_obstacle(
    model_path: str, keys: dict[str, object], tmp_path: Path
) -> None:
    script = NOTEBOOK.format(environment=ENVIRONMENT, model=model_path, keys=keys)
    said = run_script(script, tmp_path)
    assert "evaluated 4 True" in said
    assert "served 200" in said


def test_a_run_is_resumed_with_its_own_configuration(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(make_config()))
    with pytest.raises(InputError, match="resume uses the configuration of the run"):
        turnwise.train(resume=run, config={"seed": 1})
    with pytest.raises(InputError, match="holds no whole checkpoint"):
        turnwise.train(resume=run, steps=3, progress=False)


@pytest.mark.parametrize("name", sorted(turnwise._MOVED))
def test_a_name_of_another_system_says_where_it_is(name: str) -> None:
    home = turnwise._MOVED[name]
    with pytest.raises(ImportError, match=rf"turnwise\.{name} is {home}\.{name} now"):
        getattr(turnwise, name)
    assert getattr(importlib.import_module(home), name).__name__ == name
