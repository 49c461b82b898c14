"""A client of Chat Completions: another model behind a URL, asked with retries within a deadline.

What the server answers is not trusted: it is read up to a largest size, and only as its type.
"""

import asyncio
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import NamedTuple, NotRequired
from urllib.parse import urlsplit

import aiohttp
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.core.deadlines import deadline
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import IDENTITY, AnswerError, read_answer, read_body
from turnwise.core.user_code import use_daemon_threads
from turnwise.errors import DeadlineError, InputError, TrajectoryError, first_line
from turnwise.trajectory import Message

_NO_KEY = "none"
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_PASSING = (408, 409, 429)  # statuses, besides 5xx, after which the same request may succeed
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts if the server names none
_jitter = random.Random()  # the global one is the run's
_SHOWN = 300  # characters of an error's body that a message has


class _Said(TypedDict):
    content: NotRequired[str | None]


class _Choice(TypedDict):
    message: _Said
    finish_reason: NotRequired[str | None]


class _Usage(TypedDict):
    prompt_tokens: NotRequired[int | None]
    completion_tokens: NotRequired[int | None]


class _Completion(TypedDict):
    choices: list[_Choice]
    usage: NotRequired[_Usage | None]


_COMPLETION = TypeAdapter(_Completion)


class Reply(NamedTuple):
    """The first choice of a completion."""

    text: str  # "" if it has none
    finish_reason: str | None


class _FailedAttempt(Exception):
    """An attempt without a usable answer, with the pause before the next; None allows no other."""

    def __init__(self, message: str, pause: float | None) -> None:
        super().__init__(message)
        self.pause = pause


class ChatEndpoint:
    """The model of one URL; any number of requests share its connections.

    Args:
        url: URL up to and including `/v1`.
        who: Noun phrase for messages, such as "the judge"; model and URL are added.
        reason: Beginning of the reasons of failures, `REASON_timeout` and `REASON_error`.
        timeout: Seconds for one answer, retries included; `key` names it in messages.
        api_key_variable: Name of the environment variable with the key; None sends none.
        request: Further parameters of each request.

    Raises:
        InputError: when the variable of the key is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        who: str,
        reason: str,
        timeout: float,
        retries: int,
        key: str = "timeout",
        api_key_variable: str | None = None,
        request: Mapping[str, object] | None = None,
    ) -> None:
        api_key = _NO_KEY if api_key_variable is None else os.environ.get(api_key_variable)
        if not api_key:
            raise InputError(f"the environment variable {api_key_variable} is not set")
        self.model, self._url, self._who = model, url.rstrip("/"), who
        self._reason, self._timeout, self._key, self._retries = reason, timeout, key, retries
        self._headers = IDENTITY | {"authorization": f"Bearer {api_key}"}
        self._request = dict(request or {})
        self._session: aiohttp.ClientSession | None = None
        self._users = 0

    async def ask(
        self,
        messages: Sequence[Message],
        spent: Counter[str],
        check: Callable[[str], object] = bool,
        request: Mapping[str, object] | None = None,
    ) -> Reply:
        """Return the answer to messages, asked with these parameters too; adds to `spent` the
        requests, retries and tokens.

        Connection errors, 408, 409, 429, 5xx and texts that `check` refuses with an AnswerError
        are tried again, after growing pauses or after the time that the server names.

        Raises:
            TrajectoryError: with the server's own words, when no attempt succeeds in time.
        """
        parameters = {**self._request, **(request or {})}
        body = {"model": self.model, **parameters, "messages": list(messages)}
        failure = _FailedAttempt("", None)
        try:
            async with deadline(self._timeout, f"{self} did not answer", self._key):
                for attempt in range(self._retries + 1):
                    spent["retries" if attempt else "requests"] += 1
                    try:
                        return await self._attempt(body, spent, check)
                    except _FailedAttempt as error:
                        failure = error
                    growing = _FIRST_PAUSE * 2**attempt * _jitter.uniform(0.75, 1.0)
                    pause = failure.pause or min(_LONGEST_PAUSE, growing)
                    if failure.pause is None or attempt == self._retries or pause > self._timeout:
                        break
                    await asyncio.sleep(pause)
        except DeadlineError as error:
            last = f", and its last attempt failed: {failure}" if str(failure) else ""
            raise TrajectoryError(f"{self._reason}_timeout", f"{error}{last}") from None
        what = f"{self} gave no answer in up to {self._retries + 1} attempts"
        raise TrajectoryError(f"{self._reason}_error", f"{what}: {failure}") from failure

    async def _attempt(
        self, body: Mapping[str, object], spent: Counter[str], check: Callable[[str], object]
    ) -> Reply:
        url, headers = f"{self._url}/chat/completions", self._headers | trace_headers()
        try:
            async with (
                self._connected() as session,
                session.post(url, json=body, headers=headers) as response,
            ):
                answer = await read_body(response)
            if response.status >= 400:
                passes = response.status in _PASSING or response.status >= 500
                said = answer[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
                raise _FailedAttempt(
                    f"Error code: {response.status} - {said}",
                    named_pause(response.headers) if passes else None,
                )
            completion = read_answer(answer, _COMPLETION)
            for name, count in (completion.get("usage") or {}).items():
                spent[name] += max(0, count) if isinstance(count, int) else 0
            if not completion["choices"]:
                raise AnswerError("sent no choice")
            choice = completion["choices"][0]
            reply = Reply(choice["message"].get("content") or "", choice.get("finish_reason"))
            check(reply.text)
            return reply
        except AnswerError as error:
            raise _FailedAttempt(f"it {error}", 0.0) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _FailedAttempt(f"Connection error. ({first_line(error)})", 0.0) from error

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Share a session among the requests in flight; the last one closes it."""
        if self._session is None:
            # Its look-ups of names are asyncio's, in the default executor.
            use_daemon_threads(asyncio.get_running_loop())
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True)
        self._users += 1
        try:
            yield self._session
        finally:
            self._users -= 1
            if not self._users:
                session, self._session = self._session, None
                await session.close()

    def __str__(self) -> str:
        return f"{self._who} {self.model} at {self._url}"


def without_thoughts(text: str) -> str:
    """Return a text without what is between `<think>` tags, of which the last may be open."""
    return _THOUGHTS.sub("", text).strip() if "<think>" in text else text


def is_http(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https")


def named_pause(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait (RFC 9110, section 10.2.3, or OpenAI's
    `retry-after-ms`); 0 if it names none that can be read."""
    text = headers.get("retry-after", "")
    with suppress(ValueError):
        seconds = float(headers.get("retry-after-ms", "x")) / 1000
        return seconds if 0 < seconds < math.inf else 0.0
    with suppress(ValueError):
        return seconds if 0 < (seconds := float(text)) < math.inf else 0.0
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0
