"""Errors of a request in the forms that vLLM's server sends to clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from pydantic import ValidationError

from turnwise.errors import DeadlineError, EngineError, InputError, TrajectoryError
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai.errors import UNKNOWN, errors_of, explain


@contextmanager
def refusing() -> Iterator[None]:
    """Convert errors of a request to the form that vLLM sends to the client."""
    try:
        yield
    except vllm.VLLMError:
        raise
    except (InputError, TrajectoryError) as error:
        parameter = getattr(error, "parameter", "messages")
        raise vllm.VLLMValidationError(str(error), parameter=parameter) from error
    except Exception as error:  # a client's messages may be anything
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            why, _ = explain(errors_of(error), UNKNOWN)
        message = f"messages cannot be read: {why}"
        raise vllm.VLLMValidationError(message, parameter="messages") from error


@contextmanager
def for_clients() -> Iterator[None]:
    """Raise errors in the form that vLLM's application sends to clients."""
    try:
        yield
    except Exception as error:
        if (shown := client_error(error)) is error:
            raise
        raise shown from error


def client_error(error: Exception) -> Exception:
    """Return an error in the form that vLLM sends to a client."""
    shown: Exception = error
    if isinstance(error, EngineError | DeadlineError):
        shown = vllm.GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    elif isinstance(error, InputError):
        shown = vllm.VLLMValidationError(str(error))
    elif isinstance(error, TrajectoryError):  # the request's own processor fails each time
        shown = vllm.GracefulHTTPError(str(error), HTTPStatus.UNPROCESSABLE_ENTITY)
    return shown
