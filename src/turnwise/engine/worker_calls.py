"""Calls of the processes of one vLLM engine.

Importing this module does not import vLLM, which takes seconds.
"""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, EngineError, InputError, WeightUpdateError

if TYPE_CHECKING:
    from turnwise.engine.vllm_api import AsyncLLM

_T = TypeVar("_T")
_DEATH_CHECK_SECONDS = 0.5
_ERRORS = {kind.__name__: kind for kind in (DeadlineError, InputError, WeightUpdateError)}


async def call_workers(llm: "AsyncLLM", name: str, method: str, *args: object) -> list[JsonObject]:
    """Call a method of an engine's workers, which return plain values; see `vllm_worker`.

    Args:
        name: Name of the engine in errors.

    Raises:
        EngineError: when the engine died.
        DeadlineError, InputError, WeightUpdateError: the first error among the replies.
    """
    call = llm.collective_rpc(method, args=args)
    replies: list[JsonObject] = await answered(llm, name, f"a call of {method}", call)
    for reply in replies:
        if "error" in reply:
            raise _ERRORS[reply["error"]](f"{name}: {reply['message']}")
    return replies


async def answered(llm: "AsyncLLM", name: str, what: str, call: Coroutine[Any, Any, _T]) -> _T:
    """Await an answer of an engine's process.

    Args:
        name: Name of the engine in errors.
        what: The call in errors.

    Raises:
        EngineError: when the engine died: vLLM never answers a call that was in flight then.
    """
    from turnwise.engine import vllm_api as vllm  # seconds to import

    answer = asyncio.ensure_future(call)
    try:
        while not answer.done():
            await asyncio.wait([answer], timeout=_DEATH_CHECK_SECONDS)
            if llm.errored and not answer.done():
                raise EngineError(f"{name} died during {what}")
        return answer.result()
    except vllm.EngineDeadError as error:
        raise EngineError(f"{name} died during {what}") from error
    finally:
        answer.cancel()
