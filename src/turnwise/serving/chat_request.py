"""Chat requests without HTTP: checked as vLLM checks them, with OpenAI's answers and errors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from turnwise.config import SamplingConfig
from turnwise.core.json_types import JsonObject
from turnwise.errors import EngineError, InputError, TurnwiseError, first_line

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from turnwise.serving.openai.vllm_api import ChatCompletionRequest

_HEADERS = {"x-request-id", "x-session-id"}
_SAMPLING_NAMES = {"max_completion_tokens": "max_tokens", "vllm_xargs": "logits_processor_args"}
"""Our names of sampling keys, by OpenAI's and vLLM's."""


def parse_request(request: Mapping[str, object]) -> "tuple[ChatCompletionRequest, dict[str, str]]":
    """Return vLLM's request object for a request's keys, and the request's headers.

    Raises:
        InputError: naming the key that is unknown or has a wrong value.

    Example:
        >>> parsed, headers = parse_request({"messages": [{"role": "user", "content": "2 + 2?"}]})
    """
    from turnwise.engine.vllm_api import ChatCompletionRequest

    tree: JsonObject = dict(request)
    tree |= tree.pop("extra_body", None) or {}
    given = tree.pop("extra_headers", None) or {}
    headers = {name.lower(): str(value) for name, value in given.items()}
    if unknown := headers.keys() - _HEADERS:
        raise InputError(
            f"extra_headers takes x-request-id and x-session-id, and not {min(unknown)}"
        )
    if unknown := tree.keys() - ChatCompletionRequest.model_fields:
        raise InputError(f"a chat completion's request has no key {min(unknown)}")
    tree["messages"] = [_as_dict(message) for message in tree.get("messages", ())]
    try:
        parsed = ChatCompletionRequest(**tree)
    except ValueError as error:
        raise InputError(explain(error)) from error
    parsed.return_token_ids = True
    return parsed, headers


def parse_sampling(base: SamplingConfig, changes: Mapping[str, object]) -> SamplingConfig:
    """Return the configuration's sampling with a caller's changes, by our keys or OpenAI's.

    Raises:
        InputError: naming the key that is unknown or has a wrong value.
    """
    tree = {_SAMPLING_NAMES.get(name, name): value for name, value in changes.items()}
    if unknown := tree.keys() - SamplingConfig.model_fields:
        raise InputError(f"there is no sampling key {min(unknown)}")
    try:
        return SamplingConfig.model_validate(base.model_dump() | tree)
    except ValueError as error:
        raise InputError(f"sampling: {explain(error)}") from error


def completion_of(tree: JsonObject) -> "ChatCompletion":
    """Return vLLM's answer as OpenAI's.

    Raises:
        InputError, EngineError: when the answer is an error.
    """
    from openai.types.chat import ChatCompletion  # a second to import

    _raise_if_error(tree)
    return ChatCompletion.model_validate(tree)


def chunks_of(event: str) -> "Iterator[ChatCompletionChunk]":
    """Iterate over the chunks in an event of vLLM's stream.

    Raises:
        InputError, EngineError: when the event is an error.
    """
    from openai.types.chat import ChatCompletionChunk

    for line in event.splitlines():
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            tree = json.loads(data)
            _raise_if_error(tree)
            yield ChatCompletionChunk.model_validate(tree)


@contextmanager
def own_errors() -> Iterator[None]:
    """Convert errors of vLLM's application to ours; unknown ones pass unchanged."""
    from turnwise.serving.openai.vllm_api import GracefulHTTPError, VLLMError

    try:
        yield
    except TurnwiseError:
        raise
    except GracefulHTTPError as error:
        raise EngineError(str(error)) from error
    except (VLLMError, ValueError, TypeError) as error:
        raise InputError(explain(error)) from error


def explain(error: Exception) -> str:
    """Return an error as one sentence; for pydantic's errors the first, with its key."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (details := errors()):
        key = ".".join(str(part) for part in details[0]["loc"])
        return f"{key}: {details[0]['msg']}" if key else str(details[0]["msg"])
    return first_line(error)


def _as_dict(message: object) -> object:
    """Return a message as a dictionary; callers may pass OpenAI's objects, too."""
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def _raise_if_error(tree: JsonObject) -> None:
    error = tree.get("error")
    if error:
        kind = InputError if int(error.get("code") or 500) < 500 else EngineError
        raise kind(str(error.get("message")))
