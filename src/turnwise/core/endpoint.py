"""A client of HTTP servers that answer with JSON, such as models or sandboxes behind a URL.

A request to a server that is away or busy is repeated until the deadline; after an unusable answer,
it is repeated a number of times. Answers are not trusted: their size is limited, and a redirect is
an error.

To add a client of a server that answers with JSON: use an `Endpoint`, which handles retries and the
deadline.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from turnwise.core.deadlines import deadline
from turnwise.core.http_client import HttpClient, HttpError
from turnwise.core.untrusted import MAX_BYTES, AnswerError
from turnwise.errors import DeadlineError, InputError, TrajectoryError, first_line

_T = TypeVar("_T")
_AWAY = (408, 409, 429, 502, 503, 504)  # statuses of a server that is busy, or not there yet
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts if the server names none
_SHOWN = 300  # maximum number of bytes of an error's body in a message


class Endpoint:
    """The server at a URL.

    Args:
        model: Model that each request names; None leaves the name out.
        who: Name of the server in messages: "the judge".
        reason: Beginning of the reasons of its failures, `REASON_error` and `REASON_timeout`.
        timeout: Deadline in seconds for all attempts of a request together.
        retries: Repetitions after an unusable answer; 0 sends each request once, even if the server
            is away.
        api_key_variable: Environment variable with the server's key (InputError when it is not
            set); None sends no key.
        key: Configuration key of the timeout, for messages.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        who: str,
        reason: str,
        timeout: float,
        retries: int,
        api_key_variable: str | None,
        key: str = "timeout",
    ) -> None:
        self.model, self.url, self._who = model, url.rstrip("/"), who
        self._reason, self._timeout, self._key, self._retries = reason, timeout, key, retries
        self._headers = dict[str, str]()
        if api_key_variable is not None:
            if not (secret := os.environ.get(api_key_variable)):
                raise InputError(f"{who}: the environment variable {api_key_variable} is not set")
            self._headers["authorization"] = f"Bearer {secret}"

    async def post(
        self,
        path: str,
        body: Mapping[str, object],
        read: Callable[[bytes], Awaitable[_T]],
        spent: Counter[str],
        largest: int = MAX_BYTES,
    ) -> _T:
        """Send JSON, and return what `read` makes of the answer, of at most `largest` bytes; add
        the numbers of `requests` and `retries` to `spent`.

        After a connection error, 408, 409, 429, 502, 503 or 504, the request is repeated until the
        deadline; after any other 5xx, or an answer that `read` refuses with an AnswerError, it is
        repeated `retries` times. Pauses grow, and are longer still if the server asks for more
        seconds. Raise TrajectoryError, which quotes the server, when no attempt succeeds.
        """
        body = {"model": self.model, **body} if self.model else body
        url = f"{self.url}/{path}"
        failure = AnswerError("")
        try:
            async with deadline(self._timeout, f"{self} did not answer", self._key):
                left = self._retries
                for attempt in itertools.count():
                    spent["retries" if attempt else "requests"] += 1
                    pause, away = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 9)), False
                    try:
                        async with HttpClient(proxies=True) as client:
                            answer = await client.request(
                                "POST", url, json=body, headers=self._headers, largest=largest
                            )
                    except AnswerError as error:
                        failure = error
                    except (HttpError, InputError) as error:  # InputError: of the URL or the key
                        failure = AnswerError(f"cannot be reached: {first_line(error)}")
                        away = isinstance(error, HttpError)
                    else:
                        if answer.ok:
                            try:
                                return await read(answer.body)
                            except AnswerError as error:
                                failure = error
                        else:
                            status, said = answer.status, answer.body[:_SHOWN]
                            why = f"answered {status}: {said.decode(errors='replace')}"
                            failure, away = AnswerError(why), status in _AWAY
                            if status < 500 and not away:
                                break
                            with suppress(ValueError):  # `Retry-After` of RFC 9110 may be a date
                                pause = max(pause, float(answer.headers.get("retry-after", "")))
                    left -= not away
                    if left < 0 or not self._retries or pause > self._timeout:
                        break
                    await asyncio.sleep(pause)
        except DeadlineError as error:
            last = f"; in its last attempt, it {failure}" if str(failure) else ""
            raise TrajectoryError(f"{self._reason}_timeout", f"{error}{last}") from error
        raise TrajectoryError(f"{self._reason}_error", f"{self} {failure}") from failure

    def __str__(self) -> str:
        return " ".join(filter(None, (self._who, self.model, "at", self.url)))
