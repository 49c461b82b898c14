"""Decoding goes on while tools run, inside one step: seen by the order of events, not by time."""

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from turnwise.config import Config
from turnwise.engine.protocol import Chunk, Request
from turnwise.rollouts.sampler import TrajectorySampler
from turnwise.serving.worker_handle import WorkerHandle
from turnwise.trajectory import ChatTemplate, Trajectory

CALL = '<tool_call>\n{"name": "work", "arguments": {}}\n</tool_call><|im_end|>'
HELD_UP = 120.0
"""Seconds after which a tool gives up waiting for a decoding step that does not come."""
EVENTS: list[str] = []
WORKING = {name: threading.Event() for name in ("slow", "quick")}
DECODED = threading.Event()
"""Set when the quick trajectory's second turn has been sampled."""


class Worker:
    """An environment whose tool ends when decoding has gone on beside it."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.problem = "Work."
        self.tools = [self.work]
        self.name = row["name"]

    def work(self) -> str:
        """Work."""
        EVENTS.append(f"{self.name} works")
        WORKING[self.name].set()
        # The quick one ends once the slow one works, and that once the quick one's next turn, which
        # can only begin then, has been decoded.
        awaited = {"quick": WORKING["slow"], "slow": DECODED}[self.name]
        went_on = awaited.wait(HELD_UP)
        EVENTS.append(f"{self.name} ends")
        return "done" if went_on else "held up"

    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


class Watched:
    """The engine, with the end of each turn among the events."""

    def __init__(self, engine: WorkerHandle) -> None:
        self._engine = engine

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
        *_, problem, _, turn = request.id.split("-")
        name = {"prompt:1": "slow", "prompt:2": "quick"}[problem]
        EVENTS.append(f"{name} decoded {turn}")
        if (name, turn) == ("quick", "1"):
            DECODED.set()


async def test_decoding_overlaps_with_tools_inside_one_step(
    engine: WorkerHandle,
    make_config: Callable[..., Config],
    tokenizer: Any,
    template: ChatTemplate,
) -> None:
    """A turn is decoded between the beginning and the end of another trajectory's tool."""
    config = make_config(environment=f"{__name__}:Worker", rollout={"tool_timeout": 2 * HELD_UP})
    script = [template.encode(text) for text in (CALL, "Done.<|im_end|>")]
    keys = {"n": 1, "max_tokens": 60, "logits_processor_args": {"script": script}}
    rows = [{"name": "slow"}, {"name": "quick"}]
    watched = Watched(engine)
    sampler = TrajectorySampler(watched, rows, keys, config=config, tokenizer=tokenizer)
    ended = [trajectory.problem_id async for trajectory in sampler]
    results = [
        message["content"]
        for group in sampler.groups
        for message in group.trajectories[0].messages
        if message["role"] == "tool"
    ]
    assert results == ["done", "done"]
    assert ended == ["prompt:2", "prompt:1"]
    place = {event: number for number, event in enumerate(EVENTS)}
    assert place["slow works"] < place["quick decoded 1"] < place["slow ends"]
    assert place["slow ends"] < place["slow decoded 1"]
