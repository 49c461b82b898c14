"""Our equivalents of other systems' configuration keys, for errors about unknown keys."""

from turnwise.compat.other_keys import OTHER_KEYS
from turnwise.compat.verl.keys import ROOT, VERL_KEYS

_KEYS = OTHER_KEYS | VERL_KEYS


def answer(key: str) -> str | None:
    """Return our equivalent key, or an explanation, for another system's key or a key below such a
    key; None for any other key."""
    while key:
        for name in (f"{ROOT}{key}", key):
            if name in _KEYS:
                return _KEYS[name]
        key = key.rpartition(".")[0]
    return None


def is_section(key: str) -> bool:
    """Return whether another system has keys below this key."""
    return any(name.startswith((f"{key}.", f"{ROOT}{key}.")) for name in _KEYS)
