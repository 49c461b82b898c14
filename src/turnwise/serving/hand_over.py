"""The running turns of one worker, from all processes, and whether other workers can continue
them."""

from collections.abc import AsyncGenerator, AsyncIterator

from turnwise.engine.protocol import Chunk, Request
from turnwise.serving.scheduler import continues


class RunningTurns:
    """Counts the turns on a worker. Each process knows only its own turns; the worker knows all of
    them, so the worker decides whether they can be handed over."""

    def __init__(self) -> None:
        self.count = 0
        self.bound = 0
        """Number of turns that only this worker can finish, because some of their tokens were
        passed on, and no new request can sample the rest."""

    async def watched(
        self, request: Request, chunks: AsyncIterator[Chunk]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a turn, and count the turn while it runs."""
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
