"""An environment whose code makes OpenTelemetry spans of its own."""

from typing import Any

from opentelemetry import trace

import turnwise
from turnwise.trajectory import Trajectory

TRACER = trace.get_tracer("a shop's own")


class Shop(turnwise.Environment):
    """Tools whose spans show the context that they run in."""

    problem = "Buy apples."

    def __init__(self, row: dict[str, Any]) -> None:
        self.tools = [self.look, self.buy]

    def look(self) -> str:
        """Look at the shelves."""
        with TRACER.start_as_current_span("shelves"):
            return "apples"

    async def buy(self) -> str:
        """Buy what is there."""
        with TRACER.start_as_current_span("till"):
            return "done"

    def reward(self, trajectory: Trajectory) -> float:
        with TRACER.start_as_current_span("judge"):
            return 1.0
