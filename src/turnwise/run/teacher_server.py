"""A teacher behind a URL: log-probs of given tokens, from any OpenAI-compatible server.

The server's text of every token is compared with that of the policy's tokenizer, so that no
log-prob of another text is used.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import aiohttp
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.config import TeacherConfig
from turnwise.core.aio import run_in_thread
from turnwise.core.json_types import JsonObject
from turnwise.core.untrusted import IDENTITY, AnswerError, Number, read_answer, read_body
from turnwise.core.variables import expanded
from turnwise.errors import InputError, TrajectoryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TEACHER_ERROR = "teacher_error"  # reason of a trajectory that a teacher could not score
_FORMS: tuple[JsonObject, ...] = ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1})
"""Keys of a request that ask for the log-probs of its prompt: vLLM's, and OpenAI's."""
_AT_ONCE = 64  # requests in flight
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each repetition of a request that the server could not take."""
_PROBED = 128  # tokens whose texts are compared before anything is sampled
_BYTES, _VALUES = 512, 64  # most of an answer for each token, and for a thousand more
_ERROR_CHARS = 500


class _Scored(TypedDict, total=False):
    logprob: Number
    decoded_token: str | None


class _Echoed(TypedDict):
    tokens: list[str]
    token_logprobs: list[Number | None]


class _Choice(TypedDict, total=False):
    prompt_logprobs: list[dict[str, _Scored] | None] | None
    logprobs: _Echoed | None


class _Answer(TypedDict):
    choices: list[_Choice]


_ANSWER = TypeAdapter(_Answer)
_Row = tuple[float | None, str | None]  # log-prob and text of a token; None if there is none


class _BusyError(Exception):
    """A request that may succeed when it is repeated."""


class TeacherServer:
    """The model at the `url` of a teacher; `seconds` is the deadline of a request."""

    def __init__(
        self, teacher: TeacherConfig, key: str, tokenizer: "Tokenizer", seconds: float
    ) -> None:
        assert teacher.url is not None
        self._url = f"{teacher.url.rstrip('/')}/completions"
        self._who = f"{key}: {teacher.url}"
        self._headers = IDENTITY | expanded(teacher.headers, f"{key}: headers")
        named = {} if teacher.model is None else {"model": teacher.model}
        self._body: JsonObject = {**named, "max_tokens": 1, "temperature": 0}
        self._form = _FORMS[0]
        self._tokenizer = tokenizer
        self._texts: dict[int, set[str]] = {}
        self._seconds = seconds
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Find the form of log-probs that the server has, and compare the tokenizers.

        Raises:
            InputError: when the server cannot be used, or naming the first token that differs.
        """
        timeout = aiohttp.ClientTimeout(total=self._seconds)
        self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        known = sorted(self._tokenizer.get_vocab().values())
        probe = known[:: max(1, len(known) // _PROBED)] + self._tokenizer.all_special_ids[:_PROBED]
        why = ""
        for self._form in _FORMS:
            try:
                if any(text for _, text in (await self._ask(probe))[1:]):
                    return
                why = why or "it gives no texts of tokens, to compare its tokenizer with"
            except (_BusyError, AnswerError) as error:  # the first is about vLLM's own form
                why = why or f"it {error}"
        raise InputError(f"{self._who} cannot teach: {why}")

    async def score(self, token_ids: Sequence[int]) -> list[float | None]:
        """Return the log-prob of each token after those before it; None for the first.

        Raises:
            InputError: naming the first token of which the server's tokenizer has another text.
            TrajectoryError: when the server refuses the sequence, or cannot answer for minutes.
        """
        async with self._places:
            for pause in (*_PAUSES, None):
                try:
                    return [logprob for logprob, _ in await self._ask(token_ids)]
                except (_BusyError, AnswerError) as error:
                    if pause is None or isinstance(error, AnswerError):
                        raise TrajectoryError(TEACHER_ERROR, f"{self._who} {error}") from error
                await asyncio.sleep(pause)
        raise AssertionError("the last repetition returns or raises")

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _ask(self, token_ids: Sequence[int]) -> list[_Row]:
        """Send a request; `_BusyError` if it may be repeated, `AnswerError` if it is refused."""
        assert self._http is not None, "the teacher is not started"
        body, size = {**self._body, **self._form, "prompt": list(token_ids)}, len(token_ids) + 1000
        try:
            async with self._http.post(self._url, json=body, allow_redirects=False) as answer:
                said, status = await read_body(answer, _BYTES * size), answer.status
        except (aiohttp.ClientError, OSError) as error:
            late = f"no answer within {self._seconds:g} s (rollout.stall_timeout)"
            raise _BusyError(f"cannot be reached: {str(error) or late}") from error
        if not 200 <= status < 300:
            text = said[:_ERROR_CHARS].decode(errors="replace")
            kind = _BusyError if status >= 500 or status in (408, 429) else AnswerError
            raise kind(f"answered {status}: {text}")
        return await run_in_thread(self._read, said, token_ids, _VALUES * size)

    def _read(self, said: bytes, token_ids: Sequence[int], most: int) -> list[_Row]:
        choice = next(iter(read_answer(said, _ANSWER, most)["choices"]), _Choice())
        rows: list[_Row] = []
        if (scored := choice.get("prompt_logprobs")) is not None:
            for token, row in zip(token_ids, scored, strict=False):
                own = (row or {}).get(str(token)) or _Scored()
                rows.append((own.get("logprob"), own.get("decoded_token")))
        elif (echoed := choice.get("logprobs")) is not None:
            rows = list(zip(echoed["token_logprobs"], echoed["tokens"], strict=False))
        rows = rows[: len(token_ids)]
        found = 1 + sum(logprob is not None for logprob, _ in rows[1:])
        if found != len(token_ids):
            raise AnswerError(f"gave the log-probs of {found} of {len(token_ids)} tokens")
        self._compare(token_ids, rows)
        return rows

    def _compare(self, token_ids: Sequence[int], rows: Sequence[_Row]) -> None:
        for token, (_, text) in zip(token_ids, rows, strict=True):
            plain = str(self._tokenizer.decode([token]))
            if (own := self._texts.get(token)) is None:
                piece = str(self._tokenizer.convert_ids_to_tokens(token))
                own = {plain, piece, piece.replace("\u2581", " "), f"token_id:{token}"}
                self._texts[token] = own
            # The text of a part of a character depends on the tokens beside it.
            partial = any("\ufffd" in one for one in (*own, text or ""))
            if text and text not in own and not partial and not text.startswith("bytes:"):
                raise InputError(
                    f"{self._who} has another tokenizer than the policy: token {token} is "
                    f"{plain!r} in the policy's, and {text!r} in the teacher's"
                )
