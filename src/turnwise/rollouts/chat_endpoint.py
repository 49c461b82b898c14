"""A client of Chat Completions: another model behind a URL, asked with retries within a deadline.

What the server answers is not trusted: it is read up to a largest size, and only as its type.
"""

import asyncio
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NotRequired

import aiohttp
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.core.deadlines import deadline
from turnwise.core.optional import Foreign
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import IDENTITY, AnswerError, read_answer, read_body
from turnwise.core.user_code import use_daemon_threads
from turnwise.errors import DeadlineError, InputError, TrajectoryError, first_line
from turnwise.trajectory import Message

_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_PASSING = (408, 409, 429)  # statuses, besides 5xx, after which the same request may succeed
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts if the server names none
_jitter = random.Random()  # the global one is the run's
_SHOWN = 300  # characters of an error's body that a message has


class _Choice(TypedDict):
    message: dict[str, Foreign]
    finish_reason: NotRequired[str | None]


class _Completion(TypedDict):
    choices: list[_Choice]
    usage: NotRequired[dict[str, Foreign] | None]


_COMPLETION = TypeAdapter(_Completion)


class Reply(NamedTuple):
    """The first choice of a completion."""

    text: str  # "" if it has none
    finish_reason: str | None


class _FailedAttempt(Exception):
    """An attempt without a usable answer; the pause is None if another would fail too, and 0 if the
    server names none."""

    def __init__(self, message: str, pause: float | None = 0.0) -> None:
        super().__init__(message)
        self.pause = pause


class ChatEndpoint:
    """The model of one URL. Failures are `REASON_error` and `REASON_timeout`; `who` ("the judge")
    and `key`, that of the timeout, are for messages. InputError when the variable of the server's
    key is not set; None sends none."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        who: str,
        reason: str,
        timeout: float,
        retries: int,
        api_key_variable: str | None,
        key: str = "timeout",
    ) -> None:
        api_key = "none" if api_key_variable is None else os.environ.get(api_key_variable)
        if not api_key:
            raise InputError(f"the environment variable {api_key_variable} is not set")
        self.model, self._url, self._who = model, url.rstrip("/"), who
        self._reason, self._timeout, self._key, self._retries = reason, timeout, key, retries
        self._headers = IDENTITY | {"authorization": f"Bearer {api_key}"}

    async def ask(
        self,
        messages: Sequence[Message],
        request: Mapping[str, object],
        spent: Counter[str],
        check: Callable[[str], object] = bool,
    ) -> Reply:
        """Return the answer to messages; adds to `spent` the requests, retries and tokens.

        Connection errors, 408, 409, 429, 5xx and texts that `check` refuses with an AnswerError
        are tried again, after growing pauses or after the time that the server names.
        TrajectoryError, with the server's own words, when no attempt succeeds in time.
        """
        body = {"model": self.model, **request, "messages": list(messages)}
        failure = _FailedAttempt("")
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
        # aiohttp looks names up in the default executor.
        use_daemon_threads(asyncio.get_running_loop())
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
                session.post(url, json=body, headers=headers) as response,
            ):
                answer = await read_body(response)
            if response.status >= 400:
                passes = response.status in _PASSING or response.status >= 500
                said = answer[: 4 * _SHOWN].decode(errors="replace")[:_SHOWN]
                message = f"Error code: {response.status} - {said}"
                raise _FailedAttempt(message, named_pause(response.headers) if passes else None)
            completion = read_answer(answer, _COMPLETION)
            usage = completion.get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens"):
                count = usage.get(name)
                spent[name] += max(0, count) if isinstance(count, int) else 0
            if not completion["choices"]:
                raise AnswerError("sent no choice")
            choice = completion["choices"][0]
            reply = Reply(str(choice["message"].get("content") or ""), choice.get("finish_reason"))
            check(reply.text)
            return reply
        except AnswerError as error:
            raise _FailedAttempt(f"it {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _FailedAttempt(f"Connection error. ({first_line(error)})") from error

    def __str__(self) -> str:
        return f"{self._who} {self.model} at {self._url}"


def without_thoughts(text: str) -> str:
    """Return a text without what is between `<think>` tags, of which the last may be open."""
    return _THOUGHTS.sub("", text).strip() if "<think>" in text else text


def named_pause(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait (`Retry-After`, RFC 9110, section 10.2.3, or
    OpenAI's `retry-after-ms`); 0 if it names no number of them."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(ValueError):
            if (seconds := float(headers.get(name, "")) * unit) > 0:
                return seconds
    return 0.0
