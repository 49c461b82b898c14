"""A session: the server's side of one trajectory.

An agent sends its whole conversation with each request, as text. A session finds the turn that the
conversation continues, and returns the exact ids of the next prompt; if there is no such turn, a
branch begins, with a reason. The sessions of sub-agents are children of a session. They share its
trajectory, but each continues only its own turns.
Memory grows with the amount of new text, not with the number of times a text is sent: each message
is stored once, as a view for people, and conversations are compared by digests.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.chat.messages import (
    Answer,
    Conversation,
    answer_view,
    bytes_of,
    extended_by,
    plain,
    view_of,
)
from turnwise.chat.prompts import NextPrompt, continue_turn, response_room
from turnwise.config import AgentSamplingRule, SamplingConfig
from turnwise.core.admission import Place
from turnwise.core.deadlines import StallClock
from turnwise.core.json_types import JsonObject
from turnwise.engine.protocol import Completion, TurnTimes
from turnwise.errors import InputError
from turnwise.trajectory import (
    ChatTemplate,
    Distribution,
    Message,
    Prompt,
    PromptLike,
    Trajectory,
    status_after,
)

NAME_PATTERN = r"^[A-Za-z0-9_:~-][A-Za-z0-9._:~-]{0,199}$"
"""Names that clients may give to sessions. They are safe in a URL without quoting, and exclude
names like `..`, which HTTP clients remove from a path."""
NAME_RULE = "a session's name is 1 to 200 of A-Z a-z 0-9 _ : ~ - . and does not begin with a dot"
_SESSION_BYTES = 2_000
_TURN_BYTES = 700  # a turn and its digests
_POINTER_BYTES = 8
_PROMPT_TOKEN_BYTES = 8  # an id in its turn and in the last path
_LOGPROB_BYTES = 32  # per prompt token, if the prompt's log-probs are recorded
_ANSWERS, _ANSWERS_BYTES = 8, 1 << 20  # maximum number and bytes of answers kept for retries
_SAMPLED_TOKEN_BYTES = 90  # an id in its turn and in the last path, a log-prob, a weight version


def valid_name(name: str) -> bool:
    """Return whether a client may give a session this name."""
    return re.fullmatch(NAME_PATTERN, name) is not None


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """The sampling and training of one turn, where they differ from the configuration."""

    distribution: Distribution | None = None
    """See `Turn.distribution`."""
    untrained: str = ""
    """See `Turn.untrained`."""
    events: tuple[str, ...] = ()
    """Events that are counted in the trajectory when the turn is recorded."""


AS_CONFIGURED = TurnSampling()


@dataclass(slots=True, eq=False)
class _RecordedTurn:
    """The conversation that led to a turn, and the turn's answer, as digests."""

    index: int
    length: int  # number of messages that were sent for the turn
    prefix: bytes  # digest of these messages
    tools: bytes
    bare: bytes  # digest of these messages that ignores what images show
    read: Callable[[], Answer] | None
    """Function that reads the answer; None once called, since it keeps the whole request alive."""
    answer: Answer | None = None
    """The answer; None before it is read, and once a later turn's answer is read."""
    _answered: bytes = b""  # the digest that `read_answer` returned

    def read_answer(self) -> bytes:
        """Read the answer, once, and return the digest of the conversation that ends with it."""
        if self.read is not None:
            self.answer, self.read = self.read(), None
            self._answered = extended_by(self.prefix, self.answer)
            self.bare = extended_by(self.bare, self.answer)
        return self._answered


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response of OpenAI's Responses API that a session keeps for requests that continue it."""

    before: "StoredResponse | None"
    """The response that this one continues, if any."""
    input: list[object]
    """The request's own input items, without the conversation that the request continues."""
    output: list[object]
    body: JsonObject
    """The response as its client got it."""

    @property
    def whole_input(self) -> list[object]:
        """The request's whole input, including the conversation that the request continues."""
        parts, before = [self.input], self.before
        while before is not None:
            parts += [before.output, before.input]
            before = before.before
        return [item for part in reversed(parts) for item in part]


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory in progress, made by an agent that only sees text."""

    id: str
    sampling: SamplingConfig | None = None
    """Sampling of a training session, which its requests may change if `agent_sampling` allows it;
    None in other sessions."""
    group: str = ""
    """Sessions of one group begin with the same prompt."""
    trajectory: Trajectory = field(default_factory=lambda: Trajectory(""))
    calls: list[TurnTimes] | None = None
    """Times of the turns, for the timeline of a rollout; None in clients' sessions."""
    private: bool = False
    """True for the session of a rollout, whose random id is a secret of its agent."""
    agent_rewards: bool = False
    """True if the agent of a private session may read, reward and close it."""
    agent_sampling: AgentSamplingRule | Literal["any"] | None = None
    """Rule for requests with sampling parameters under which a turn cannot be trained exactly; None
    refuses all parameters that differ from `sampling`. "any" allows all, because nothing is trained
    on the session's turns."""
    created: float = field(default_factory=time.time)
    lost_turns: int = 0
    """Number of turns whose client did not get the answer: it left, or got an error."""
    clock: StallClock | None = None
    """Stall clock of a rollout, held while a request is in flight; None for clients' sessions."""
    place: Place = field(default_factory=Place)
    """Admission of a rollout's trajectory, which is `working` while a request is in flight."""
    max_response_tokens: int | None = None
    """Maximum number of tokens of a conversation after its first prompt; None means no limit."""
    max_turns: int | None = None
    """Maximum number of turns, child sessions' turns included; None means no limit."""
    begun_turns: int = 0
    """Number of turns recorded or in flight, child sessions' turns included."""
    refused_turns: int = 0
    """Number of requests refused because of `max_turns`, in child sessions too."""
    context_full: bool = False
    """Whether its last request was refused because its prompt left no room for an answer."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers that name the span of a rollout's trajectory; see `core.spans`."""
    closed: bool = False
    """True once nothing more is recorded."""
    size: int = _SESSION_BYTES
    """Estimated memory in bytes."""
    parent: "Session | None" = None
    """The session whose child this one is; None for a session with its own trajectory."""
    children: "dict[str, Session]" = field(default_factory=dict)
    """Child sessions, by the names that the agent gave them."""
    used: float = 0.0
    """Time at which the last request ended, in seconds of the monotonic clock."""
    requests: int = 0
    """Number of requests in flight."""
    completions: list[str] = field(default_factory=list)
    """Ids by which a later request can refer to the session."""
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    """Responses that a request may continue by `previous_response_id`, by id."""
    answers: dict[bytes, Sequence[MutableMapping[str, Any]]] = field(default_factory=dict)
    """The last answers as they were sent, by a digest of the request, for a client's retry."""
    _answer_bytes: dict[bytes, int] = field(default_factory=dict)
    _last: _RecordedTurn | None = None
    _openings: set[bytes] = field(default_factory=set)  # digests of the first messages of all turns
    _by_answer: dict[tuple[bytes, bytes], _RecordedTurn] = field(default_factory=dict)
    """The latest turn for each pair of digests: one of the turn's messages and answer, one of its
    tools."""
    _bare: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Keys like those of `_by_answer`, for turns with images; they ignore what the images show."""
    _images: set[str] = field(default_factory=set)  # hashes of the images counted in `size`
    _unread: list[_RecordedTurn] = field(default_factory=list)
    """Turns recorded since the last `read_answers`, and the turn before them."""
    _views: dict[bytes, Message] = field(default_factory=dict)
    """Views of all messages, by digest; turns share them."""
    _sent: list[Message] = field(default_factory=list)  # views of the messages of the last turn

    def next_prompt(self, asked: Conversation, template: ChatTemplate) -> NextPrompt:
        """Return the exact ids of a conversation that continues a turn of this session, or why it
        continues none. Raises as `continue_turn` does; training sessions refuse dropped messages.
        """
        if self._last is None:
            return NextPrompt(None, "new_session" if self.parent is not None else None)
        before = self._turn_before(asked)
        if before is None:
            started, tools = asked.opening in self._openings, asked.tools_digest
            if self._bare and any((bare, tools) in self._bare for bare in asked.bare.prefixes[:-1]):
                return NextPrompt(None, "image_changed")
            return NextPrompt(None, "history_changed" if started else "new_conversation")
        index, covered = before.index, before.length + 1
        continued = continue_turn(
            template,
            prompt_token_ids=self.trajectory.prompt(index),
            completion_token_ids=self.trajectory.turns[index].completion_token_ids,
            new_messages=[
                plain(message, template.between_parts) for message in asked.messages[covered:]
            ],
            tools=asked.tools,
            refuse_dropped=self.sampling is not None,
        )
        return continued if continued.token_ids is None else replace(continued, covered=covered)

    def _turn_before(self, asked: Conversation) -> _RecordedTurn | None:
        """Return the turn that a request continues: the longest, or the latest of the longest.

        A request continues a turn if its messages begin with the turn's messages and answer, and at
        least one message follows.
        """
        prefixes, tools, sent = asked.prefixes, asked.tools_digest, len(asked.messages)
        # Iterate over a copy, because the event loop may read answers while this runs in a thread.
        # Reading an answer takes time, so read only answers that may fit.
        for turn in [*self._unread]:
            if turn.length + 1 < sent and prefixes[turn.length] == turn.prefix:
                self._index(turn)
        # A request has the turn's answer and at least one message after it, so at most `sent - 2`
        # messages led to the turn.
        for length in range(sent - 2, -1, -1):
            if (found := self._by_answer.get((prefixes[length + 1], tools))) is not None:
                return found
        return None

    def _index(self, turn: _RecordedTurn) -> None:
        """Make a turn findable by its conversation, answer included."""
        key = turn.read_answer(), turn.tools
        if turn.bare != key[0]:
            self._bare.add((turn.bare, turn.tools))
        known = self._by_answer.get(key)
        if known is None or known.index <= turn.index:
            self._by_answer[key] = turn

    def record(
        self,
        ids: PromptLike,
        completion: Completion,
        *,
        asked: Conversation,
        answer: Callable[[], Answer],
        prompt: NextPrompt,
        adapter: str = "",
        times: TurnTimes | None = None,
        sampling: TurnSampling = AS_CONFIGURED,
    ) -> None:
        """Add a turn. `answer` reads the turn's text, and is called once, later. `prompt` is the
        `next_prompt` of the turn's request. The turn's index in `times` is replaced."""
        if self.closed:
            self.lost_turns += 1
            return
        self._sent, self.context_full = [], False
        for digest, message in zip(asked.digests, asked.messages, strict=True):
            view, held = view_of(message), self._views.get(digest)
            if held is None or held != view:  # else turns share the view
                self._views[digest] = held = view
                self.size += bytes_of(view)
            self._sent.append(held)
        new = self._sent[prompt.covered :]
        turn = self.trajectory.add_turn(
            ids,
            **completion.as_turn,
            fork_reason=prompt.fork_reason,
            messages=new,
            adapter=adapter,
            distribution=sampling.distribution,
            untrained=sampling.untrained,
        )
        self.trajectory.events.update(sampling.events)
        if self.calls is not None and times is not None:
            self.calls.append(times._replace(turn=len(self.trajectory.turns) - 1))
        index, sent = len(self.trajectory.turns) - 1, len(asked.messages)
        prefix, bare = asked.prefixes[-1], asked.bare.prefixes[-1]
        self._last = _RecordedTurn(index, sent, prefix, asked.tools_digest, bare, answer)
        self._openings.add(asked.opening)
        self._unread.append(self._last)
        self.size += (
            _TURN_BYTES
            + len(turn.added) * _PROMPT_TOKEN_BYTES
            + len(completion.token_ids) * _SAMPLED_TOKEN_BYTES
            + len(new) * _POINTER_BYTES
            + len(turn.experts)
            + sum(map(len, {*turn.allowed}))
            + len(turn.added_logprobs or ()) * _LOGPROB_BYTES
        )
        for each in turn.added.images:
            self.size += 0 if each.image.hash in self._images else len(each.image.data)
            self._images.add(each.image.hash)

    def room(self, prompt: Prompt, fork_reason: str | None) -> int | None:
        """Return how many tokens may follow a prompt (see `response_room`); None means no limit."""
        if (limit := self.max_response_tokens) is None:
            return None
        return response_room(self.trajectory, prompt, fork_reason, limit)

    def keep_answer(self, key: bytes, sent: Sequence[MutableMapping[str, Any]], size: int) -> None:
        """Keep an answer of `size` bytes for a retry, replacing the one for the same request.
        Beyond `_ANSWERS` or `_ANSWERS_BYTES`, the oldest answers are dropped. An empty answer is
        not kept."""
        self.size -= self._answer_bytes.pop(key, 0)
        self.answers.pop(key, None)
        if sent:
            self.answers[key], self._answer_bytes[key] = sent, size
            self.size += size
        while sum(self._answer_bytes.values()) > _ANSWERS_BYTES or len(self.answers) > _ANSWERS:
            oldest = next(iter(self.answers))
            del self.answers[oldest]
            self.size -= self._answer_bytes.pop(oldest)

    def begin_turn(self) -> None:
        """Count a turn before it is sampled. If it will not be recorded, call `lose_turn`.
        Raise InputError when the trajectory has `max_turns` turns, including turns in flight."""
        root = self.parent or self
        if root.max_turns is not None and root.begun_turns >= root.max_turns:
            root.refused_turns += 1
            raise InputError(
                f"the trajectory has its {root.max_turns:,} turns, and may have no more"
                + (" (rollout.max_turns)" if root.private else ": open another session")
            )
        root.begun_turns += 1

    def lose_turn(self) -> None:
        """Subtract one from the begun turns, because a turn that was begun will not be recorded."""
        (self.parent or self).begun_turns -= 1

    def read_answers(self) -> None:
        """Read all unread answers, which frees their requests; keep only the last answer's text."""
        for turn in self._unread:
            self._index(turn)
        for turn in self._unread[:-1]:
            turn.answer = None
        del self._unread[:-1]

    def finish(self) -> Trajectory:
        """Return the trajectory. Its messages and status come from the session's last conversation.
        If the session itself does not have a conversation, they come from its last child session
        with a conversation."""
        if self.parent is not None:
            return self.parent.finish()
        trajectory = self.trajectory
        for session in (self, *self.children.values()):
            session.read_answers()  # reading an answer counts its tool calls
        for session in (self, *reversed(self.children.values())):
            if (last := session._last) is not None:
                assert last.answer is not None  # `read_answers` has read it
                trajectory.messages = [*map(dict, session._sent), answer_view(last.answer)]
                trajectory.status = status_after(trajectory.turns[last.index].finish_reason)
                if session.context_full:
                    trajectory.status = "context_full"
                break
        else:
            trajectory.status = "completed"
        if self.refused_turns:
            trajectory.status = "max_turns"
            trajectory.events["turn_refused"] = self.refused_turns
        return trajectory

    @property
    def out_of_room(self) -> bool:
        """Whether a limit of turns or tokens refused a request after some turns. If so, the agent
        may fail, and the trajectory ends with the turns that it has."""
        full = self.context_full or any(child.context_full for child in self.children.values())
        return bool(self.trajectory.turns) and (full or self.refused_turns > 0)

    @property
    def adapter(self) -> str:
        """The last turn's adapter, used by requests without a model's name; "" for the policy."""
        return "" if self._last is None else self.trajectory.turns[self._last.index].adapter

    @property
    def all_lost_turns(self) -> int:
        """Number of lost turns, child sessions' turns included."""
        return self.lost_turns + sum(child.lost_turns for child in self.children.values())

    def summary(self) -> JsonObject:
        """Return the session as JSON, without its tokens."""
        return {
            "id": self.id,
            "training": self.sampling is not None,
            "group": self.group,
            "created": int(self.created),
            "turns": len(self.trajectory.turns),
            "sampled_tokens": self.trajectory.sampled_tokens,
            "lost_turns": self.all_lost_turns,
            "parent": self.parent.id if self.parent is not None else None,
            "sessions": {name: child.id for name, child in self.children.items()},
            "reward": self.trajectory.reward,
            "forked": [t.fork_reason for t in self.trajectory.turns if t.fork_reason],
        }

    def describe(self) -> JsonObject:
        """Return the session as JSON, with its trajectory."""
        return {**self.summary(), "trajectory": json.loads(self.trajectory.to_json())}
