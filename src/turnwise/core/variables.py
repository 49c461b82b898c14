"""Environment variables in values of the configuration: `${NAME}`."""

import os
import re
from collections.abc import Mapping

from turnwise.errors import InputError


def expanded(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Return values with `${NAME}` replaced by this process's environment variables; InputError,
    which begins with `where` ("an MCP server's headers"), when one is not set."""

    def variable(found: re.Match[str]) -> str:
        value = os.environ.get(found[1])
        if value is None:
            raise InputError(f"{where} names the variable {found[1]}, which is not set")
        return value

    return {name: re.sub(r"\$\{(\w+)\}", variable, value) for name, value in values.items()}
