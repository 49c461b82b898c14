"""Calls of all worker processes of one vLLM engine.

Importing this module does not import vLLM, which takes seconds.
"""

import asyncio
from typing import TYPE_CHECKING

from turnwise.core.json_types import JsonObject
from turnwise.errors import DeadlineError, EngineError, InputError, WeightUpdateError

if TYPE_CHECKING:
    from turnwise.engine.vllm_api import AsyncLLM

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
    from turnwise.engine import vllm_api as vllm  # seconds to import

    call = asyncio.ensure_future(llm.collective_rpc(method, args=args))
    try:
        while not call.done():
            await asyncio.wait([call], timeout=_DEATH_CHECK_SECONDS)
            # A call that was in flight when the engine died is never answered.
            if llm.errored and not call.done():
                raise EngineError(f"{name} died during a call of {method}")
        replies: list[JsonObject] = call.result()
    except vllm.EngineDeadError as error:
        raise EngineError(f"{name} died during a call of {method}") from error
    finally:
        call.cancel()
    for reply in replies:
        if "error" in reply:
            raise _ERRORS[reply["error"]](f"{name}: {reply['message']}")
    return replies
