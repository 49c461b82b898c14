"""The internals of other packages that Turnwise uses or replaces, in one file per package.

A file has one function for each use, with the reason for it, and nothing else. On import, a file
checks that all its internals exist, with the parameters that it relies on. So a different version
of the package causes a clear error at once, instead of a silent change of behaviour.
"""

import inspect
from types import ModuleType
from typing import Any

from turnwise.errors import InputError

_MISSING = object()


def internal(owner: object, name: str, *parameters: str) -> Any:
    """Return an internal of a module, class or object. Raise InputError when the installed version
    does not have it, or the names of its first parameters are not `parameters`."""
    found: Any = getattr(owner, name, _MISSING)
    try:
        known = tuple(inspect.signature(found).parameters) if parameters else ()
    except (TypeError, ValueError):
        known = ()
    if found is _MISSING or known[: len(parameters)] != parameters:
        import platform
        from importlib.metadata import PackageNotFoundError, version

        kind = owner if isinstance(owner, type) else type(owner)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(owner, ModuleType):
            where = owner.__name__
        package = where.partition(".")[0]
        try:
            installed = f"{package} {version(package)}"
        except PackageNotFoundError:
            installed = f"Python {platform.python_version()}"
        wanted = f"{name}({', '.join(parameters)})" if parameters else name
        raise InputError(
            f"{installed} has no {wanted} in {where}, on which Turnwise relies: install the "
            "version that Turnwise names in its requirements"
        )
    return found
