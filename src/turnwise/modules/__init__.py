"""Old name of `turnwise.pipeline`, kept for this version: import from `turnwise` instead."""

import warnings

from turnwise import pipeline


def __getattr__(name: str) -> object:
    """Return what `turnwise.pipeline` has of this name, with a warning."""
    value: object = getattr(pipeline, name)
    warnings.warn(
        f"turnwise.modules.{name} is turnwise.{name} now", DeprecationWarning, stacklevel=2
    )
    return value
