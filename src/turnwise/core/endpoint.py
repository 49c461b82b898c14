"""A client of HTTP servers that answer with JSON: judges, simulated users, sandboxes elsewhere.

A request is tried again within one deadline. What a server answers is not trusted: it is read up to
a largest size, and a redirect is an error.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import aiohttp

from turnwise.core.deadlines import deadline
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import IDENTITY, MAX_BYTES, AnswerError, read_body
from turnwise.core.user_code import use_daemon_threads
from turnwise.errors import DeadlineError, TrajectoryError, first_line

_T = TypeVar("_T")
_PASSING = (408, 409, 429)  # statuses, besides 5xx, after which the same request may succeed
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts if the server names none
_jitter = random.Random()  # the global one is the run's
_SHOWN = 300  # characters of an error's body that a message has


class Endpoint:
    """The server at `url`. Its failures are `REASON_error` and `REASON_timeout`; their messages
    begin with `who` ("the judge m"), and name `key` as that of the deadline."""

    def __init__(
        self,
        url: str,
        *,
        who: str,
        reason: str,
        seconds: float,
        key: str = "timeout",
        retries: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._who, self._reason, self._key = who, reason, key
        self._seconds, self._retries = seconds, retries
        self._headers = {**IDENTITY, **(headers or {})}

    async def ask(
        self,
        path: str,
        body: object,
        read: Callable[[bytes], _T],
        *,
        method: str = "POST",
        largest: int = MAX_BYTES,
        counts: Counter[str] | None = None,
    ) -> _T:
        """Send JSON, and return what `read` makes of the answer, of at most `largest` bytes.

        Connection errors, 408, 409, 429, 5xx and answers that `read` refuses with an AnswerError
        are tried again, after growing pauses or after the seconds that the server names. `counts`
        gets the `requests` and `retries`. TrajectoryError, with the server's own words, when no
        attempt succeeds in time.
        """
        counts, failure = Counter() if counts is None else counts, AnswerError("")
        try:
            async with deadline(self._seconds, f"{self} did not answer", self._key):
                for attempt in range(self._retries + 1):
                    counts["retries" if attempt else "requests"] += 1
                    pause: float | None = 0.0
                    try:
                        status, pause, answer = await self._send(method, path, body, largest)
                        if 200 <= status < 300:
                            return read(answer)
                        said = answer[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
                        failure = AnswerError(f"answered {status}: {said}")
                    except AnswerError as error:
                        failure = error
                    except (aiohttp.ClientError, OSError) as error:
                        failure = AnswerError(f"cannot be reached: {first_line(error)}")
                    growing = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 9))
                    if pause is None or attempt == self._retries or pause > self._seconds:
                        break
                    await asyncio.sleep(pause or growing * _jitter.uniform(0.75, 1.0))
        except DeadlineError as error:
            last = f"; in its last attempt, it {failure}" if str(failure) else ""
            raise TrajectoryError(f"{self._reason}_timeout", f"{error}{last}") from None
        raise TrajectoryError(f"{self._reason}_error", f"{self} {failure}") from failure

    async def _send(
        self, method: str, path: str, body: object, largest: int
    ) -> tuple[int, float | None, bytes]:
        """Return the status, the seconds to wait before another attempt (0 if the server names
        none; None if that would fail too), and the answer."""
        use_daemon_threads(asyncio.get_running_loop())  # in which aiohttp looks up names
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), trust_env=True
            ) as session,
            session.request(
                method,
                self.url + path,
                json=body,
                headers=self._headers | trace_headers(),
                allow_redirects=False,
            ) as response,
        ):
            answer, status, pause = await read_body(response, largest), response.status, 0.0
            if not (200 <= status < 300 or status >= 500 or status in _PASSING):
                return status, None, answer
            with suppress(ValueError):  # `Retry-After`, RFC 9110, section 10.2.3, also has dates
                pause = max(pause, float(response.headers.get("retry-after", "")))
            return status, pause, answer

    def __str__(self) -> str:
        return f"{self._who} at {self.url}"
