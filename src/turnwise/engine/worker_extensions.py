"""Several worker extensions in one class: vLLM mixes a single one into its worker.

vLLM imports the class by its name in each process of an engine. `combined` returns a name that is
an attribute of this module, and the module makes the class when it is asked for.
"""

from turnwise.core.optional import load_object
from turnwise.errors import InputError

KEY = "engine.vllm_args.worker_extension_cls"
_AND, _DOT = "+", "/"  # in place of what an attribute's name may not have


def combined(*names: str) -> str:
    """Return the name of a class made of the classes `package.module.Class` (or `module:Class`); of
    one alone, its own name. InputError when the user's, which come last, cannot be imported."""
    plain = [name.replace(":", ".") for name in names]
    for name in plain[1:]:
        _load(name)
    return plain[0] if len(plain) == 1 else f"{__name__}.{_AND.join(plain).replace('.', _DOT)}"


def _load(name: str) -> type:
    module, _, own = name.rpartition(".")
    kind: object = load_object(f"{module}:{own}", KEY)
    if not isinstance(kind, type):
        raise InputError(f"{KEY}: {name} is no class")
    return kind


def __getattr__(name: str) -> object:
    """Make the class of a name that `combined` returned, once."""
    if _AND not in name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kinds = [_load(part) for part in name.replace(_DOT, ".").split(_AND)]
    # The base class of another one of them is part of that.
    own = [one for one in kinds if not any(one in kind.__mro__[1:] for kind in kinds)]
    for kind in own[1:]:
        names = [name for name in dir(kind) if not name.startswith(("__", "_abc_"))]
        if taken := [name for name in names if hasattr(own[0], name)]:
            raise InputError(f"{KEY}: {kind.__name__}.{taken[0]} is a name that Turnwise uses")
    made = globals()[name] = type(own[0].__name__, tuple(own), {"__module__": __name__})
    return made
