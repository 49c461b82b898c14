"""Errors that name the field of `GRPOConfig` that cannot be honoured."""

from typing import NoReturn

from turnwise.errors import InputError


def refuse(name: str, value: object, why: str) -> NoReturn:
    raise InputError(f"GRPOConfig.{name}={value!r} is not supported: {why}")


def check(honoured: bool, name: str, value: object, why: str) -> None:
    if not honoured:
        refuse(name, value, why)
