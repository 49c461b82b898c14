"""Combination of two worker extensions in one class, because vLLM mixes only one class into its
worker.

vLLM imports the class by its name in each process of an engine. `combined` returns the name of an
attribute of this module; when the attribute is first read, the module makes the class.
"""

from turnwise.core.optional import load_object
from turnwise.errors import InputError

KEY = "engine.vllm_args.worker_extension_cls"
_AND, _DOT = "+", "/"  # in an attribute's name, the separator of two class names, and their dots


def combined(ours: str, users: str) -> str:
    """Return the name of the class that combines two classes, each `package.module.Class` (or
    `module:Class`). If one of the names is "", return the other name. Raise InputError when the
    user's class cannot be imported."""
    users = users.replace(":", ".")
    if not ours or users in ("", ours):
        return ours or users
    _load(users)
    return f"{__name__}.{f'{ours}{_AND}{users}'.replace('.', _DOT)}"


def _load(name: str) -> type:
    kind: object = load_object(":".join(name.rsplit(".", 1)), KEY)
    if not isinstance(kind, type):
        raise InputError(f"{KEY}: {name} is not a class")
    return kind


def __getattr__(name: str) -> object:
    """Make the class whose name `combined` has returned, and keep it."""
    if _AND not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ours, users = (_load(part) for part in name.replace(_DOT, ".").split(_AND))
    kinds = (users,) if issubclass(users, ours) else (ours, users)
    for taken in dir(users) if len(kinds) > 1 else ():
        if not taken.startswith(("__", "_abc_")) and hasattr(ours, taken):
            raise InputError(f"{KEY}: {users.__name__}.{taken} is a name that Turnwise uses")
    made = globals()[name] = type(kinds[0].__name__, kinds, {"__module__": __name__})
    return made
