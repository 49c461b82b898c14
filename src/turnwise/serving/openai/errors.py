"""Errors as answers, in OpenAI's format; errors of validation in one sentence.

pydantic reports a mistake in a union once for each of its members. The member that the client meant
is the first one whose `role` and `type` fit. A sentence names the place in the body, and what is
wrong there.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from turnwise.core.json_types import JsonObject

UNKNOWN = object()
"""A value of which only the errors are known."""
_TAGS = ("role", "type")
_NAMED = 8
_SHOWN = 80
_EXPECTED = "Input should be "


async def send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, message: str) -> None:
    await send_json(send, status, error_body(status, message))


async def answer_error(_: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, or a body that is not valid."""
    if isinstance(error, HTTPException):
        content = error_body(error.status_code, str(error.detail))
        return Response(content, error.status_code, error.headers, "application/json")
    assert isinstance(error, RequestValidationError | ValidationError)
    body = error.body if isinstance(error, RequestValidationError) else UNKNOWN
    message, path = explain(list(map(dict, error.errors())), body)
    return Response(error_body(400, message, path), 400, media_type="application/json")


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    kind = HTTPStatus(status).phrase
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


@dataclass(slots=True)
class _Node:
    """A value in the body, or a member of a union that it may be, and the errors there."""

    errors: list[JsonObject] = field(default_factory=list)
    """Entries of pydantic's `errors()`."""
    parts: "dict[str | int, _Node]" = field(default_factory=dict)
    """Keys and indices of the value."""
    members: "dict[str | int, _Node]" = field(default_factory=dict)

    def fits(self) -> bool:
        """Return whether the value is an object whose role and type are right."""
        if self.errors or any(tag in self.parts for tag in _TAGS):
            return False
        return not self.members or any(member.fits() for member in self.members.values())

    def depth(self) -> int:
        """Return how far into the value the deepest error is."""
        inside = [1 + part.depth() for part in self.parts.values()]
        return max([*inside, *(member.depth() for member in self.members.values())], default=0)

    def leaves(self) -> Iterator[JsonObject]:
        yield from self.errors
        for inner in (*self.parts.values(), *self.members.values()):
            yield from inner.leaves()


def explain(errors: Sequence[JsonObject], body: object) -> tuple[str, str]:
    """Return the sentence for errors of one body, and the path of the value that is wrong.

    Args:
        errors: pydantic's.
        body: The body, which tells a key from a member of a union; or `UNKNOWN`.
    """
    node, path, value = _tree(errors, body), "", body
    while not node.errors:
        if node.parts:
            part, node = next(iter(node.parts.items()))
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
            value = _inside(value, part)
            continue
        members = list(node.members.values())
        if all(member.errors for member in members):
            said = list(dict.fromkeys(_message(member.errors[0]) for member in members))
            said = [message for message in said if "instance of" not in message] or said
            if len(said) > 1 and all(message.startswith(_EXPECTED) for message in said):
                types = " or ".join(message.removeprefix(_EXPECTED) for message in said)
                return _sentence(path, _EXPECTED + types)
            return _sentence(path, said[0])
        if isinstance(value, Mapping) and any(tag in value for tag in _TAGS):
            members = [member for member in members if member.fits()] or members
            if not members[0].fits() and (unknown := _unknown_tag(node, value)):
                tag, message = unknown
                return _sentence(f"{path}.{tag}", message)
            node = members[0]
        else:
            node = max(members, key=_Node.depth)
    return _sentence(path, _message(node.errors[0]))


def _tree(errors: Sequence[JsonObject], body: object) -> _Node:
    root = _Node()
    for error in errors:
        node, value, place = root, body, list(error["loc"])
        if place[:1] == ["body"]:
            del place[0]
        if isinstance(body, Mapping) and isinstance(place[0] if place else "", int):
            value = UNKNOWN  # the place is relative to a value inside
        for number, part in enumerate(place, start=1):
            here = _holds(value, part) or (number == len(place) and error["type"] == "missing")
            inner = node.parts if here else node.members
            node = inner.setdefault(part, _Node())
            value = _inside(value, part) if here else value
        node.errors.append(error)
    return root


def _holds(value: object, part: str | int) -> bool:
    if value is UNKNOWN:
        name = str(part)
        return isinstance(part, int) or (name.isidentifier() and name.islower())
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _inside(value: object, part: str | int) -> object:
    if isinstance(value, list | Mapping) and _holds(value, part):
        inner: object = value[part]  # type: ignore[index]
        return inner
    return UNKNOWN


def _unknown_tag(node: _Node, value: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the tag whose value no member of a union has, and the message, if there is one."""
    for tag in reversed(_TAGS):
        known = [
            str(error["ctx"]["expected"])
            for error in node.leaves()
            if error["type"] == "literal_error" and error["loc"][-1] == tag
        ]
        if known and tag in value:
            names = list(dict.fromkeys(known))
            more = ", ..." if len(names) > _NAMED else ""
            given = repr(value[tag])[:_SHOWN]
            return tag, f"{given} is not one of {', '.join(names[:_NAMED])}{more}"
    return None


def _message(error: JsonObject) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    why = error.get("ctx", {}).get("error")
    return f"{message}: {why}" if error["type"] == "json_invalid" else message


def _sentence(path: str, message: str) -> tuple[str, str]:
    path = path.removeprefix(".") or "body"
    return f"{path}: {message}", path
