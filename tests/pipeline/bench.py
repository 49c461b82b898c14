"""A pipeline's side of modules, on a simulated engine."""

from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.simulated import SimulatedEngine
from turnwise.config import Config
from turnwise.core.loop_thread import EventLoopThread
from turnwise.rollouts import Runner

CONTEXT, NEW = 96, 12
Join = Callable[..., Any]


class Bench:
    """One thread, one simulated engine, no trainer."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config = config
        self.runner = Runner(config, tokenizer)
        self.runner.tool_parser = None  # type: ignore[assignment]  # nothing calls tools
        self.generator = SimulatedEngine(vocab_size=len(tokenizer), mean_tokens=8)
        self._thread = EventLoopThread(self._open, "the bench")
        self._thread.start(120)
        self.submit = self._thread.submit

    @asynccontextmanager
    async def _open(self) -> Any:
        yield None

    def wait(self, requests: Sequence[Any], seconds: float, who: str) -> list[Any]:
        return [request.result(seconds) for request in requests]

    def close(self) -> None:
        self._thread.stop(120)


def collated(items: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """A batch as a data loader makes it."""
    return {key: [item[key] for item in items] for key in items[0]}
