"""Answers to the configuration keys of other systems, for errors about unknown keys."""

from turnwise.compat.verl.keys import VERL_KEYS, verl_answer


def answer(key: str) -> str | None:
    """Return our key, or a sentence, for another system's key or a key below it; else None."""
    return verl_answer(key)


def is_section(key: str) -> bool:
    """Return whether another system has keys below this one."""
    return any(name.startswith((f"{key}.", f"actor_rollout_ref.{key}.")) for name in VERL_KEYS)
