"""One inference engine: token ids in, token ids out."""

from turnwise.engine.protocol import (
    Chunk,
    Completion,
    Engine,
    Generator,
    Route,
    Sampling,
)

__all__ = ["Chunk", "Completion", "Engine", "Generator", "Route", "Sampling"]
