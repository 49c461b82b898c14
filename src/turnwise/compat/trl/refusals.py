"""Errors for scripts with TRL's interface; they name the argument or the field of `GRPOConfig`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from turnwise.errors import InputError


class ScriptError(InputError, ValueError):
    """A mistake in a script. Also a `ValueError`, because TRL raises ValueErrors."""


@contextmanager
def as_value_error() -> Iterator[None]:
    """Raise an `InputError` of the wrapped code as `ScriptError`."""
    try:
        yield
    except ScriptError:
        raise
    except InputError as error:
        raise ScriptError(str(error)) from error


def refuse(name: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOConfig.{name}={value!r} is not supported: {why}")


def check(honoured: bool, name: str, value: object, why: str) -> None:
    if not honoured:
        refuse(name, value, why)


def refuse_argument(name: str, why: str) -> NoReturn:
    raise InputError(f"GRPOTrainer: {name} is not supported: {why}")
