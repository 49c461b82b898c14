"""One inference engine: token ids in, token ids out."""

from turnwise.engine.protocol import (
    Chunk,
    Completion,
    Engine,
    Generator,
    Request,
    Route,
    Sampling,
    generate,
)

__all__ = [
    "Chunk",
    "Completion",
    "Engine",
    "Generator",
    "Request",
    "Route",
    "Sampling",
    "generate",
]
