"""Bodies of requests: their JSON values are counted while they arrive, and each body is read once.

A limit in bytes does not bound the cost of a body. A value may take two bytes of the body, but a
hundred bytes of memory. Checking an object takes time on the event loop that all requests share.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Scope

from turnwise.core.untrusted import MAX_DEPTH, JsonCount
from turnwise.internals.fastapi import read_bodies

PROTOBUF = "/api/v1/"  # beginning of the paths where a body may be protobuf
TREE = "turnwise.tree"
"""Key of the ASGI scope that holds the `Tree` of a body that was read already."""
_VALUES, _KEYS, _NESTED = 65_536, 4_096, 1_024
"""Maximum numbers of values, of keys, and of objects and lists in a body, for each MB of
`serving.max_body_mb`."""


def is_protobuf(scope: Scope, headers: Headers) -> bool:
    """Return whether a body is one of Tinker's messages, whose values `tinker.wire` counts
    itself."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.endswith("x-protobuf") and scope["path"].startswith(PROTOBUF)


def check(count: JsonCount, megabytes: int) -> None:
    """Refuse a body with 413 if too many values have arrived, or with 400 if it is nested too
    deeply."""
    for what, number, each in (
        ("values", count.values, _VALUES),
        ("keys", count.keys, _KEYS),
        ("objects and lists", count.nested, _NESTED),
    ):
        if number > each * megabytes:
            raise HTTPException(
                413,
                f"the body has more than {each * megabytes:,} {what}: {each:,} for each MB of "
                "serving.max_body_mb",
            )
    if count.depth > MAX_DEPTH:
        raise HTTPException(400, f"the body is nested more than {MAX_DEPTH} objects and lists deep")


class Tree(NamedTuple):
    """A body, read as JSON."""

    value: Any
    standard: bool
    """Whether the body has no NaN, infinity or lone surrogate; Python's parser accepts these."""


def decoded(body: bytes, constant: Callable[[str], object] | None = None) -> Tree:
    """Read a body as JSON; raise JSONDecodeError when it is not valid. `constant` converts NaN and
    infinities."""
    try:
        return Tree(msgspec.json.decode(body), standard=True)
    except (ValueError, RecursionError):  # Python's parser accepts more
        pass
    try:
        read = json.loads(body.decode("utf-8-sig"), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("the text is not UTF-8", "", error.start) from None
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise json.JSONDecodeError(str(error), "", 0) from None
    return Tree(read, standard=False)


def read_once(app: FastAPI) -> None:
    """Let an application's routes use the trees in their scopes, instead of reading the bodies
    again."""

    def decode(request: Request, body: bytes) -> object:
        tree: Tree = request.scope[TREE] if TREE in request.scope else decoded(body)
        return tree.value

    read_bodies(app, decode)
