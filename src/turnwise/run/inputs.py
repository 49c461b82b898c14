"""Inputs of a command: the rows and objects of a program, or the configuration's.

Everything is checked before anything slow is imported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from turnwise.config import Config
from turnwise.core.json_types import JsonObject
from turnwise.core.sources import check_data, check_model, check_tokenizer
from turnwise.core.user_code import call_user_code
from turnwise.engine.adapters import EngineAdapters
from turnwise.errors import InputError

if TYPE_CHECKING:
    from turnwise.rollouts.environment import EnvironmentType
    from turnwise.rollouts.problems import Problem

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

    def paths(self, config: Config, *, heldout: bool = True) -> list[str]:
        """Return the paths of the rows that the configuration names.

        Args:
            heldout: Whether those for evaluation are among them.
        """
        found: list[str | None] = []
        for part in config.parts().values():
            found.append(part.data.path if self.rows is None else None)
            found.append(part.data.eval_path if heldout and self.eval_rows is None else None)
        return [path for path in found if path is not None]

    def environment_for(self, config: Config) -> "EnvironmentType | None":
        """Return `environment` with the configuration's `environment_args`; None if it is None.

        Raises:
            InputError: when it does not take one of them.
        """
        from turnwise.rollouts.environment import with_arguments

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
    measured = [name for name, part in config.parts().items() if part.data.eval_path is not None]
    heldout: Sequence[Problem] = []
    if inputs.eval_rows is not None or measured:
        heldout = heldout_problems(config.only(measured), inputs)
    return training_problems(config, inputs), heldout


def training_problems(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    """Return the problems to train on.

    Raises:
        InputError: when they cannot be read, or the program has an environment or rows of its own
            beside `environments`.
    """
    _check_one_source(config, inputs)
    from turnwise.rollouts.data import checked_rows, load_training
    from turnwise.rollouts.problems import Problems

    if inputs.rows is None:
        return load_training(config, inputs.environment_for(config))
    return Problems("data", checked_rows(inputs.rows, "data", config.data.limit))


def heldout_problems(config: Config, inputs: ProgramInputs) -> "Sequence[Problem]":
    """Return the problems to evaluate on.

    Raises:
        InputError: as `training_problems` does.
    """
    _check_one_source(config, inputs)
    from turnwise.rollouts.data import checked_rows, load_heldout
    from turnwise.rollouts.problems import Problems

    if inputs.eval_rows is None:
        return load_heldout(config, inputs.environment_for(config))
    rows = checked_rows(inputs.eval_rows, "eval_data", config.data.eval_limit)
    return Problems("eval_data", rows)


def _check_one_source(config: Config, inputs: ProgramInputs) -> None:
    own = (inputs.environment, inputs.rows, inputs.eval_rows)
    if config.environments and any(each is not None for each in own):
        raise InputError(
            "environments has its own environments and rows, and the program gives one too: leave "
            "out environment, data and eval_data, or environments"
        )
