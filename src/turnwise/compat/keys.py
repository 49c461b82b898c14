"""Our equivalents of other systems' configuration keys, for errors about unknown keys."""

from turnwise.compat.verl.keys import VERL_KEYS, verl_answer


def answer(key: str) -> str | None:
    """Return our equivalent key, or an explanation, for another system's key or a key below such a
    key; None for any other key."""
    return verl_answer(key)


def is_section(key: str) -> bool:
    """Return whether another system has keys below this key."""
    return any(name.startswith((f"{key}.", f"actor_rollout_ref.{key}.")) for name in VERL_KEYS)
