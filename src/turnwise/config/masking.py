"""Secrets of a configuration, left out of what leaves the machine: trackers and exported pages."""

import re
from collections.abc import Mapping

from turnwise.config.schema import Config

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|[^a-z])(key|token|secret|pass|password|passwd|credentials?|authorization|cookie)$"
)
_SECRET_SECTIONS = ("env", "headers")
"""Mappings whose values may all be secrets: of an MCP server, and of a tool's or engine's own."""
_USER = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in a URL."""
_REFERENCE = re.compile(r"(\w+ )?\$\{\w+\}")
"""A value that names a variable of the environment, and is no secret itself."""


def masked(config: Config) -> dict[str, object]:
    """Return a configuration as plain values, with a mask for each value that may be a secret.

    Those are the values of `headers` and `env`, texts whose key is called a token, key, secret,
    password or the like, and users in URLs. `serving.api_key` is left out.
    """
    return {key: masked_value(key, value) for key, value in _plain(config).items()}


def has_secrets(config: Config) -> bool:
    """Return whether `masked` masks something."""
    return masked(config) != _plain(config)


def _plain(config: Config) -> dict[str, object]:
    tree: dict[str, object] = config.model_dump(mode="json", exclude={"serving": {"api_key"}})
    return tree


def masked_value(name: str, value: object) -> object:
    """Return a value of a configuration, masked where the name of its key (of a dotted one, the
    end) or its form says that it is a secret."""
    if isinstance(value, Mapping):
        section = name in _SECRET_SECTIONS
        return {
            key: masked_value("secret" if section else str(key), item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_argument(name, *pair) for pair in zip(["", *value], value, strict=False)]
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(name) and not _REFERENCE.fullmatch(value):
        return MASK
    return _USER.sub(f"{MASK}@", value)


def _argument(name: str, before: object, item: object) -> object:
    """Return an item of a list, which may be an argument of a command: --token WORD, --key=WORD."""
    if isinstance(item, str) and isinstance(before, str):
        option, separator, _ = item.partition("=")
        if separator and option.startswith("-") and _is_secret(option):
            return f"{option}={MASK}"
        if before.startswith("-") and _is_secret(before) and not item.startswith("-"):
            return MASK
    return masked_value(name, item)


def _is_secret(name: str) -> bool:
    """Return whether a name is one of a secret, in any spelling: hf_token, API-KEY, apiKey."""
    return bool(_SECRET_NAME.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
