"""The HTTP client of connections to MCP servers by URL: its deadlines, and limits on answers."""

from collections.abc import AsyncIterator, Mapping

import httpx2

from turnwise.core.untrusted import IDENTITY, MAX_BYTES, MAX_VALUES, values_in

_CONNECT_SECONDS = 30.0


def http_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client whose JSON answers have at most `MAX_BYTES` bytes.

    It waits for answers without a deadline; calls have their own.
    """
    return httpx2.AsyncClient(
        headers={**IDENTITY, **headers},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=None),
        event_hooks={"response": [_limit]},
    )


async def _limit(response: httpx2.Response) -> None:
    # The SDK limits events itself; streams of them have no end.
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    """A body that fails when it becomes too long."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = values = 0
        async for part in self._body:
            size += len(part)
            values += values_in(part)
            if size > MAX_BYTES or values > MAX_VALUES:
                raise httpx2.StreamError(
                    f"a message of more than {MAX_BYTES:,} bytes or {MAX_VALUES:,} values"
                )
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
