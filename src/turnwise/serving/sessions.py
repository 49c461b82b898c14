"""Sessions: the server's side of one trajectory each.

An agent sends its whole conversation with each request, as text. A session knows the ids of every
turn that was sampled in it, finds the turn that the conversation continues, and gives the exact
ids of the next prompt. What it cannot continue begins a branch, with a reason.

Of what clients send, a session keeps digests and, for people, the messages' known keys: its
memory grows with what was sampled and said, not with how often it was sent.
"""

import hashlib
import json
import re
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import SamplingConfig
from turnwise.deadlines import StallClock
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate, Message, Trajectory, bridge

Answer = tuple[str, tuple[tuple[str, str], ...]]
"""An assistant's turn as text, and the name and arguments of each call."""

NAME_PATTERN = r"^[A-Za-z0-9_:~-][A-Za-z0-9._:~-]{0,199}$"
"""Names that clients may give to sessions: they stand unquoted in URLs, and no client shortens
them as it does `..`."""
NAME_RULE = "a session's name is 1 to 200 of A-Z a-z 0-9 _ : ~ - . and does not begin with a dot"
_NAME = re.compile(NAME_PATTERN)
_MAX_GONE = 16_384
"""Names of closed and forgotten sessions that are remembered."""
_SESSION_BYTES = 2_000
_COMPLETION_BYTES = 250
_PROMPT_TOKEN_BYTES = 48
"""An id in its turn's list and in the last path."""
_SAMPLED_TOKEN_BYTES = 90
"""The same, a log-prob and a weight version."""


def valid_name(name: str) -> bool:
    """Whether a client may name a session so."""
    return _NAME.fullmatch(name) is not None


@dataclass(slots=True, eq=False)
class _Known:
    """A turn as the agent sees it."""

    length: int
    """Messages that were sent for it."""
    digest: bytes
    """Of these messages."""
    opening: bytes
    """Of the first of them."""
    tools: bytes
    """Digest of the tools that were sent with them."""
    read: Callable[[], Answer] | None
    """Reads the answer; None once it has been read, because it holds the whole request."""
    said: Answer = ("", ())

    def answer(self) -> Answer:
        if self.read is not None:
            self.said, self.read = self.read(), None
        return self.said


@dataclass(slots=True)
class Prompt:
    """What a conversation becomes."""

    token_ids: list[int] | None
    """Exact ids that continue a turn; None: the conversation has to be rendered."""
    fork_reason: str | None = None
    """Why it does not continue one, in a session that has turns."""
    known: int = 0
    """How many of the messages the turn that it continues has, its answer included."""


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory in the making, by an agent that only sees text."""

    id: str
    sampling: SamplingConfig | None = None
    """Of a training session: the sampling that the trainer will take its tokens to be from."""
    group: str = ""
    trajectory: Trajectory = field(default_factory=lambda: Trajectory(""))
    private: bool = False
    """Of a rollout: its random id is known to its agent alone, and is the key to it."""
    agent_rewards: bool = False
    """Whether the agent of a private session may read, reward and close it."""
    created: float = field(default_factory=time.time)
    lost_turns: int = 0
    """Turns whose answer nobody waited for."""
    clock: StallClock | None = None
    """Of a rollout's trajectory: it stands still while a request is in flight."""
    closed: bool = False
    """Nothing is recorded any more."""
    size: int = _SESSION_BYTES
    """Estimate of its memory in bytes."""
    used: float = 0.0
    """When its last request ended, by the monotonic clock."""
    requests: int = 0
    """Requests in flight."""
    completions: list[str] = field(default_factory=list)
    """Ids by which a later request can refer to it."""
    _known: list[_Known] = field(default_factory=list)
    _sent: list[Message] = field(default_factory=list)
    """Messages of the last turn, as a view."""
    _sent_bytes: int = 0
    """Of those that no turn holds."""

    def next_prompt(
        self, messages: Sequence[Message], tools: Any, template: ChatTemplate
    ) -> Prompt:
        """The exact ids of a conversation, where it continues a turn of this session."""
        if not self._known:
            return Prompt(None)
        digests, key = _digests(messages), _digest(b"", tools or None)
        best: tuple[int, int] | None = None
        for index, known in enumerate(self._known):
            length = known.length
            if (
                len(messages) > length + 1
                and (best is None or length >= best[1])
                and digests[length] == known.digest
                and messages[length]["role"] == "assistant"
                and known.tools == key
                and known.answer() == _answer_of(messages[length])
            ):
                best = index, length
        if best is None:
            started = any(known.opening == digests[:2][-1] for known in self._known)
            return Prompt(None, "history_changed" if started else "new_conversation")
        index, length = best
        bridged = bridge(
            template,
            prompt_token_ids=self.trajectory.prompt_token_ids(index),
            completion_token_ids=self.trajectory.turns[index].completion_token_ids,
            new_messages=[plain(message) for message in messages[length + 1 :]],
            tools=tools,
        )
        covered = 0 if bridged.fork_reason else length + 1
        return Prompt(bridged.token_ids, bridged.fork_reason, covered)

    def record(
        self,
        prompt_token_ids: Sequence[int],
        token_ids: list[int],
        logprobs: list[float],
        weight_versions: list[int],
        finish_reason: str,
        *,
        messages: Sequence[Message],
        tools: Any,
        answer: Callable[[], Answer],
        prompt: Prompt,
    ) -> None:
        """Add a turn; `answer`, which is called later, reads its text."""
        if self.closed:
            self.lost_turns += 1
            return
        views = [_view(message) for message in messages]
        turn = self.trajectory.add_turn(
            prompt_token_ids,
            token_ids,
            logprobs,
            weight_versions,
            finish_reason,
            fork_reason=prompt.fork_reason,
            messages=views[prompt.known :],
        )
        digests = _digests(messages)
        self._known.append(
            _Known(len(messages), digests[-1], digests[:2][-1], _digest(b"", tools or None), answer)
        )
        self.size += (
            len(turn.added_token_ids) * _PROMPT_TOKEN_BYTES
            + len(token_ids) * _SAMPLED_TOKEN_BYTES
            + sum(map(_bytes_of, views[prompt.known :]))
            - self._sent_bytes
        )
        self._sent, self._sent_bytes = views, sum(map(_bytes_of, views[: prompt.known]))
        self.size += self._sent_bytes

    def settle(self) -> None:
        """Read the answers that are still to be read, which frees the requests they are from."""
        for known in self._known:
            known.answer()

    def finish(self) -> Trajectory:
        """The trajectory, with the messages of its last turn as its view."""
        trajectory = self.trajectory
        if self._known:
            text, calls = self._known[-1].answer()
            message: Message = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": name, "arguments": arguments}}
                    for name, arguments in calls
                ]
            trajectory.messages = [*(dict(sent) for sent in self._sent), message]
        trajectory.status = "completed"
        return trajectory

    def summary(self) -> dict[str, Any]:
        """The session as JSON, without its tokens."""
        return {
            "id": self.id,
            "training": self.sampling is not None,
            "group": self.group,
            "created": int(self.created),
            "turns": len(self.trajectory.turns),
            "sampled_tokens": self.trajectory.sampled_tokens,
            "lost_turns": self.lost_turns,
            "reward": self.trajectory.reward,
            "forked": [t.fork_reason for t in self.trajectory.turns if t.fork_reason],
        }

    def describe(self) -> dict[str, Any]:
        """The session as JSON."""
        return {**self.summary(), "trajectory": json.loads(self.trajectory.to_json())}


class SessionStore:
    """The sessions of a server.

    Rollouts open private ones, which stay until they are closed. Those that clients name or open
    stay until they are closed, too, and as long as there is room: one that was idle for
    `idle_seconds` is forgotten, and beyond `max_bytes` the one that was idle for longest. A
    request without a session gets one of its own, under the same rules, so that the next request
    can refer to its completion. Requests to a session that was closed or forgotten are refused,
    unless it is opened again.

    Args:
        sampling: That of training sessions.
        idle_seconds: Seconds without a request.
        max_bytes: Memory of all sessions but private ones, estimated.
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
        """Sessions without a request and their sizes, the longest idle first; none is private."""
        self._bytes = 0
        """Memory of the sessions in `_idle`."""
        self._gone: OrderedDict[str, str] = OrderedDict()
        """Why a session is no more, by its name."""

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[Session]:
        """The sessions that clients named or opened."""
        return (session for session in self._named.values() if not session.private)

    def open(
        self,
        session_id: str | None = None,
        *,
        training: bool = False,
        group: str = "",
    ) -> Session:
        """Begin a session of a client, under a random name where it gives none.

        Raises:
            InputError: when there is one of that name.
        """
        session_id = session_id or secrets.token_hex(16)
        if session_id in self._named:
            raise InputError(f"there is a session {session_id} already")
        session = Session(session_id, self._sampling if training else None, group)
        session.trajectory.problem_id = group or session_id
        self._add(session)
        self._set_idle(session)
        return session

    def open_private(
        self,
        trajectory: Trajectory,
        *,
        sampling: SamplingConfig,
        group: str = "",
        agent_rewards: bool = False,
    ) -> Session:
        """Begin the session of a rollout, a training session that makes `trajectory`."""
        session = Session(
            secrets.token_hex(16),
            sampling,
            group,
            trajectory,
            private=True,
            agent_rewards=agent_rewards,
        )
        self._add(session)
        return session

    def get(self, session_id: str) -> Session | None:
        """The session of a name."""
        self._forget_old()
        return self._named.get(session_id)

    def gone(self, session_id: str) -> str | None:
        """Why the session of a name is no more; None if there is one, or never was."""
        self._forget_old()
        return self._gone.get(session_id)

    def of_request(self, session_id: str | None, previous: str | None) -> Session:
        """The session of a request that names it, or the completion before it, or neither."""
        self._forget_old()
        if session_id:
            return self._named.get(session_id) or self.open(session_id)
        return self._by_completion.get(_bare(previous or "")) or Session(secrets.token_hex(16))

    def has_completion(self, completion_id: str) -> bool:
        """Whether a request may still refer to this completion."""
        self._forget_old()
        return _bare(completion_id) in self._by_completion

    @contextmanager
    def request(self, session_id: str | None, previous: str | None) -> Iterator[Session]:
        """Hold the session of a request (see `of_request`) while the request runs."""
        session = self.of_request(session_id, previous)
        session.requests += 1
        self._set_busy(session)
        try:
            with session.clock.held() if session.clock is not None else nullcontext():
                yield session
        finally:
            session.requests -= 1
            if not session.requests:
                session.settle()
                self._set_idle(session)

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
        """End a session; later requests that name it are refused, unless it is opened again."""
        session = self._named.get(session_id)
        if session is not None:
            self._remove(session, "is closed")
        return session

    def _add(self, session: Session) -> None:
        self._gone.pop(session.id, None)
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
        """Forget sessions that were idle for too long, or for longest where there is no room."""
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
            self._gone[session.id] = why
            if len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)


def _bare(completion_id: str) -> str:
    """An id as clients may send it, with OpenAI's prefix or without."""
    return completion_id.removeprefix("chatcmpl-")


def plain(message: Message) -> Message:
    """A message as templates want it: text for content, no keys that say nothing."""
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text(message.get("content"))
    return result


_VIEWED = ("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content")


def _view(message: Message) -> Message:
    """What people see of a message: the keys that are known, content as text."""
    view = {key: message[key] for key in _VIEWED if message.get(key) is not None}
    view["content"] = _text(message.get("content"))
    if message["role"] == "assistant" and (calls := message.get("tool_calls")):
        view["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {key: call["function"].get(key) for key in ("name", "arguments")},
            }
            for call in calls
        ]
    return view


def _bytes_of(view: Message) -> int:
    return 300 + sum(
        sys.getsizeof(value if isinstance(value, str) else _canonical_json(value))
        for value in view.values()
    )


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Digests of the conversation's beginnings: of no message, of one, of two ..."""
    digests = [b""]
    for message in messages:
        digests.append(_digest(digests[-1], _canonical(message)))
    return digests


def _digest(before: bytes, value: Any) -> bytes:
    text = _canonical_json(value).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + text, digest_size=16).digest()


def _canonical(message: Message) -> Any:
    """What two messages that mean the same have in common."""
    if message["role"] == "assistant":
        return ("assistant", _answer_of(message))
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    return (message["role"], _text(message.get("content")), _canonical_json(rest))


def _answer_of(message: Message) -> Answer:
    calls = message.get("tool_calls") or []
    functions = [call["function"] for call in calls]
    return answer(
        _text(message.get("content")), [(f["name"], f.get("arguments") or "") for f in functions]
    )


def answer(text: str | None, calls: Sequence[tuple[str, Any]]) -> Answer:
    """An answer in the form in which two are compared."""
    return (text or "").strip(), tuple((name, _arguments(value)) for name, value in calls)


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return _canonical_json(value)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return _canonical_json(list(content))


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
