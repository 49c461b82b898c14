"""Logits processors that are plain callables: their names, and the names that requests may use.

A callable gets the ids that a request has sampled so far, and the logits [V] of the request's next
token. It returns the logits to sample from. If a callable has three required parameters, the first
is the prompt's ids. A class is instantiated once for each request. This module does not import
vLLM, because `logits_adapter` runs the callables in the engine.
"""

import re
from collections.abc import Mapping

from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import InputError

KEY = "engine.logits_processors"
EXTRA_ARG = "turnwise"
"""The key of vLLM's `extra_args` under which a request's processors reach the engine."""
SETTINGS = "turnwise_logits_processors"
"""The key of vLLM's `additional_config` under which the engine finds the processors of every
request, and the pattern of names that requests may use."""
ADAPTER = "turnwise.engine.logits_adapter:CallableProcessors"
MAX_PROCESSORS = 16  # maximum number of processors in one request
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w*)", re.ASCII)

Call = str | JsonObject
"""A processor in a request: `package.module:name`, or a JSON object with this name and
arguments."""


def extra_args(sampling: SamplingConfig) -> JsonObject:
    """Make the `extra_args` that contain a request's processors for the engine."""
    arguments = dict(sampling.logits_processor_args)
    if sampling.logits_processors:
        arguments[EXTRA_ARG] = {"processors": written(sampling)}
    return arguments


def written(sampling: SamplingConfig) -> list[Call]:
    """Return a configuration's logits processors in the form of a request's body."""
    return [p if isinstance(p, str) else p.model_dump() for p in sampling.logits_processors]


def plain_calls(chosen: object, allowed: str | None) -> list[Call]:
    """Check a request's processors against `engine.logits_processors_allowed`, and return them in
    their normal form; idempotent. The processors' modules are not imported.

    Args:
        chosen: A list of `package.module:name` (or `package.module.name`), or of
            `{"qualname": ..., "args": [...], "kwargs": {...}}`. The second form calls the named
            object with the arguments to make the processor.
    """
    if not isinstance(chosen, list | tuple) or len(chosen) > MAX_PROCESSORS:
        raise InputError(f"logits_processors is a list of at most {MAX_PROCESSORS} processors")
    calls: list[Call] = []
    for one in chosen:
        if isinstance(one, str):
            calls.append(_allowed_name(one, allowed))
            continue
        if not isinstance(one, Mapping) or not isinstance(one.get("qualname"), str):
            raise InputError(
                "a logits processor is package.module:name, or an object with qualname, args and "
                f"kwargs, not {repr(one)[:80]}"
            )
        args, kwargs = one.get("args") or [], one.get("kwargs") or {}
        unknown = one.keys() - {"qualname", "args", "kwargs"}
        if unknown or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise InputError("a logits processor has a qualname, a list args and an object kwargs")
        name = _allowed_name(one["qualname"], allowed)
        calls.append({"qualname": name, "args": args, "kwargs": kwargs})
    return calls


def name_of(call: Call) -> str:
    """Return a processor's name without its arguments."""
    return call if isinstance(call, str) else str(call["qualname"])


def _allowed_name(name: str, allowed: str | None) -> str:
    """Return the name as `package.module:name`; raise InputError if it is not allowed."""
    if dotted := _DOTTED.fullmatch(name):
        name = f"{dotted[1]}:{dotted[2]}"
    if not _NAME.fullmatch(name):
        raise InputError(f"a logits processor is package.module:name, not {name[:80]!r}")
    if allowed is None:
        raise InputError(
            f"the logits processor {name} is refused: none may be chosen by request, because "
            "engine.logits_processors_allowed is not set"
        )
    if not re.fullmatch(allowed, name):
        raise InputError(
            f"the logits processor {name} is refused: it does not match "
            "engine.logits_processors_allowed"
        )
    return name


def with_request(
    extra_args: Mapping[str, object] | None, request_id: str, allowed: str | None
) -> tuple[JsonObject, list[Call]]:
    """Return a request's `extra_args`, with the request's id (the key of failures) and processors
    added; and the list of processors. The processors are checked, because `extra_args` may come
    from a client."""
    given = (extra_args or {}).get(EXTRA_ARG) or {}
    if not isinstance(given, Mapping):
        raise InputError(f"clients may not set the extra argument {EXTRA_ARG!r}")
    calls = plain_calls(given.get("processors", []), allowed)
    own = {"request": request_id, "processors": calls}
    return {**(extra_args or {}), EXTRA_ARG: own}, calls
