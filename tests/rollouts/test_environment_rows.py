"""Arguments of an environment, and rows that it makes itself."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import turnwise
from turnwise.compat.package import HELD_OUT, check_name, seed_rows, turn_rewards
from turnwise.config import Config
from turnwise.errors import InputError
from turnwise.rollouts import Problem, Runner, load_rows
from turnwise.rollouts.data import load_heldout, load_training
from turnwise.rollouts.environment import (
    ADAPTERS,
    load_environment,
    make_rows,
    type_of,
    with_arguments,
)
from turnwise.rollouts.episode import Episode
from turnwise.run.commands import ProgramInputs, load_problems

HERE = "tests.rollouts.test_environment_rows"


class Count(turnwise.Environment):
    """Counts on, from `start`."""

    def __init__(self, row: dict[str, Any], start: int = 0, *, unit: str = "") -> None:
        self.problem = f"Continue: {start}{unit}, {start + row['step']}{unit}"

    @classmethod
    def prompt(cls, row: dict[str, Any]) -> str:
        return f"Continue by {row['step']}"

    @classmethod
    def rows(cls, split: str, start: int = 0) -> Sequence[dict[str, Any]]:
        return [{"step": start + n} for n in (range(5) if split == "train" else range(5, 8))]

    def reward(self, trajectory: turnwise.Trajectory) -> float:
        return 0.0


class Plain:
    """Takes a row alone."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = "Go."


class Odd(Plain):
    """Makes what its subclass says."""

    made: Any = None

    @staticmethod
    def rows(split: str) -> Any:
        if split == "eval":
            raise ValueError("no disk")
        return Odd.made


class Instance(Plain):
    """Its `rows` is a method of an instance, which there is not."""

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [{}]


def configured(make_config: Callable[..., Config], name: str = "Count", **keys: Any) -> Config:
    data = {"path": "environment", "eval_path": "environment", **keys.pop("data", {})}
    return make_config(environment=f"{HERE}:{name}", data=data, **keys)


def test_an_environment_makes_other_rows_for_evaluation(
    make_config: Callable[..., Config],
) -> None:
    config = configured(make_config, environment_args={"start": 10, "unit": "m"})
    training, heldout = load_training(config), load_heldout(config)
    assert [problem.row["step"] for problem in training] == [10, 11, 12, 13, 14]
    assert [(problem.id, problem.row["step"]) for problem in heldout] == [
        ("eval:1", 15),
        ("eval:2", 16),
        ("eval:3", 17),
    ]
    assert training[0].id == "train:1"
    limited = configured(make_config, data={"limit": 2, "eval_limit": 1})
    assert (len(load_training(limited)), len(load_heldout(limited))) == (2, 1)


def test_without_rows_for_evaluation_it_uses_those_of_training(
    make_config: Callable[..., Config],
) -> None:
    heldout = load_heldout(configured(make_config, data={"eval_path": None}))
    assert [problem.id for problem in heldout] == [f"train:{n}" for n in range(1, 6)]


def test_a_class_that_a_program_passes_makes_its_rows_too(
    make_config: Callable[..., Config],
) -> None:
    config = configured(make_config, "Plain", environment_args={"start": 3})
    inputs = ProgramInputs(environment=Count)
    assert load_problems(config, inputs)[0].row == {"step": 3}
    assert load_problems(config, inputs, heldout=True)[0].row == {"step": 8}
    made = inputs.environment_for(config)
    assert made is not None
    assert made({"step": 1}).problem == "Continue: 3, 4"
    assert ProgramInputs().environment_for(config) is None


def test_arguments_reach_the_environment_and_its_prompt_is_known(
    make_config: Callable[..., Config], tokenizer: Any
) -> None:
    config = configured(make_config, environment_args={"start": 7})
    runner = Runner(config, tokenizer)
    episode = runner._stages[""].episode(Problem("rows:1", {"step": 2}))
    asyncio.run(episode.open())
    assert episode.problem == [{"role": "user", "content": "Continue: 7, 9"}]
    assert isinstance(episode, Episode)
    assert runner._stages[""].knows_prompts
    (message,) = episode.prompt() or []
    assert message["content"] == "Continue by 2"
    assert type_of(partial(Count, start=7)) is Count


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Plain, {"start": 1}, "Plain takes no argument start (it takes none)"),
        (Count, {"stat": 1}, "Count takes no argument stat (it takes start, unit)"),
        (Count, {"row": {}}, "Count takes no argument row (it takes start, unit)"),
    ],
)
def test_an_argument_that_it_does_not_take_is_named(
    kind: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        with_arguments(kind, arguments)
    assert str(caught.value) == f"environment_args: {message}"


def test_a_type_that_takes_any_argument_gets_them_all() -> None:
    def make(row: dict[str, Any], **rest: Any) -> Any:
        return rest

    assert with_arguments(make, {"a": 1, "b": 2})({}) == {"a": 1, "b": 2}
    assert with_arguments(make, {}) is make


@pytest.mark.parametrize(
    ("kind", "made", "split", "message"),
    [
        (Plain, None, "train", "data.path: Plain makes no rows: give it a classmethod rows(split)"),
        (turnwise.Environment, None, "train", "data.path: Environment makes no rows"),
        (Instance, None, "train", "Instance.rows must be a classmethod"),
        (Odd, "rows.jsonl", "train", "Odd.rows('train') must return a list of rows, not 'rows.js"),
        (Odd, [], "eval", "Odd.rows('eval') failed: ValueError: no disk"),
    ],
)
def test_what_makes_no_rows_is_said_in_a_sentence(
    kind: Any, made: Any, split: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "made", made)
    with pytest.raises(InputError) as caught:
        make_rows(kind, split)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("made", "message"),
    [([], "Odd.rows('train') has no rows"), ([{}, 3], "Odd.rows('train')[1] is not a dictionary")],
)
def test_rows_that_cannot_be_used_are_named(
    made: Any, message: str, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HERE}.Odd.made", made)
    with pytest.raises(InputError) as caught:
        load_training(configured(make_config, "Odd"))
    assert message in str(caught.value)


def test_they_are_no_file() -> None:
    with pytest.raises(InputError, match=r"read by load_training\(config\)"):
        load_rows("environment", split="train")


PACKAGES = {
    "bfcl:multi_turn_base": ("bfcl_eval", "--no-deps bfcl-eval mpmath"),
    "gymnasium:FrozenLake-v1": ("gymnasium", "gymnasium"),
    "reasoning_gym:chain_sum": ("reasoning_gym", "reasoning-gym"),
    "skyrl_gym:gsm8k": ("skyrl_gym", "skyrl-gym"),
    "textarena:TicTacToe-v0": ("textarena", "textarena"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, install = PACKAGES[name]
    monkeypatch.setattr("turnwise.core.optional.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        load_environment(name)
    said = str(caught.value)
    assert said.startswith(f"environment: {name.partition(':')[0]}")
    assert said.endswith(f"needs {package}: pip install {install}")
    assert name.partition(":")[0] in ADAPTERS


def test_a_name_that_a_package_does_not_have() -> None:
    known = ["chain_sum", "sudoku"]
    check_name("reasoning_gym:sudoku", known)
    with pytest.raises(InputError, match=r"has no 'chan_sum'; did you mean reasoning_gym:chain_s"):
        check_name("reasoning_gym:chan_sum", known)
    with pytest.raises(InputError, match=r"^environment: reasoning_gym has no 'x'$"):
        check_name("reasoning_gym:x", known)


def test_evaluation_seeds_differ_and_rewards_belong_to_turns() -> None:
    training, heldout = (
        {row["seed"] for row in seed_rows(split, 1000)} for split in ("train", "eval")
    )
    assert len(training) == len(heldout) == 1000
    assert not training & heldout
    assert min(heldout) == HELD_OUT
    assert turn_rewards({0: 1.0, 2: -0.5, 7: 3.0}, 3).turns == [1.0, 0.0, -0.5]
