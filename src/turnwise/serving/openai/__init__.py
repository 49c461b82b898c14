"""The OpenAI-compatible server of one engine or of all."""

from typing import TYPE_CHECKING

from turnwise.core.aio import run_in_thread

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer


async def import_server() -> "type[OpenAIServer]":
    """Import the server's class in a thread: vLLM's application takes seconds."""

    def import_it() -> "type[OpenAIServer]":
        from turnwise.serving.openai.server import OpenAIServer

        return OpenAIServer

    return await run_in_thread(import_it)
