"""Chat Completions of a second model behind a URL, such as a judge or a simulated user."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from turnwise.core.endpoint import Endpoint
from turnwise.core.optional import Foreign
from turnwise.core.untrusted import AnswerError, read_answer
from turnwise.trajectory.prefix import without_reasoning

_MAX_TOKENS = 1 << 40  # a larger number from a server is ignored as wrong


class _Choice(TypedDict):
    message: dict[str, Foreign]
    finish_reason: NotRequired[str | None]


class _Completion(TypedDict):
    choices: list[_Choice]
    usage: NotRequired[dict[str, Foreign] | None]


_COMPLETION = TypeAdapter(_Completion)


async def complete(
    endpoint: Endpoint,
    body: Mapping[str, object],
    spent: Counter[str],
    check: Callable[[str], object] = bool,
) -> tuple[str, str | None]:
    """Return the text of a model's answer without reasoning, and the finish_reason. `check` may
    reject a text by raising AnswerError; retries and errors are as in `Endpoint.post`. The numbers
    of requests, retries and tokens are added to `spent`."""

    async def read(answer: bytes) -> tuple[str, str | None]:
        completion = read_answer(answer, _COMPLETION)
        usage = completion.get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name)
            spent[name] += count if isinstance(count, int) and 0 < count < _MAX_TOKENS else 0
        if not completion["choices"]:
            raise AnswerError("sent no choice")
        choice = completion["choices"][0]
        text = without_reasoning(str(choice["message"].get("content") or ""))
        check(text)
        return text, choice.get("finish_reason")

    return await endpoint.post("chat/completions", body, read, spent)
