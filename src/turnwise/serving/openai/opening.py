"""Making the OpenAI server without blocking the event loop while its modules are imported."""

from typing import TYPE_CHECKING

from turnwise.config import Config
from turnwise.core.aio import run_in_thread
from turnwise.core.optional import Foreign
from turnwise.engine.protocol import Generator

if TYPE_CHECKING:
    from turnwise.serving.openai.server import OpenAIServer


async def import_server() -> "type[OpenAIServer]":
    """Import the server's class in a thread: vLLM's application takes seconds."""

    def load() -> "type[OpenAIServer]":
        from turnwise.serving.openai.server import OpenAIServer

        return OpenAIServer

    return await run_in_thread(load)


async def make_server(
    config: Config, generator: Generator, port: int | None = None, **more: Foreign
) -> "OpenAIServer":
    """Make a server; `more` are the other arguments of `OpenAIServer`."""
    return (await import_server())(config, generator, port, **more)
