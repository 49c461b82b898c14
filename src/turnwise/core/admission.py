"""Admission: how many trajectories and requests use a model at once, and which of them begins next.

The engines of a run, a teacher, and the server of a judge each have an `Admission`. A trajectory
counts as work for engines from its start to its last turn, except while it waits for its tools, its
environment or its agent. While only its reward or its judge is missing, it stays open but does not
count as work, so that a slow judge never leaves an engine idle while a prompt waits. A trajectory
whose tool has answered goes on at once; if several trajectories go on at the same time, they queue
in the engine.
"""

import asyncio
import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import add

OPEN = 4
"""Maximum ratio of open trajectories to trajectories that may work at once. A trajectory that waits
for its reward is open; a queue of this length keeps judges and engines busy, and bounds the number
of environments in memory."""


class Priority(IntEnum):
    """The order in which waiting work begins."""

    SCORING = 0
    """Requests to judges and teachers, which finish trajectories."""
    TRAINING = 1
    EVALUATION = 2
    """Evaluations during training: they begin when nothing else waits, and while fewer than
    `Limits.background` trajectories have work for engines."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of trajectories (or requests) in progress at once."""

    working: int
    """Trajectories with work for engines."""
    playing: int | None = None
    """Trajectories whose turns are not over, including waiting ones; None sets no limit."""
    background: int | None = None
    """Number of working trajectories from which no evaluation begins; None takes `working`."""

    @property
    def at_once(self) -> int:
        """Number of trajectories that play at once if no tool keeps them waiting."""
        return self.working if self.playing is None else min(self.working, self.playing)

    def room(self, use: "Use", priority: Priority) -> bool:
        """Return whether one more trajectory (or request) may begin."""
        at_once = self.at_once
        limit = self.working
        if priority == Priority.EVALUATION and self.background is not None:
            limit = min(limit, self.background)
        return (
            use.working < limit
            and (self.playing is None or use.playing < self.playing)
            and use.open < OPEN * at_once
        )


@dataclass(frozen=True, slots=True)
class Use:
    """Numbers of trajectories (or requests) that are in progress, or wait, in a process."""

    working: int = 0
    playing: int = 0
    open: int = 0
    """Trajectories that have begun and have not ended."""
    waiting: int = 0
    """Trajectories that have not begun, evaluations included."""
    evaluations: int = 0
    """Evaluations among the waiting ones."""
    limits: Limits = Limits(0, 0, 0)
    """Limits that the process applied."""


class Place:
    """The place of an admitted trajectory among those in progress. The trajectory counts as work
    for engines unless it is `idle`. Calls after the place's `end` change nothing, because user code
    may outlive its trajectory."""

    __slots__ = ("_admission", "_playing", "_works")

    def __init__(self, admission: "Admission | None" = None) -> None:
        self._admission = admission
        self._works = 1
        self._playing = True

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Need no engine during a `with` block, except in the `working` blocks within it."""
        self._add(-1)
        try:
            yield
        finally:
            self._add(1)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Need an engine during a `with` block, even inside `idle`, as for an agent's request."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def played(self) -> None:
        """Need no engine any more, because the turns are over and only the reward is missing."""
        self._count(works=0, playing=False)

    def _add(self, works: int) -> None:
        self._count(works=self._works + works, playing=self._playing)

    def _count(self, *, works: int, playing: bool) -> None:
        working = (works > 0 and playing) - (self._works > 0 and self._playing)
        more = playing - self._playing
        self._works, self._playing = works, playing
        if self._admission is not None and (working or more):
            self._admission.note(working=working, playing=more)

    def end(self) -> None:
        self.played()
        if self._admission is not None:
            self._admission.note(open=-1)
        self._admission = None


class Admission:
    """Admits trajectories and requests by priority, and in order of arrival within a priority.

    Example:
        admission = Admission(Limits(working=8))
        async with admission.admitted() as place:
            ...  # turns
            with place.idle():
                ...  # a tool
            place.played()
            ...  # the reward
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._use = Use()
        self._numbers = itertools.count()
        self._waiting: list[tuple[Priority, int, int, asyncio.Future[None]]] = []
        """Priority, arrival, unique number and future of each waiting entry."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when an entry has to wait."""

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        """Apply new limits from now on; trajectories that have begun go on."""
        self._limits = limits
        self._grant()

    @property
    def use(self) -> Use:
        waiting = [entry for entry in self._waiting if not entry[3].done()]
        return replace(
            self._use,
            waiting=len(waiting),
            evaluations=sum(entry[0] == Priority.EVALUATION for entry in waiting),
            limits=self._limits,
        )

    def arrive(self) -> int:
        """Return the next number in the order of arrival, for `admitted`."""
        return next(self._numbers)

    @asynccontextmanager
    async def admitted(
        self, priority: Priority = Priority.TRAINING, arrival: int | None = None
    ) -> AsyncIterator[Place]:
        """Wait for admission, and count as in progress during an `async with` block. A retry passes
        the `arrival` of its first attempt, so that it goes before entries that came later."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = self.arrive()
        entry = (priority, number if arrival is None else arrival, number, turn)
        heapq.heappush(self._waiting, entry)
        self._grant()
        if not turn.done():
            self.on_wait()
        place = Place(self)
        try:
            await turn
            yield place
        finally:
            if not turn.cancelled():  # it was admitted, perhaps at the moment of its cancellation
                place.end()

    def note(self, working: int = 0, playing: int = 0, open: int = 0) -> None:
        """Add to the numbers in progress."""
        use = self._use
        self._use = Use(use.working + working, use.playing + playing, use.open + open)
        if min(working, playing, open) < 0:
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            priority, _, _, turn = self._waiting[0]
            if not turn.done():  # else it was cancelled
                if not self._limits.room(self._use, priority):
                    return
                self.note(1, 1, 1)
                turn.set_result(None)
            heapq.heappop(self._waiting)


def divide_limits(limits: Limits, uses: Sequence[Use], ordered: Sequence[Limits]) -> list[Limits]:
    """Divide the limits of an admission among processes.

    Args:
        uses: The last report of each process.
        ordered: The limits last sent to each process, which the process may not have read yet.
    """

    def shares(name: str, total: int, used: list[int], more: list[int]) -> list[int]:
        # Once its limit is lowered, a process may have more in progress, which it then holds, too.
        held = [
            max(getattr(use.limits, name) or 0, getattr(order, name) or 0, busy)
            for use, order, busy in zip(uses, ordered, used, strict=True)
        ]
        return divide(total, [*map(add, used, more)], used, held)

    working, evaluations = [use.working for use in uses], [use.evaluations for use in uses]
    waiting = [use.waiting for use in uses]
    nothing: list[int | None] = [None] * len(uses)
    playing, background = nothing, nothing
    if limits.playing is not None:
        playing = [*shares("playing", limits.playing, [use.playing for use in uses], waiting)]
    if limits.background is not None:
        background = [*shares("background", limits.background, working, evaluations)]
    own = shares("working", limits.working, working, waiting)
    made = map(Limits, own, playing, background)
    # A process gets new limits only once it has confirmed the last ones, because with two
    # unconfirmed orders, nobody would know which of them it has applied.
    return [
        new if use.limits == order else order
        for new, use, order in zip(made, uses, ordered, strict=True)
    ]


def divide(total: int, wanted: list[int], used: list[int], held: list[int]) -> list[int]:
    """Return each process's share of a limit. Shares are as equal as the wanted and used numbers
    allow; the part of the limit that nobody wants yet is divided equally, too.

    Args:
        total: The limit.
        wanted: Number of trajectories that each process would have in progress.
        used: Number that each process has in progress; its share does not fall below it.
        held: Share that each process may still apply. A share grows only by the part of the limit
            that no process holds.
    """

    def filled(level: int) -> list[int]:
        return [max(use, min(want, level)) for want, use in zip(wanted, used, strict=True)]

    levels = range(total + 1)
    shares = filled(bisect_right(levels, total, key=lambda level: sum(filled(level))) - 1)
    left = max(0, total - sum(shares))
    lacking_first = sorted(range(len(shares)), key=lambda place: wanted[place] <= shares[place])
    for number, place in enumerate(lacking_first):
        more = math.ceil(left / (len(shares) - number))
        shares[place] += more
        left -= more
    free = total - sum(held)
    for place, (share, own) in enumerate(zip(shares, held, strict=True)):
        if share > own:
            shares[place] = own + min(share - own, max(0, free))
            free -= shares[place] - own
    return shares
