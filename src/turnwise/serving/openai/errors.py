"""Errors as answers, in OpenAI's format; validation errors become one sentence.

pydantic reports a mistake in a union once for each member of the union. The sentence assumes that
the client meant the first member whose `role` and `type` fit. It names the path of the wrong value
in the body, and the mistake.
"""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from turnwise.core.json_types import JsonObject

UNKNOWN = object()  # a value that is not known, only its errors
_TAGS = ("role", "type")
_NAMED = 8
_SHOWN = 80
_EXPECTED = "Input should be "

_Step = tuple[bool, str | int]
"""A key or index of a value (True), or a member of a union that the value may be (False)."""
_Placed = list[tuple[list[_Step], JsonObject]]
"""Entries of pydantic's `errors()`, each with the path of the wrong value."""


def refusal(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an HTTP response with an error."""
    kind = HTTPStatus(status).phrase
    error = {"message": message, "type": kind, "param": param, "code": status}
    return Response(json.dumps({"error": error}), status, headers, "application/json")


async def answer_error(_: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, or a body that is not valid."""
    if isinstance(error, HTTPException):
        return refusal(error.status_code, str(error.detail), headers=error.headers)
    assert isinstance(error, RequestValidationError | ValidationError)
    body = error.body if isinstance(error, RequestValidationError) else UNKNOWN
    return refusal(400, *explain(errors_of(error), body))


def errors_of(error: RequestValidationError | ValidationError) -> list[JsonObject]:
    """Return the entries of pydantic's `errors()`; an error that is only a sentence becomes an
    entry without a place."""
    if isinstance(error, ValidationError):
        return list(map(dict, error.errors(include_url=False, include_input=False)))
    said = error.errors()  # vLLM's own checks give sentences
    return [
        {"loc": (), "type": "", "msg": each} if isinstance(each, str) else dict(each)
        for each in said
    ]


def explain(errors: Sequence[JsonObject], body: object) -> tuple[str, str]:
    """Return the sentence for pydantic's errors of one body, and the path of the wrong value. The
    body is needed to distinguish keys from members of unions in the errors' places; it may be
    `UNKNOWN`."""
    placed: _Placed = []
    for error in errors:
        value, place, steps = body, list(error["loc"]), list[_Step]()
        if place[:1] == ["body"]:
            del place[0]
        if isinstance(body, Mapping) and isinstance(place[0] if place else "", int):
            value = UNKNOWN  # the place is relative to a value inside the body
        for number, part in enumerate(place, start=1):
            holds, inner = _inside(value, part)
            here = holds or (number == len(place) and error["type"] == "missing")
            steps.append((here, part))
            value = inner if here else value
        placed.append((steps, error))
    path, message = _meant(placed, body)
    path = path.removeprefix(".") or "body"
    return f"{path}: {message}", path


def _meant(errors: _Placed, value: object) -> tuple[str, str]:
    """Return the place and the message of the one error to report about a value."""
    for steps, error in errors:
        if not steps:
            return "", _message(error)
    groups = _by_first_step(errors)
    for (here, part), inner in groups.items():
        if here:
            path, message = _meant(inner, _inside(value, part)[1])
            return (f"[{part}]" if isinstance(part, int) else f".{part}") + path, message
    members = list(groups.values())
    direct = [[_message(error) for steps, error in member if not steps] for member in members]
    if all(direct):
        said = list(dict.fromkeys(messages[0] for messages in direct))
        said = [message for message in said if "instance of" not in message] or said
        if len(said) > 1 and all(message.startswith(_EXPECTED) for message in said):
            types = " or ".join(message.removeprefix(_EXPECTED) for message in said)
            return "", _EXPECTED + types
        return "", said[0]
    if isinstance(value, Mapping) and any(tag in value for tag in _TAGS):
        fitting = [member for member in members if _fits(member)]
        if fitting:
            return _meant(fitting[0], value)
        for tag in reversed(_TAGS):
            known = [
                str(error["ctx"]["expected"])
                for _, error in errors
                if error["type"] == "literal_error" and error["loc"][-1] == tag
            ]
            if known and tag in value:  # no member of the union has this tag
                names = list(dict.fromkeys(known))
                more = ", ..." if len(names) > _NAMED else ""
                given = repr(value[tag])[:_SHOWN]
                return f".{tag}", f"{given} is not one of {', '.join(names[:_NAMED])}{more}"
        return _meant(members[0], value)
    deepest = max(members, key=lambda m: max(sum(here for here, _ in steps) for steps, _ in m))
    return _meant(deepest, value)


def _by_first_step(errors: _Placed) -> dict[_Step, _Placed]:
    groups: dict[_Step, _Placed] = {}
    for steps, error in errors:
        groups.setdefault(steps[0], []).append((steps[1:], error))
    return groups


def _fits(errors: _Placed) -> bool:
    """Return whether a value with these errors is an object whose role and type are right."""
    if any(not steps or steps[0] in [(True, tag) for tag in _TAGS] for steps, _ in errors):
        return False
    members = [inner for (here, _), inner in _by_first_step(errors).items() if not here]
    return not members or any(map(_fits, members))


def _inside(value: object, part: str | int) -> tuple[bool, object]:
    """Return whether a value has a key or index, and the value there, or `UNKNOWN`."""
    if value is UNKNOWN:
        name = str(part)
        return isinstance(part, int) or (name.isidentifier() and name.islower()), UNKNOWN
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return True, value[part]
    if isinstance(value, Mapping) and part in value:
        return True, value[part]
    return False, UNKNOWN


def _message(error: JsonObject) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    why = error.get("ctx", {}).get("error")
    return f"{message}: {why}" if error["type"] == "json_invalid" else message
