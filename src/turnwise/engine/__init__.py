"""One inference engine: token ids in, token ids out."""

from turnwise.engine.protocol import Completion, Engine, VersionSpan

__all__ = ["Completion", "Engine", "VersionSpan"]
