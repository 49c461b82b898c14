"""Sessions: the server's side of one trajectory each.

An agent sends its whole conversation with each request, as text. A session knows the ids of every
turn that was sampled in it, finds the turn that the conversation continues, and gives the exact
ids of the next prompt. What it cannot continue begins a branch, with a reason.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config import SamplingConfig
from turnwise.errors import InputError
from turnwise.trajectory import ChatTemplate, Message, Trajectory, bridge

Answer = tuple[str, tuple[tuple[str, str], ...]]
"""What an assistant's turn says: its text, and the name and arguments of each call."""

_MAX_SESSIONS = 16_384


@dataclass(slots=True)
class _Known:
    """A turn as the agent sees it."""

    sent: Sequence[Message]
    messages: list[Any]
    """`sent`, in the form in which messages are compared."""
    tools: str
    answer: Callable[[], Answer]
    said: Answer | None = None

    def says(self, message: Message) -> bool:
        if self.said is None:
            self.said = self.answer()
        return _answer_of(message) == self.said


@dataclass(slots=True)
class Prompt:
    """What a conversation becomes."""

    token_ids: list[int] | None
    """Exact ids that continue a turn; None: the conversation has to be rendered."""
    fork_reason: str | None = None
    """Why it does not continue one, in a session that has turns."""
    known: int = 0
    """How many of the messages the turn that it continues has, its answer included."""


@dataclass(slots=True)
class Session:
    """One trajectory in the making, by an agent that only sees text."""

    id: str
    sampling: SamplingConfig | None = None
    """Of a training session: the sampling that the trainer will take its tokens to be from."""
    group: str = ""
    trajectory: Trajectory = field(default_factory=lambda: Trajectory(""))
    created: float = field(default_factory=time.time)
    lost_turns: int = 0
    """Turns whose answer nobody waited for."""
    closed: bool = False
    """Nothing is recorded any more."""
    _known: list[_Known] = field(default_factory=list)

    def next_prompt(
        self, messages: Sequence[Message], tools: Any, template: ChatTemplate
    ) -> Prompt:
        """The exact ids of a conversation, where it continues a turn of this session."""
        if not self._known:
            return Prompt(None)
        sent = [_canonical(message) for message in messages]
        key = _canonical_json(tools or None)
        best: tuple[int, int] | None = None
        for index, known in enumerate(self._known):
            length = len(known.messages)
            if (
                len(sent) > length + 1
                and (best is None or length >= best[1])
                and sent[:length] == known.messages
                and messages[length]["role"] == "assistant"
                and known.tools == key
                and known.says(messages[length])
            ):
                best = index, length
        if best is None:
            started = any(known.messages[:1] == sent[:1] for known in self._known)
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
        """Add a turn; `answer` tells, when it is asked, what its text says."""
        if self.closed:
            self.lost_turns += 1
            return
        self.trajectory.add_turn(
            prompt_token_ids,
            token_ids,
            logprobs,
            weight_versions,
            finish_reason,
            fork_reason=prompt.fork_reason,
            messages=[dict(message) for message in messages[prompt.known :]],
        )
        self._known.append(
            _Known(
                messages,
                [_canonical(message) for message in messages],
                _canonical_json(tools or None),
                answer,
            )
        )

    def finish(self) -> Trajectory:
        """The trajectory, with the messages of its last turn as its view."""
        trajectory = self.trajectory
        if self._known:
            last = self._known[-1]
            text, calls = last.answer()
            message: Message = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [
                    {"type": "function", "function": {"name": name, "arguments": arguments}}
                    for name, arguments in calls
                ]
            trajectory.messages = [*(dict(sent) for sent in last.sent), message]
        trajectory.status = "completed"
        return trajectory

    def describe(self) -> dict[str, Any]:
        """The session as JSON."""
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
            "trajectory": json.loads(self.trajectory.to_json()),
        }


class SessionStore:
    """The sessions of a server.

    Those that a client named, or opened, stay until they are closed. A request without a session
    gets one of its own, which lives while there is room, so that the next request can refer to
    its completion. At most 16,384 of either kind are kept.

    Args:
        sampling: That of training sessions.
    """

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        self._named: OrderedDict[str, Session] = OrderedDict()
        self._by_completion: OrderedDict[str, Session] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._named)

    def open(
        self,
        session_id: str,
        *,
        training: bool = False,
        group: str = "",
        sampling: SamplingConfig | None = None,
    ) -> Session:
        """Begin a session; one with `sampling` of its own is a training session.

        Raises:
            InputError: when there is one of that name, or no room for another.
        """
        if session_id in self._named:
            raise InputError(f"there is a session {session_id} already")
        if len(self._named) >= _MAX_SESSIONS:
            raise InputError(f"{_MAX_SESSIONS} sessions are open; close some (DELETE /sessions/ID)")
        self._closed.pop(session_id, None)
        session = Session(session_id, sampling or (self._sampling if training else None), group)
        session.trajectory.problem_id = group or session_id
        self._named[session_id] = session
        return session

    def get(self, session_id: str) -> Session | None:
        """The session of a name."""
        return self._named.get(session_id)

    def is_closed(self, session_id: str) -> bool:
        """Whether there was one of that name, which has been closed and not opened again."""
        return session_id in self._closed

    def of_request(self, session_id: str | None, previous: str | None) -> Session:
        """The session of a request that names it, or the completion before it, or neither."""
        if session_id:
            return self._named.get(session_id) or self.open(session_id)
        if previous and (session := self._by_completion.get(previous)):
            self._by_completion.move_to_end(previous)
            return session
        return Session("")

    def remember_completion(self, completion_id: str, session: Session) -> None:
        """Let a later request refer to this completion."""
        self._by_completion[completion_id] = session
        if len(self._by_completion) > _MAX_SESSIONS:
            self._by_completion.popitem(last=False)

    def close(self, session_id: str) -> Session | None:
        """End a session; later requests that name it are refused, unless it is opened again."""
        session = self._named.pop(session_id, None)
        if session is not None:
            session.closed = True
            self._closed[session_id] = None
            if len(self._closed) > _MAX_SESSIONS:
                self._closed.popitem(last=False)
        return session


def plain(message: Message) -> Message:
    """A message as templates want it: text for content, no keys that say nothing."""
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text(message.get("content"))
    return result


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
