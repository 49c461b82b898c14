"""The OpenAI-compatible server of one engine or of all."""

from importlib import import_module
from typing import TYPE_CHECKING

from turnwise.core.aio import run_in_thread

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer as OpenAIServer


async def import_server() -> "type[OpenAIServer]":
    """Import the server's class in a thread: vLLM's application takes seconds."""
    module = await run_in_thread(import_module, "turnwise.serving.openai.server")
    server: type[OpenAIServer] = module.OpenAIServer
    return server
