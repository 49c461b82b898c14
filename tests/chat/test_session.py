"""The store of sessions: what it keeps, what it forgets, and what rollouts have for themselves."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trajectory.test_thinking_templates import thinking
from turnwise.chat import session_store
from turnwise.chat.messages import Conversation
from turnwise.chat.prompts import NextPrompt
from turnwise.chat.session import Session, valid_name
from turnwise.chat.session_store import SessionStore
from turnwise.config import SamplingConfig
from turnwise.engine.protocol import Completion
from turnwise.errors import InputError
from turnwise.trajectory import Trajectory, audit

SAMPLING = SamplingConfig()


class Request:
    """The object that an answer's reader holds on to: a whole HTTP request."""


def turn(session: Session, text: str = "4", sent: int = 1, **unknown: Any) -> Request:
    request, before = Request(), len(session.trajectory.turns)
    messages = [{"role": "user", "content": f"{n}: 2 + 2?", **unknown} for n in range(sent)]
    session.record(
        [1, 2, 3, before],
        Completion([4, 0], [-0.1, -0.2], [0, 0], "stop"),
        asked=Conversation(messages),
        answer=lambda held=request: (text, ()),  # type: ignore[misc]
        prompt=NextPrompt(None, covered=sent - 1),
    )
    return request


def test_any_number_of_sessions_can_be_opened() -> None:
    store = SessionStore(SAMPLING)
    for number in range(20_000):
        store.open(f"s{number}")
    assert len(store) == 20_000
    with pytest.raises(InputError, match="the session s7 is already open"):
        store.open("s7")


def test_a_session_that_is_idle_for_too_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr(session_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    store = SessionStore(SAMPLING, idle_seconds=0.2)
    store.open("old")
    with store.request("busy", None):
        now[0] += 0.1
        assert store.get("old") is not None
        now[0] += 0.2
        assert store.get("old") is None
        assert store.gone("old") == (
            "was forgotten: 0.2 s without a request (serving.session_idle)"
        )
        assert store.get("busy") is not None
    store.open("old")  # it may be opened again
    assert store.gone("old") is None


def test_full_memory_forgets_the_session_idle_for_longest() -> None:
    store = SessionStore(SAMPLING, max_bytes=7 << 19)
    for name in ("first", "second", "third"):
        with store.request(name, None) as session:
            turn(session, name="n" * (1 << 20))
    with store.request("first", None):  # idle for shortest then
        pass
    with store.request("busy", None) as busy:
        turn(busy, name="n" * (4 << 20))
        assert len(store) == 4  # its request has not ended
        with store.request("fourth", None) as session:
            turn(session, name="n" * (1 << 20))
        assert {session.id for session in store} == {"first", "third", "busy", "fourth"}
        assert "sessions took more than 3 MB" in str(store.gone("second"))
        turn(busy)
        assert len(busy.trajectory.turns) == 2
    assert len(store) == 0
    assert store._bytes == 0


def test_an_unnamed_session_lives_as_long_as_its_completion_ids() -> None:
    store = SessionStore(SAMPLING, max_bytes=1 << 20)
    with store.request(None, None) as session:
        turn(session)
        store.remember_completion("chatcmpl-1", session)
    assert store.of_request(None, "chatcmpl-1") is session
    for number in range(600):
        with store.request(None, None) as other:
            store.remember_completion(f"chatcmpl-{number}-more", other)
    assert store.of_request(None, "chatcmpl-1") is not session
    assert len(store._by_completion) < 600
    with store.request(None, "of somebody else") as fresh:
        assert fresh.trajectory.turns == []
    with store.request(None, "1") as fresh:  # that id was forgotten, with or without the prefix
        assert fresh is not session
        assert not store.has_completion("chatcmpl-1")
        store.remember_completion("chatcmpl-2", fresh)
    assert store.of_request(None, "2") is store.of_request(None, "chatcmpl-2") is fresh


def test_a_session_drops_requests_unknown_keys_and_repeats() -> None:
    store = SessionStore(SAMPLING)
    with store.request("s", None) as session:
        request = weakref.ref(turn(session, padding="x" * (2 << 20)))
        for sent in range(2, 102):
            turn(session, sent=sent)
    gc.collect()
    assert request() is None
    assert session.size < 300_000
    assert "padding" not in session.finish().messages[0]
    assert len(session.finish().messages) == 102


def test_a_rollouts_session_is_for_its_agent_alone() -> None:
    store = SessionStore(SAMPLING, idle_seconds=1e-9, max_bytes=1)
    trajectory = Trajectory("problem")
    one = store.open_private(trajectory, sampling=SAMPLING, group="g")
    other = store.open_private(Trajectory("problem"), sampling=SAMPLING)
    assert len({one.id, other.id}) == 2
    assert len(one.id) == 32
    assert list(store) == []
    with store.request(one.id, None) as session:
        turn(session)
        store.remember_completion("chatcmpl-1", session)
    assert store.get(one.id) is one  # neither age nor memory ends it
    assert store.of_request(None, "chatcmpl-1") is not one
    assert len(trajectory.turns) == 1
    store.close(one.id)
    assert store.gone(one.id) == "is closed"
    assert len(store) == 1


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "a\n", "a\r\nX: y", "a\0", "x" * 201, "ä", "a?b", "a#b"]
)
def test_a_name_that_no_url_holds_is_no_name(name: str) -> None:
    assert not valid_name(name)
    assert valid_name("step-1:rows.jsonl:7_a~")


def said(*texts: str) -> Conversation:
    """Texts of user and assistant in alternation."""
    roles = ("user", "assistant")
    return Conversation([{"role": roles[n % 2], "content": t} for n, t in enumerate(texts)])


@pytest.mark.parametrize("read", [False, True])
def test_a_request_continues_the_longest_then_latest_match(
    read: bool,
) -> None:
    session = Session("s")
    for texts, expected in (
        (("a",), None),
        (("a", "said", "b"), 0),
        (("a",), None),  # the same again
        (("a", "said", "c"), 2),  # the later one
        (("a", "said", "b", "said", "d"), 1),  # the longest
        (("a", "said", "b", "else", "d"), 2),  # as far as it is the same
        (("x",), None),
        (("a", "no", "b"), None),
        (("a", "said"), None),  # nothing new after the answer
    ):
        before = session._turn_before(said(*texts))
        assert (None if before is None else before.index) == expected, texts
        session.record(
            [*range(len(texts))],
            Completion([len(session.trajectory.turns)], [-0.1], [0], "stop"),
            asked=said(*texts),
            answer=lambda: ("said", ()),
            prompt=NextPrompt(None),
        )
        if read:
            session.read_answers()
    for opening, reason in (("a", "history_changed"), ("y", "new_conversation")):
        asked = said(opening, "other", "b")
        assert session.next_prompt(asked, None).fork_reason == reason  # type: ignore[arg-type]
    other = Conversation(said("a", "said", "b").messages, [{"type": "function"}])
    assert session._turn_before(other) is None  # it was asked without tools


def test_turns_in_flight_count_towards_the_limit_of_turns() -> None:
    store = SessionStore(SAMPLING)
    session = store.open_private(Trajectory("problem"), sampling=SAMPLING, max_turns=3)
    under = store.open_under(session, "helper")
    for one in (session, under, session):
        one.begin_turn()
    for one in (session, under):
        with pytest.raises(InputError, match=r"its 3 turns, .* \(rollout\.max_turns\)"):
            one.begin_turn()
    under.lose_turn()  # its client has gone
    turn(session)
    session.begin_turn()
    trajectory = session.finish()
    assert (trajectory.status, trajectory.events["turn_refused"]) == ("max_turns", 2)
    client = store.open("weather-1")
    client.begun_turns = session_store.MAX_TURNS
    with pytest.raises(InputError, match=r"its 10,000 turns, .*: open another session"):
        client.begin_turn()


def test_sessions_are_listed_in_pages() -> None:
    store = SessionStore(SAMPLING)
    for number in range(25):
        store.open(f"s{number}").created = 1_000.0 + number // 3  # some in the same moment
    store.open_private(Trajectory("problem"), sampling=SAMPLING)
    place, names = None, list[str]()
    while page := store.page(place, 10):
        place = page[-1][0]
        names += [summary["id"] for _, summary in page]
        store.close(page[-1][1]["id"])  # a page begins after it all the same
    assert len(names) == len(set(names)) == 25


def ask(session: Session, messages: list[dict[str, Any]], text: str) -> None:
    """Send a conversation as an agent does, and sample the text as its answer."""
    template = thinking("keeps")
    asked = Conversation([dict(message) for message in messages])
    prompt = session.next_prompt(asked, template)
    ids = prompt.token_ids or template.render(messages)
    sampled = template.encode(f"{text}<|im_end|>")
    session.record(
        ids,
        Completion(sampled, [-0.1] * len(sampled), [0] * len(sampled), "stop"),
        asked=asked,
        answer=lambda: (text, ()),
        prompt=prompt,
    )
    messages.append({"role": "assistant", "content": text})


def test_assistant_messages_of_an_agent_are_context_only() -> None:
    """Before the first turn, after a turn, and in the place of one."""
    session, template = Session("s", SAMPLING), thinking("keeps")
    question, own = {"role": "user", "content": "Oslo?"}, "I am sorry for that."
    foreign = {"role": "assistant", "content": own}
    messages: list[dict[str, Any]] = [question, foreign, question]
    ask(session, messages, "rain")
    messages += [foreign, question]
    ask(session, messages, "snow")
    messages[-1] = foreign
    messages.append(question)
    ask(session, messages, "wind")
    trajectory = session.finish()
    # The third continues the first, as the second does, which has another answer.
    assert [t.fork_reason for t in trajectory.turns] == [None, None, "branched"]
    samples = trajectory.samples()
    for sample in samples:
        assert own in template.decode_all(sample.token_ids)
    trained = [
        token
        for sample in samples
        for token, mask in zip(sample.token_ids, sample.response_mask, strict=True)
        if mask
    ]
    said = "rain<|im_end|>snow<|im_end|>wind<|im_end|>"
    assert template.decode_all(trained) == said
    assert audit(trajectory).violations == 0
    assert trajectory.sampled_tokens == len(trained)
