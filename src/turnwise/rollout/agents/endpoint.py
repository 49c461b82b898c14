"""Agents behind an HTTP endpoint: one POST for each trajectory."""

from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.core.untrusted import IDENTITY, AnswerError, read_answer, read_body
from turnwise.errors import InputError, TrajectoryError
from turnwise.rollout.agents.report import AgentReport, read_report

if TYPE_CHECKING:
    pass

_ANYTHING: TypeAdapter[object] = TypeAdapter(object)

_CONNECT_SECONDS = 30.0
_REPLY_BYTES = 4 << 20
"""Maximum size of a reply."""
_ERROR_CHARS = 500
"""Number of characters of a failed reply in the error message."""


def is_endpoint(agent: str) -> bool:
    """Return whether `rollout.agent` is the URL of an endpoint.

    Example:
        >>> is_endpoint("http://127.0.0.1:9000/run")
        True
    """
    return agent.startswith(("http://", "https://"))


async def run_endpoint(url: str, request: JsonObject) -> AgentReport:
    """Post a request, and return the report that the endpoint answers when the agent is done.

    The connection is closed when this call is cancelled.

    Args:
        request: The row, the base URL, the model's name and the trajectory's id.

    Raises:
        InputError: when the URL cannot be used.
        TrajectoryError: `agent_unreachable`, without a connection; `agent_error`, for a status
            other than 2xx; `agent_reply`, when the reply cannot be used.

    Example:
        >>> await run_endpoint("http://127.0.0.1:9000/run", {"row": row, "base_url": base_url})
    """
    import aiohttp  # only for endpoints

    who = f"the agent {url}"
    # The trajectory's own deadlines limit the answer.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.post(
                url, json=request, headers=IDENTITY | trace_headers(), allow_redirects=False
            ) as response,
        ):
            body, status = await read_body(response, _REPLY_BYTES), response.status
    except aiohttp.InvalidURL as error:
        raise InputError(f"rollout.agent: {url} is not a URL") from error
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        raise TrajectoryError("agent_unreachable", f"{who} cannot be reached: {error}") from error
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TrajectoryError(
            "agent_error", f"{who} closed the connection: {type(error).__name__}: {error}"
        ) from error
    text = body[: 4 * _ERROR_CHARS].decode(errors="replace")[:_ERROR_CHARS]
    if not 200 <= status < 300:
        raise TrajectoryError("agent_error", f"{who} answered {status}: {text}")
    try:
        return read_report(read_answer(body, _ANYTHING) if body else None, who)
    except AnswerError as error:
        raise TrajectoryError("agent_reply", f"{who} {error}") from None
