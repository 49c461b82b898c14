"""Reading of request bodies in FastAPI: decoding, and validation against the type of the route.

FastAPI itself makes an error for every mistake in a body before a handler runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, request_response
from starlette.requests import Request
from starlette.responses import Response

from turnwise.internals import internal
from turnwise.internals.pydantic import OF_A_TYPE, bound, odd_value

Decode = Callable[[Request, bytes], object]
"""A function that returns the value of a request's JSON body; it raises JSONDecodeError when the
body is not JSON."""


def read_bodies(app: FastAPI, decode: Decode) -> None:
    """Read the bodies of an application's routes with `decode`, and bound the time and memory of
    validation by the body's size. If a type's own code fails on a value, report this as a
    validation error, too."""

    class Reading(Request):
        async def json(self) -> Any:
            value = decode(self, await self.body())
            await asyncio.sleep(0)  # lets other requests run between decoding and validation
            return value

    async def answer(handle: Callable[..., Any], request: Request) -> Response:
        response: Response = await handle(Reading(request.scope, request.receive, request._send))
        return response

    for route in app.routes:
        if isinstance(route, APIRoute):
            for field in _fields(route.dependant):
                bound(field._type_adapter)
                field.validate = partial(_validate, field)  # type: ignore[method-assign]
            route.app = request_response(partial(answer, route.get_route_handler()))


def _fields(dependant: Dependant) -> Iterator[ModelField]:
    yield from dependant.body_params
    for inner in dependant.dependencies:
        yield from _fields(inner)


def _validate(
    field: ModelField, value: Any, values: Any = None, *, loc: tuple[int | str, ...] = ()
) -> tuple[Any, list[dict[str, Any]]]:
    try:
        return ModelField.validate(field, value, {}, loc=loc)
    except OF_A_TYPE as error:
        named, said = odd_value(error, value)
        return None, [{"type": "value_error", "loc": (*loc, *named), "msg": said}]


internal(ModelField, "validate", "self", "value", "values")
internal(APIRoute, "get_route_handler", "self")
internal(Request({"type": "http"}), "_send")
