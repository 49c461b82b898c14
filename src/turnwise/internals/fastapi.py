"""FastAPI's reading of a body: how it is decoded, and validated against the route's type.

FastAPI's own way makes an error of everything that is wrong in a body, before a handler is asked.
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
"""Returns what a request's body is in JSON; JSONDecodeError when it is none."""


def read_bodies(app: FastAPI, decode: Decode) -> None:
    """Let the bodies of an application's routes be read by `decode`, and validated in a time and
    memory that follow their size. What a validator cannot look into is one more mistake."""

    class Reading(Request):
        async def json(self) -> Any:
            value = decode(self, await self.body())
            await asyncio.sleep(0)  # other requests come between reading a body and checking it
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
