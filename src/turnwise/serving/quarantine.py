"""Quarantine of requests that crash workers.

A request that crashes its worker must not crash others too. When two workers have died while they
ran it, and no other request can have been the cause, it is quarantined: it fails, and equal
requests are refused for a while. If several requests were running at two deaths, each of these
suspects is retried alone, while no other suspect runs.
"""

import array
import asyncio
import hashlib
import logging
from collections import OrderedDict

from turnwise.core.deadlines import StallClock
from turnwise.errors import EngineError
from turnwise.serving.worker_state import Turn, names_of

logger = logging.getLogger(__name__)

_MOST_DIGESTS = 1024
"""Maximum number of remembered requests."""
_SECONDS = 600.0
"""Time for which a request is refused; by then its cause may be fixed."""


class Quarantine:
    """The refused requests, and a lock for suspects, of which one runs at a time.

    Args:
        patience: Seconds without a new token after which a running suspect no longer blocks the
            others.
    """

    def __init__(self, patience: float) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()
        """Time until which each request is refused, by its digest."""
        self._alone = asyncio.Lock()
        self._progress = StallClock(patience)

    def __len__(self) -> int:
        return len(self._until)

    def check(self, turn: Turn) -> None:
        """Refuse a quarantined request.

        Raises:
            EngineError: when the request is quarantined, with the remaining time.
        """
        if not self._until:
            return
        digest = _digest(turn)
        until = self._until.get(digest)
        if until is None:
            return
        if (left := until - asyncio.get_running_loop().time()) > 0:
            raise EngineError(
                f"{turn.request.id} is refused for another {left:.0f} s: the same prompt and "
                "sampling crashed two workers"
            )
        del self._until[digest]

    def add(self, turn: Turn) -> EngineError:
        """Quarantine a turn's request; return the error for the turn."""
        self._until[_digest(turn)] = asyncio.get_running_loop().time() + _SECONDS
        if len(self._until) > _MOST_DIGESTS:
            self._until.popitem(last=False)
        ended = f"{turn.request.id} crashed {len(turn.deaths)} workers ({names_of(turn.deaths)})"
        logger.warning("%s and is refused for %g s", ended, _SECONDS)
        return EngineError(f"{ended} and is not retried")

    async def begin_alone(self, turn: Turn) -> None:
        """Wait until no other suspect runs; `end_alone` lets the next one begin.

        Raises:
            DeadlineError: when the suspect that is running makes no progress.
        """
        async with self._progress.watching(
            f"{turn.request.id}, during which workers died, could not be retried alone: the retry "
            "of another request made no progress"
        ):
            await self._alone.acquire()
        self._progress.moved()

    def end_alone(self) -> None:
        """Let the next suspect begin."""
        self._alone.release()

    def moved(self) -> None:
        """Note that the running suspect has got a token."""
        self._progress.moved()


def _digest(turn: Turn) -> bytes:
    """Return a digest of everything in a request that may crash a worker."""
    prompt, sampling, _, seed, *_ = turn.request
    whole = array.array("q", prompt).tobytes() + repr((sampling, seed)).encode()
    return hashlib.blake2b(whole, digest_size=16).digest()
