"""Inputs of a command: the rows and objects of a program, or the configuration's.

Everything is checked before anything slow is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.core.user_code import call_user_code
from turnwise.engine.adapters import EngineAdapters

if TYPE_CHECKING:
    from turnwise.rollout.environment import EnvironmentType
    from turnwise.rollout.foreign.trl_reward import RewardFunction
    from turnwise.rollout.problems import Problem

_T = TypeVar("_T")
_LOAD_SECONDS = 6 * 3600.0
"""Deadline for opening the data, which may be a download of hours."""


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Objects that a program passes instead of configuration keys; None uses the key."""

    environment: "EnvironmentType | None" = None
    """Makes an environment from a row; replaces `environment`."""
    rows: Sequence[JsonObject] | None = None
    """Training rows; replace data.path."""
    eval_rows: Sequence[JsonObject] | None = None
    """Held-out rows; replace data.eval_path."""
    functions: "Mapping[str, RewardFunction] | None" = None
    """Reward functions by the paths that `rollout.rewards` has for them under `trl`."""

    def environment_for(self, config: Config) -> "EnvironmentType | None":
        """Return `environment` with the configuration's `environment_args`; None if it is None.

        Raises:
            InputError: when it does not take one of them.
        """
        from turnwise.rollout.environment import with_arguments

        if self.environment is None:
            return None
        return with_arguments(self.environment, config.environment_args)


FROM_CONFIG = ProgramInputs()
"""Inputs that leave everything to the configuration."""


def check_sources(config: Config, *data: str | None) -> None:
    """Check that the model and data can exist, before anything slow is imported."""
    for path in filter(None, data):
        check_data(path)
    check_model(config.model.path)
    if config.model.tokenizer is not None:
        check_tokenizer(config.model.tokenizer)
    EngineAdapters.of(config)


async def in_time(
    load: Callable[[Config, ProgramInputs], _T], config: Config, inputs: ProgramInputs
) -> _T:
    """Open the data in a thread: a program's rows, and some datasets, are user code."""
    loaded: _T = await call_user_code(load, config, inputs, name="the data", seconds=_LOAD_SECONDS)
    return loaded


def all_problems(
    config: Config, inputs: ProgramInputs
) -> "tuple[Sequence[Problem], Sequence[Problem]]":
    """Return training problems, and held-out ones if there are any."""
    measured = inputs.eval_rows is not None or config.data.eval_path is not None
    heldout = heldout_problems(config, inputs) if measured else []
    return training_problems(config, inputs), heldout


def training_problems(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    """Return the problems to train on."""
    from turnwise.rollout.data import checked_rows, load_training
    from turnwise.rollout.problems import Problems

    if inputs.rows is None:
        return load_training(config, inputs.environment_for(config))
    return Problems("data", checked_rows(inputs.rows, "data", config.data.limit))


def heldout_problems(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    """Return the problems to evaluate on."""
    from turnwise.rollout.data import checked_rows, load_heldout
    from turnwise.rollout.problems import Problems

    if inputs.eval_rows is None:
        return load_heldout(config, inputs.environment_for(config))
    rows = checked_rows(inputs.eval_rows, "eval_data", config.data.eval_limit)
    return Problems("eval_data", rows)
