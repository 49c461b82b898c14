"""The sessions of a server, found by name or completion and forgotten when idle for too long."""

import heapq
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

from turnwise.chat.session import NAME_RULE, Session, valid_name
from turnwise.config import AgentSamplingRule, SamplingConfig, ServingConfig
from turnwise.core.json_types import JsonObject
from turnwise.core.spans import trace_headers
from turnwise.engine.protocol import TurnTimes
from turnwise.errors import InputError
from turnwise.trajectory import Trajectory

REMEMBERED_NAMES = 65_536
"""Maximum number of names of closed and forgotten sessions that the store remembers."""
_COMPLETION_BYTES = 250
MAX_CHILDREN = 1_000
"""Maximum number of child sessions of one session."""
MAX_TURNS = 10_000
"""Maximum number of turns of a client's session, child sessions' turns included."""
Place = tuple[float, str]
"""Position of a session in the list of sessions: the time at which it was opened, and its name."""


class SessionRefused(InputError):
    """A request that names an invalid or ended session; `status` is the HTTP status to answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SessionStore:
    """The sessions of a server; clients' training sessions share one `sampling`.

    Rollouts open private sessions. These, and the sessions that agents open under them, stay open
    until they are closed. Sessions of clients also end when they are idle for `idle_seconds`; if
    idle sessions together take more than `max_bytes` (an estimate), the longest idle ones end. A
    request without a session's name gets a new session, so that the next request can refer to its
    completion. Requests to a closed or forgotten session are refused until it is opened again.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        *,
        idle_seconds: float = 14_400.0,
        max_bytes: int = 512 << 20,
    ) -> None:
        self._sampling = sampling
        self._idle_seconds = idle_seconds
        self._max_bytes = max_bytes
        self._named: dict[str, Session] = {}
        self._by_completion: dict[str, Session] = {}
        self._idle: OrderedDict[Session, int] = OrderedDict()
        """Size in bytes of each session that has no request in flight and is not private, the
        longest idle first."""
        self._bytes = 0  # memory of the sessions in `_idle`, in bytes
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Reason why each closed or forgotten session ended, by name."""
        self.changes: dict[str, str] | None = None
        """Sessions that began or ended, by name: "" for a beginning, or the reason for the end. The
        store's owner empties this; None records nothing."""

    @classmethod
    def of(cls, sampling: SamplingConfig, serving: ServingConfig) -> "SessionStore":
        """Return an empty store with a run's sampling and limits."""
        return cls(
            sampling,
            idle_seconds=serving.session_idle,
            max_bytes=serving.session_memory_mb << 20,
        )

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that clients opened or named."""
        return (session for session in self._named.values() if not session.private)

    def page(self, after: Place | None, limit: int) -> list[tuple[Place, JsonObject]]:
        """Return summaries of at most `limit` sessions of clients, the oldest first. `after` is the
        place of the last session on the previous page; None begins with the oldest session."""
        places = ((session.created, session.id) for session in self)
        first = heapq.nsmallest(limit, (p for p in places if after is None or p > after))
        return [(place, self._named[place[1]].summary()) for place in first]

    def open(
        self, session_id: str | None = None, *, training: bool = False, group: str = ""
    ) -> Session:
        """Begin a client's session, under a random name if the client gives none; raise InputError
        when a session of that name is open."""
        session_id = session_id or secrets.token_hex(16)
        if session_id in self._named:
            raise InputError(f"the session {session_id} is already open")
        session = Session(
            session_id, self._sampling if training else None, group, max_turns=MAX_TURNS
        )
        session.trajectory.problem_id = group or session_id
        self._add(session)
        self._set_idle(session)
        return session

    def open_private(
        self,
        trajectory: Trajectory,
        *,
        sampling: SamplingConfig,
        agent_sampling: AgentSamplingRule | Literal["any"] | None = None,
        group: str = "",
        agent_rewards: bool = False,
        max_response_tokens: int | None = None,
        max_turns: int | None = None,
        calls: list[TurnTimes] | None = None,
    ) -> Session:
        """Begin the session of a rollout: a training session that fills `trajectory`, and adds the
        times of its turns to `calls`."""
        session = Session(secrets.token_hex(16), sampling, group, trajectory, calls, private=True)
        session.agent_rewards, session.trace = agent_rewards, trace_headers()
        session.agent_sampling = agent_sampling
        session.max_response_tokens, session.max_turns = max_response_tokens, max_turns
        self._add(session)
        return session

    def open_under(self, parent: Session, name: str | None = None) -> Session:
        """Begin a session with a random id, and the trajectory and rights of `parent`. The parent
        knows the new session by `name`, by default the id. Raise InputError when the parent has a
        session of this name, or too many sessions."""
        parent = parent.parent or parent
        session_id = secrets.token_hex(16)
        name = name or session_id
        if name in parent.children:
            raise InputError(f"the session {name} is already open under {parent.id}")
        if len(parent.children) >= MAX_CHILDREN:
            raise InputError(f"a session has at most {MAX_CHILDREN:,} sessions under it")
        names = (
            "sampling",
            "agent_sampling",
            "group",
            "trajectory",
            "calls",
            "private",
            "agent_rewards",
            "clock",
            "place",
        )
        shared = {name: getattr(parent, name) for name in (*names, "max_response_tokens", "trace")}
        session = Session(session_id, **shared, parent=parent)
        parent.children[name] = session
        self._add(session)
        self._set_idle(session)
        return session

    def get(self, session_id: str) -> Session | None:
        """Return the open session of this name, or None."""
        self._forget_old()
        return self._named.get(session_id)

    def gone(self, session_id: str, child: str | None = None) -> str | None:
        """Return why the session of this name, or its `child`, ended; None if it has not ended."""
        self._forget_old()
        parent = self._named.get(session_id)
        if parent is None or child not in parent.children:
            return self._gone.get(session_id)
        return self._gone.get(parent.children[child].id)

    def of_request(
        self, session_id: str | None, previous: str | None, child: str | None = None
    ) -> Session:
        """Return the session of a request: the named session or its `child`, which are opened if
        they do not exist; without a name, the session of the `previous` completion, or a new one.
        """
        self._forget_old()
        if session_id:
            session = self._named.get(session_id) or self.open(session_id)
            if child is None:
                return session
            root = session.parent or session
            return root.children.get(child) or self.open_under(root, child)
        return self._by_completion.get(_bare(previous or "")) or Session(
            secrets.token_hex(16), max_turns=MAX_TURNS
        )

    def of_response(self, session: Session | None, response_id: str) -> Session | None:
        """Return the session of the response that a request refers to; None if it is unknown. A
        request that names an open session can refer to responses of that session only."""
        if session is not None:
            if response_id in session.responses:
                return session
            if self._named.get(session.id) is session:
                return None
        found = self._by_completion.get(_bare(response_id))
        return found if found is not None and response_id in found.responses else None

    def has_completion(self, completion_id: str) -> bool:
        """Return whether a request may still refer to this completion."""
        self._forget_old()
        return _bare(completion_id) in self._by_completion

    @contextmanager
    def request(
        self, session_id: str | None, previous: str | None, child: str | None = None
    ) -> Iterator[Session]:
        """Hold the session of a request (see `of_request`) while the request runs; SessionRefused
        when a name is invalid, or the session has ended."""
        if not all(valid_name(name) for name in (session_id, child) if name is not None):
            raise SessionRefused(400, NAME_RULE)
        if session_id is not None and (why := self.gone(session_id, child)) is not None:
            raise SessionRefused(410, f"the session {child or session_id} {why}")
        with self.holding(self.of_request(session_id, previous, child)) as session:
            yield session

    @contextmanager
    def holding(self, session: Session) -> Iterator[Session]:
        """Keep a session and its parent from being forgotten during a block."""
        held = [session, *([session.parent] if session.parent is not None else [])]
        for one in held:
            one.requests += 1
            self._set_busy(one)
        try:
            held_clock = session.clock.held() if session.clock is not None else nullcontext()
            with held_clock, session.place.working():
                yield session
        finally:
            for one in held:
                one.requests -= 1
                if not one.requests:
                    one.read_answers()
                    self._set_idle(one)

    def remember_completion(self, completion_id: str, session: Session) -> None:
        """Let a later request refer to this completion."""
        if session.private or session.closed:
            return
        completion_id = _bare(completion_id)
        self._by_completion[completion_id] = session
        session.completions.append(completion_id)
        session.size += _COMPLETION_BYTES
        if not session.requests:
            self._set_busy(session)
            self._set_idle(session)

    def close(self, session_id: str) -> Session | None:
        """End a session; requests that name it are refused until it is opened again."""
        if (session := self._named.get(session_id)) is not None:
            self._remove(session, "is closed")
        return session

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Refuse requests to sessions ("the session NAME `why`") until these are opened again."""
        for name in names:
            self._gone[name] = why
            if len(self._gone) > REMEMBERED_NAMES:
                self._gone.popitem(last=False)

    def _add(self, session: Session) -> None:
        self._gone.pop(session.id, None)
        if self.changes is not None:
            self.changes[session.id] = ""
        self._named[session.id] = session

    def _set_busy(self, session: Session) -> None:
        self._bytes -= self._idle.pop(session, 0)

    def _set_idle(self, session: Session) -> None:
        reachable = session.completions or self._named.get(session.id) is session
        if session.private or session.closed or not reachable:
            return
        session.used = time.monotonic()
        self._idle[session] = session.size
        self._bytes += session.size
        self._forget_old()

    def _forget_old(self) -> None:
        """Forget the sessions idle for too long, and the longest idle ones while memory is full."""
        now = time.monotonic()
        while self._idle:
            oldest = next(iter(self._idle))
            if now - oldest.used > self._idle_seconds:
                why = f"{self._idle_seconds:g} s without a request (serving.session_idle)"
            elif self._bytes > self._max_bytes:
                why = (
                    f"sessions took more than {self._max_bytes >> 20} MB of memory "
                    "(serving.session_memory_mb)"
                )
            else:
                return
            self._remove(oldest, f"was forgotten: {why}")

    def _remove(self, session: Session, why: str) -> None:
        self._set_busy(session)
        session.closed = True
        for completion_id in session.completions:
            self._by_completion.pop(completion_id, None)
        if self._named.get(session.id) is session:
            del self._named[session.id]
            self.refuse([session.id], why)
            if self.changes is not None:
                self.changes[session.id] = why
        for child in session.children.values():
            if not child.closed:
                self._remove(child, why)


def _bare(completion_id: str) -> str:
    """Return an id without OpenAI's prefix, which clients may send or leave out."""
    return completion_id.removeprefix("chatcmpl-")
