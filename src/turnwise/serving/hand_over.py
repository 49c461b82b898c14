"""The turns that run on one worker, from all processes: whether others can go on with them all."""

from collections.abc import AsyncGenerator, AsyncIterator

from turnwise.engine.protocol import Chunk, Request
from turnwise.serving.scheduler import continues


class RunningTurns:
    """Counts the turns on a worker. Each process knows its own; the worker alone knows those of
    all, so it is the one that decides whether they can be handed over."""

    def __init__(self) -> None:
        self.count = 0
        self.bound = 0
        """Turns that end here or nowhere: tokens of theirs were passed on, and no other request can
        sample the rest."""

    async def watched(
        self, request: Request, chunks: AsyncIterator[Chunk]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a turn, and count it meanwhile."""
        may_move, bound = request.whole or continues(request), False
        self.count += 1
        try:
            async for chunk in chunks:
                if not (may_move or bound) and chunk.token_ids:
                    bound = True
                    self.bound += 1
                yield chunk
        finally:
            self.count -= 1
            self.bound -= bound
