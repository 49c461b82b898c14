import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory.more import run_with
from turnwise.errors import TrajectoryError
from turnwise.trajectory import replace_prefix_tokens

EOS = 2
USER, ASSISTANT, TOOL, THINK = [50, 51], [50, 52], [50, 53], [60, 61]
TEXTS = {60: "<think>", 61: "</think>", 1001: chr(0x4E00 + 220) + chr(0x4E00 + 17)}


def decode(ids: list[int]) -> str:
    """A letter for each id, of which there are two: the template's own are 1000 more."""
    return "".join(TEXTS.get(i, chr(0x4E00 + i % 1000)) for i in ids)


ANY = SimpleNamespace(eos_token_id=EOS, decode=decode)


def splice(model: list[int], prefix: list[int], template: list[int]) -> list[int]:
    return replace_prefix_tokens(ANY, model, prefix, template)


def reason(model: list[int], prefix: list[int], template: list[int]) -> str:
    with pytest.raises(TrajectoryError) as error:
        splice(model, prefix, template)
    return error.value.reason


def test_the_models_ids_stand_where_the_template_has_its_own() -> None:
    model = [11, 12, 13, 40, 41, 220, 17, EOS]
    prefix = [11, 12, 13, 40, 41, 1001, EOS]
    template = [*prefix, 21, 22, 40, 41]
    expected = [11, 12, 13, 40, 41, 220, 17, EOS, 21, 22, 40, 41]
    assert splice(model, prefix, template) == expected
    assert splice(model[:-1], prefix, template) == expected  # cut off: one end is added


def test_the_published_example() -> None:
    """NeMo-RL's own, of `_replace_prefix_tokens`."""
    assert splice([11, 220, 17], [11, 1001, EOS], [11, 1001, EOS, 21]) == [11, 220, 17, EOS, 21]


def test_an_empty_model_prefix_gives_the_template() -> None:
    assert splice([], [1, EOS], [1, EOS, 3]) == [1, EOS, 3]


def test_what_follows_the_end_of_the_turn_stays() -> None:
    newline = 9
    model = [*USER, 7, EOS, newline, *ASSISTANT, 30, 31, EOS]
    prefix = [*USER, 7, EOS, newline, *ASSISTANT, 1030, 1031, EOS, newline]
    template = [*prefix, *USER, 8, EOS, newline, *ASSISTANT]
    assert splice(model, prefix, template) == [
        *model, newline, *USER, 8, EOS, newline, *ASSISTANT,
    ]  # fmt: skip


def test_stripped_reasoning_does_not_move_the_seam() -> None:
    """Scanning back by position would land on the user's end of turn."""
    reasoning = [60, 70, 71, 72, 73, 74, 75, 61]
    model = [*USER, 7, EOS, *ASSISTANT, *reasoning, 30, EOS]
    prefix = [*USER, 7, EOS, *ASSISTANT, *reasoning, 1030, EOS]
    template = [*USER, 7, EOS, *ASSISTANT, 1030, EOS, *USER, 8, EOS, *ASSISTANT]
    assert splice(model, prefix, template) == [*model, *USER, 8, EOS, *ASSISTANT]


def test_reasoning_stripped_from_several_turns_is_an_error() -> None:
    """The earlier of two turns that look alike would repeat what stands between them."""
    opening = [*USER, 7, EOS, *ASSISTANT, 60, 70, 61, 30, EOS]
    model = [*opening, *TOOL, 5, EOS, *ASSISTANT, 60, 71, 61, 30, EOS]
    template = [*USER, 7, EOS, *ASSISTANT, 30, EOS, *TOOL, 5, EOS, *ASSISTANT, 30, EOS]
    template += [*USER, 8, EOS, *ASSISTANT]
    assert reason(model, model, template) == "turn_lost"


def test_a_turn_that_the_template_drops_is_an_error() -> None:
    """Counting ends of turns would lose the tool's result."""
    model = [*USER, 7, EOS, *ASSISTANT, 70, 71, EOS]
    prefix = [*USER, 7, EOS, *ASSISTANT, 70, 71, EOS]
    template = [*USER, 7, EOS, *TOOL, 5, EOS, *ASSISTANT]
    assert reason(model, prefix, template) == "turn_lost"


def test_an_edited_history_is_an_error() -> None:
    model = [*USER, 7, EOS, *ASSISTANT, 30, EOS]
    prefix = [*USER, 8, EOS, *ASSISTANT, 30, EOS]
    assert reason(model, prefix, [*prefix, *USER, 9, EOS, *ASSISTANT]) == "history_changed"


def test_a_compacted_history_is_an_error() -> None:
    first = [*USER, 7, EOS, *ASSISTANT, 30, EOS]
    model = [*first, *USER, 8, EOS, *ASSISTANT, 31, EOS]
    for prefix in (
        [*USER, 8, EOS, *ASSISTANT, 31, EOS],
        [*USER, 7, EOS, *ASSISTANT, 33, EOS],
        [*USER, 7, EOS, *ASSISTANT, 31, EOS],
    ):
        assert reason(model, prefix, [*prefix, *USER, 9, EOS, *ASSISTANT]) == "history_changed"
    longer = [*first, *USER, 8, EOS, *ASSISTANT, 31, EOS]
    assert reason(first, longer, [*longer, *USER, 9, EOS, *ASSISTANT]) == "history_changed"


def test_no_end_of_turn_is_an_error() -> None:
    assert reason([1, 3], [1, 3], [1, 3, 4]) == "no_turn_end"
    ends_with_the_user = [*USER, 7, EOS, *ASSISTANT, 30]
    template = [*ends_with_the_user, *USER, 8, EOS, *ASSISTANT]
    model = [*USER, 7, EOS, *ASSISTANT, 30]
    assert reason(model, ends_with_the_user, template) == "history_changed"


def test_texts_of_assistant_turns_are_compared_where_they_can_be() -> None:
    letters = {30: "false", 31: "False", 32: "true", 70: "<think>", 71: "hm", 72: "</think>"}

    def read(ids: list[int]) -> str:
        return "".join(letters.get(i, f"<{i}>") for i in ids)

    tokenizer = SimpleNamespace(eos_token_id=EOS, decode=read)
    opening, more = [*USER, 7, EOS, *ASSISTANT], [*USER, 8, EOS, *ASSISTANT]
    model = [*opening, 70, 71, 72, 30, EOS]
    for same in ([31], [70, 71, 72, 31]):
        prefix = [*opening, *same, EOS]
        result = replace_prefix_tokens(tokenizer, model, prefix, [*prefix, *more])
        assert result == [*model, *more]
    edited = [*opening, 32, EOS]
    with pytest.raises(
        TrajectoryError, match="was sent with 'true' where the model's continues with"
    ):
        replace_prefix_tokens(tokenizer, model, edited, [*edited, *more])


@settings(max_examples=600)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from([USER, TOOL]), st.integers(7, 8), st.integers(30, 31)),
        min_size=1,
        max_size=4,
    ),
    stripped=st.sets(st.integers(0, 3)),
    dropped=st.sets(st.integers(0, 3)),
    user_ends=st.booleans(),
)
def test_rewritten_histories_are_right_or_an_error(
    turns: list[tuple[list[int], int, int]],
    stripped: set[int],
    dropped: set[int],
    user_ends: bool,
) -> None:
    """Templates strip reasoning from some turns, empty or drop others: never a wrong seam."""
    end = [EOS] if user_ends else []
    model: list[int] = []
    template: list[int] = []
    for index, (role, asked, said) in enumerate(turns):
        question = [*role, asked, *end]
        model += [*question, *ASSISTANT, *THINK, said, EOS]
        template += question
        if index not in dropped:
            reasoning = [] if index in stripped else THINK
            template += [*ASSISTANT, *reasoning, said, EOS]
    following = [*USER, 9, *end, *ASSISTANT]
    try:
        result = splice(model, model, [*template, *following])
    except TrajectoryError:
        return
    assert result == [*model, *following]


class Characters:
    """A tokenizer of one id for each character, and one for the end of a turn."""

    eos_token_id = 0x110000

    def __init__(self, eos: str) -> None:
        self.eos = eos

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in text.split(self.eos):
            ids += [*map(ord, part), self.eos_token_id]
        return ids[:-1]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.eos if i == self.eos_token_id else chr(i) for i in ids)


CHATML = (
    "<|im_end|>",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n<think>\n",
)
MISTRAL = ("</s>", "<s>[INST] {}[/INST]", "[INST] And more of it?[/INST]")
FORMATS = {"chatml": CHATML, "mistral": MISTRAL}
"""The end of a turn, a question, and what follows the answer."""


def spliced(form: str, said: str, sent: str, asked: str = "2?", again: str | None = None) -> bool:
    """Whether the model's ids stand in the result, which is right, and not an error."""
    eos, question, more = FORMATS[form]
    tokenizer = Characters(eos)
    model = question.format(asked) + said + eos
    prefix = question.format(again or asked) + sent + eos
    texts = (model, prefix, prefix + more)
    try:
        result = replace_prefix_tokens(tokenizer, *map(tokenizer.encode, texts))
    except TrajectoryError as error:
        if error.reason != "history_changed":
            raise
        return False
    assert tokenizer.decode(result) == model + more
    return True


SAMPLED = '{"name": "add", "arguments": {"b": 1e3, "a": "\\u00fc"}}'
PRINTED = '{"name": "add", "arguments": {"a": "ü", "b": 1000.0}}'
MARKS = {"chatml": "<tool_call>\n{}\n</tool_call>", "mistral": "[TOOL_CALLS]{}"}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("sampled", "printed"),
    [
        (SAMPLED, PRINTED),
        (
            '{"arguments": {"a": [1, 2,],}, "name": "f",}',
            '{"name": "f", "arguments": {"a": [1, 2]}}',
        ),
        ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": "{\\"a\\": 1.0}"}'),
        ("{'name': 'f', 'arguments': {'a': True}}", '{"arguments": {"a": true}, "name": "f"}'),
        (
            "<function=f>\n<parameter=b>\n1e3\n</parameter>\n<parameter=a>\nx\n</parameter>\n</function>",
            "<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1000.0\n</parameter>\n</function>",
        ),
    ],
)
def test_a_call_that_is_written_otherwise_keeps_the_models_ids(
    form: str, sampled: str, printed: str
) -> None:
    """Keys in another order, other spellings of numbers and characters, trailing commas, and text
    after the call, which its parser drops: the published rule is right, and so is the result."""
    said, sent = (MARKS[form].format(call) for call in (sampled, printed))
    assert spliced(form, said, sent)
    assert spliced(form, f"I add. {said}\nDone.", f"I add. {sent}")
    assert spliced(form, f"<think>\nAs {sampled}?\n</think>\n\n{said}{said}", f"{sent}{sent}")


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_was_edited_is_an_error(form: str) -> None:
    call, printed = (MARKS[form].format(call) for call in (SAMPLED, PRINTED))
    for sent in (
        printed.replace("1000.0", "1001.0"),
        printed.replace("ü", "u"),
        printed.replace("add", "sub"),
        SAMPLED.join(MARKS[form].split("{}")).replace("u00fc", " u00fc"),  # white space counts
        printed.replace(', "b": 1000.0', ""),
        f"{printed}{printed}",
        f"I add. {printed}",
    ):
        assert not spliced(form, call, sent)
    assert not spliced(form, f"{call} Done.", f"{printed} Done!")
    assert not spliced(form, f"I add. {call}", printed)
    tagged = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    for sent in (
        tagged.replace("=f", "=g"),
        tagged.replace("=a", "=b"),
        tagged.replace("1", "2"),
        "<function=f>\n</function>",
    ):
        assert not spliced(form, tagged, sent)
    assert not spliced(form, f"{tagged}\n<function=g>\n</function>", tagged)
    assert spliced(form, "<function=g>\n</function> Done.", "<function=g>\n</function>")
    for answer, sent in (
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'),  # no call: the client has it as text
        ('{"a": 1} it is.', '{"a": 1}'),
        ("Yes", "yes"),
    ):
        assert not spliced(form, answer, sent)


@pytest.mark.parametrize("form", FORMATS)
def test_what_others_said_may_not_be_written_otherwise(form: str) -> None:
    call, printed = (MARKS[form].format(call) for call in (SAMPLED, PRINTED))
    for asked, again in (
        (call, printed),
        (f"{call} it", call),
        ("It's 2?", "Its 2?"),
        ("Is it True?", "Is it true?"),
    ):
        assert not spliced(form, "It is 4.", "It is 4.", asked, again)
        assert not spliced(form, call, printed, asked, again)


def test_a_result_of_a_tool_is_no_text_after_a_call() -> None:
    """Of a template whose turns of tools have no end of their own."""
    call, printed = (MARKS["chatml"].format(call) for call in (SAMPLED, PRINTED))
    assert not spliced("chatml", f"{call}<|eom_id|><|role|>tool<|/role|>5", printed)


contents = st.lists(st.sampled_from([7, 8, 9, EOS]), max_size=4)
sampled = st.lists(st.integers(30, 39), min_size=1, max_size=4)


@settings(max_examples=300)
@given(
    turns=st.lists(st.tuples(contents, sampled), min_size=1, max_size=4),
    new=contents,
    cut_off=st.booleans(),
)
def test_random_conversations(
    turns: list[tuple[list[int], list[int]]], new: list[int], cut_off: bool
) -> None:
    """Users' content may hold ends of turns; what was sampled is rendered as other ids."""
    model, prefix = [], []
    for said, ours in turns:
        theirs = [1000 + token for token in ours]
        model += [*USER, *said, EOS, *ASSISTANT, *ours, EOS]
        prefix += [*USER, *said, EOS, *ASSISTANT, *theirs, EOS]
    following = [*USER, *new, EOS, *ASSISTANT]
    given_model = model[:-1] if cut_off else model
    assert splice(given_model, prefix, [*prefix, *following]) == [*model, *following]


@settings(max_examples=300)
@given(
    turns=st.lists(st.tuples(contents, sampled), min_size=1, max_size=4),
    edit=st.data(),
    new=contents,
)
def test_random_edits_of_what_users_said_never_pass(
    turns: list[tuple[list[int], list[int]]], edit: st.DataObject, new: list[int]
) -> None:
    model, prefix = [], []
    edited = edit.draw(st.integers(0, len(turns) - 1))
    for index, (said, ours) in enumerate(turns):
        other = [*said, 10] if index == edited else said
        model += [*USER, *said, EOS, *ASSISTANT, *ours, EOS]
        prefix += [*USER, *other, EOS, *ASSISTANT, *ours, EOS]
    with pytest.raises(TrajectoryError):
        splice(model, prefix, [*prefix, *USER, *new, EOS, *ASSISTANT])


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        test_rewritten_histories_are_right_or_an_error,
        test_random_conversations,
        test_random_edits_of_what_users_said_never_pass,
    ],
)
def test_more_histories_are_right_or_an_error(test: Any) -> None:
    run_with(test, examples=10_000)


def test_what_a_client_sends_is_compared_in_time() -> None:
    """Blocks of reasoning that do not end, or that are all alike, cost no more than others."""
    tokenizer = SimpleNamespace(eos_token_id=EOS, decode=lambda ids: "".join(map(LETTERS.get, ids)))
    began = time.thread_time()
    for reasoning in ([70] * 30_000, [70, 7, 72] * 10_000):
        model = [*USER, 7, EOS, *ASSISTANT, *reasoning, 30, EOS]
        prefix = [*USER, 7, EOS, *ASSISTANT, 31, EOS]
        with pytest.raises(TrajectoryError):
            replace_prefix_tokens(tokenizer, model, prefix, [*prefix, *USER, 8, EOS, *ASSISTANT])
    for begun in ("[{", '{"a":', '{"', "<parameter=a>", '[{"name":"\\"'):
        said = begun * (60_000 // len(begun))
        assert not spliced("chatml", f"{said}x", f"{said}y")
    assert time.thread_time() - began < 20  # a hundredth of a quadratic one's


LETTERS = {70: "<think>", 72: "</think>", 30: "4", 31: "5", 7: "a", EOS: "."} | dict.fromkeys(
    [*USER, *ASSISTANT, 8], "b"
)
