"""A variable of this process's environment, set for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for a `with` block.

    Example:
        >>> with environment_variable("OMP_NUM_THREADS", "1"):
        ...     os.environ["OMP_NUM_THREADS"]
        '1'
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
