"""One sentence for each mistake in a configuration, with the most likely intended key."""

import difflib
from collections.abc import Sequence

from pydantic_core import ErrorDetails

from turnwise.config.aliases import ALIASES, REPLACED_KEYS
from turnwise.config.base import sections
from turnwise.config.explain import CHOICES, known_keys
from turnwise.config.schema import Config


def explain_mistake(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as a sentence that names the key."""
    loc = [str(part) for part in error["loc"]]
    # pydantic adds the name of the chosen kind after a key that has several kinds.
    key = ".".join(p for i, p in enumerate(loc) if ".".join(loc[:i]) not in CHOICES)
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace("'", "")
        return f"{key}.name must be one of {known}, not {error['ctx']['tag']!r}"
    if error["type"] == "extra_forbidden":
        return _unknown(key, loc)
    if error["type"] == "missing":
        missing = [key, *(f"{key}.{name}" for name in _required(key))]
        explained = [explain_missing(k) for k in missing if k in known_keys()]
        return "; ".join(explained or [f"{key} must be set"])
    value = error["input"]
    if error["type"] in ("model_type", "union_tag_not_found"):
        return f"{key} must be a section with its own keys, not {value!r}"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    given = f", not {value!r}" if isinstance(value, str | int | float) else ""
    return f"{key}: {error['msg']}{given}"


def explain_missing(key: str) -> str:
    """Return the sentence about a key that must be set."""
    return f"{key} must be set ({known_keys()[key].rstrip('.')})"


def _unknown(key: str, loc: Sequence[str]) -> str:
    """Explain a key that its section does not have."""
    owner, _, leaf = key.rpartition(".")
    if leaf in REPLACED_KEYS:
        return f"{key} is not supported: {REPLACED_KEYS[leaf]}"
    if key in known_keys():
        kinds = [
            kind.model_fields["name"].default
            for kind in CHOICES[owner]
            if leaf in kind.model_fields
        ]
        return f"{key} belongs to {' and '.join(kinds)}, not to {loc[-2]} ({owner}.name)"
    return f"there is no key {key}{_nearest(key)}"


def _required(section: str) -> list[str]:
    """Return the keys of a top-level section that must be set."""
    field = Config.model_fields.get(section)
    parts = sections(field.annotation) if field is not None else []
    return [name for part in parts for name, f in part.model_fields.items() if f.is_required()]


def _nearest(key: str) -> str:
    """Return a hint that names the known key most likely meant, or where to find all keys."""
    known = list(known_keys())
    section, _, leaf = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    tops = list(dict.fromkeys(k.partition(".")[0] for k in known))
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]

    def close(name: str, candidates: Sequence[str], least: float) -> list[str]:
        return difflib.get_close_matches(name, candidates, 1, least)

    beside = f"{section}." if section else ""
    alias = ALIASES.get(leaf.lower().replace("-", "_"), "")
    owner, _, own = alias.rpartition(".")
    if own in siblings and section.endswith(owner):
        alias = beside + own
    meant = (
        ([alias] if alias else [])
        or [beside + name for name in close(leaf, siblings, 0.75)]
        or elsewhere
        or ([] if section else close(key, tops, 0.75))
        or close(key, known, 0.75)
        or [beside + name for name in close(leaf, siblings, 0.4)]
    )
    return f"; did you mean {meant[0]}?" if meant else "; `turnwise config` prints all keys"
