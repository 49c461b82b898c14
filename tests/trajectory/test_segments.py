"""Encoding by segments returns the ids that the tokenizer returns for the whole text."""

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.trajectory.published import SOURCES, TOOLS, chat_template
from turnwise.trajectory import chat_template as templates
from turnwise.trajectory.chat_template import IdCache, any_of, by_segments, segment_starts

WORDS = ["What", " is", " 2", "+", "\n", "  ", " ", "é", "▁", "<", "<|", "|>", "im_start", "a<b"]
MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "[INST]"]


def backend(kind: str, *added: AddedToken) -> Tokenizer:
    """A small tokenizer; `metaspace` treats the start of a text as the start of a word."""
    texts = ["What is 2 + 2? <|im_start|> is 4."] * 4
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.normalizer = normalizers.NFC()
        alphabet = list("▁abcdefghijklmnopqrstuvwxyzWhIST0123456789+<|>_[]?.\n é")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    made.add_tokens(list(added))
    return made


def encoder(made: Tokenizer) -> Any:
    return lambda text: list(made.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    "added",
    [
        [],
        [AddedToken("<|im_start|>user", normalized=False)],
        [AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)],
        [AddedToken("x<|im", normalized=False), AddedToken("wha", normalized=True)],
        [AddedToken("<think>x", lstrip=True, normalized=False)],
        [
            AddedToken("[INST]x", normalized=False),
            AddedToken("[INST]xwha", lstrip=True, normalized=False),
        ],
    ],
)
def test_segments_have_the_ids_of_the_whole_text(kind: str, added: list[AddedToken]) -> None:
    made = backend(kind, *added)
    whole = encoder(made)
    starts = segment_starts(made.get_added_tokens_decoder())
    assert starts is not None
    segmented = by_segments(whole, starts, IdCache(200))
    draw = random.Random(0)
    parts = [*WORDS, *MARKERS * 3, *(token.content for token in added), "x", "wha", "user"]
    for _ in range(2000):
        text = "".join(draw.choices(parts, k=draw.randrange(12)))
        assert segmented(text) == whole(text), text


def test_a_token_that_may_begin_inside_another_starts_no_segment() -> None:
    made = backend("bytes", AddedToken("x<|im", normalized=False))
    starts = segment_starts(made.get_added_tokens_decoder())
    assert starts is not None
    assert [found[0] for found in starts.finditer("".join(MARKERS) + "x<|im")] == [
        *("<think>", "[INST]", "x<|im")
    ]


def test_tokens_that_need_word_boundaries_forbid_segments() -> None:
    made = backend("bytes", AddedToken("wha", single_word=True))
    assert segment_starts(made.get_added_tokens_decoder()) is None


def test_published_templates_render_to_the_same_ids() -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    for name in SOURCES:
        template = chat_template(name, "bpe")
        try:
            text = template.render_text(messages, tools=TOOLS)
        except Exception:  # the template wants another form of messages
            continue
        whole = encoder(template.tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
        assert template.encode(text) == template.encode(text) == whole(text), name


def test_fixed_parts_are_encoded_once_and_the_oldest_are_dropped() -> None:
    made = backend("bytes")
    starts = segment_starts(made.get_added_tokens_decoder())
    assert starts is not None
    fixed = "<|im_start|>You add numbers.<|im_end|>"
    cache = IdCache(100)
    segmented = by_segments(encoder(made), starts, cache)
    for number in range(10):
        segmented(f"{fixed}\n<|im_start|>{number}")
    assert cache.made == 3 + 9
    assert sum(size for _, size in cache._entries.values()) <= 100


def test_many_short_segments_are_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes memory besides its text and ids."""
    monkeypatch.setattr(templates, "CACHED_ENTRIES", 10)
    made = backend("bytes")
    starts = segment_starts(made.get_added_tokens_decoder())
    assert starts is not None
    cache = IdCache(10_000)
    segmented = by_segments(encoder(made), starts, cache)
    for number in range(20):
        segmented(f"<|im_start|>{number}")
    assert len(cache) == 10


def test_threads_share_an_encoder() -> None:
    made = backend("bytes")
    whole, starts = encoder(made), segment_starts(made.get_added_tokens_decoder())
    assert starts is not None
    segmented = by_segments(whole, starts, IdCache(300))
    texts = [f"<|im_start|>{number % 7} is<|im_end|>" * (number % 3) for number in range(600)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(segmented, texts)) == [whole(text) for text in texts]


CONTENTS = st.text("ab<", max_size=6)
ADDED = st.builds(
    AddedToken, CONTENTS, lstrip=st.booleans(), normalized=st.sampled_from([False, False, True])
)


@given(st.lists(ADDED, max_size=10), st.text("ab<", max_size=40))
def test_segment_starts_match_a_comparison_of_all_pairs(
    tokens: list[AddedToken], text: str
) -> None:
    starts, expected = segment_starts(dict(enumerate(tokens))), compare_pairs(tokens)
    assert (starts is None) == (not expected)
    if starts is not None:
        plain = longest_first(expected)
        assert [found.span() for found in starts.finditer(text)] == [
            found.span() for found in plain.finditer(text)
        ]
        assert {content for content in expected if starts.fullmatch(content)} == {*expected}


def compare_pairs(tokens: Iterable[AddedToken]) -> list[str]:
    """The definition of `segment_starts`, in a time that grows with the square of the number."""
    raw = [token for token in tokens if not token.normalized and token.content]
    starts: list[str] = []
    for token in sorted(raw, key=lambda token: len(token.content), reverse=True):
        content = token.content
        begins_within = any(
            other.content[index:].startswith(content[: len(other.content) - index])
            for other in raw
            for index in range(1, len(other.content))
        )
        longer = [other.content for other in raw if len(other.content) > len(content)]
        extended = [other for other in longer if other.startswith(content)]
        if not token.lstrip and not begins_within and all(other in starts for other in extended):
            starts.append(content)
    return starts


def longest_first(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


@given(st.lists(st.text("ab|(", min_size=1, max_size=5)), st.text("ab|(", max_size=40))
def test_a_pattern_of_several_texts_finds_the_longest(texts: list[str], text: str) -> None:
    assert [found.span() for found in any_of(texts).finditer(text)] == [
        found.span() for found in longest_first(texts).finditer(text)
    ]


def test_a_pattern_takes_hundreds_of_texts_that_share_prefixes() -> None:
    found = any_of(["\n" * count for count in range(1, 500)]).search("a" + "\n" * 700)
    assert found is not None
    assert found.span() == (1, 500)


class CountedText(str):
    """A text that counts the parts which are taken of it, and its comparisons."""

    __slots__ = ()
    count = 0

    def __getitem__(self, index: Any) -> str:
        CountedText.count += 1
        return super().__getitem__(index)

    def startswith(self, *given: Any) -> bool:
        CountedText.count += 1
        return super().startswith(*given)


class Added:
    """As `AddedToken`, of which a text does not keep its class."""

    lstrip = normalized = single_word = False

    def __init__(self, number: int) -> None:
        self.content = CountedText(f"<unused{number:04}>")


def test_finding_segment_starts_takes_linear_work() -> None:
    def work(number: int) -> int:
        added: Mapping[int, Any] = {index: Added(index) for index in range(number)}
        CountedText.count = 0
        assert segment_starts(added) is not None
        return CountedText.count

    assert work(400) < 2.2 * work(200)


def test_a_search_takes_no_longer_with_thousands_of_added_tokens() -> None:
    text = "<div> a < b " * 500

    def seconds(number: int) -> float:
        added = ["\n\n", *(f"<unused{index}>" for index in range(number))]
        find: Callable[[str], Any] = any_of(added).findall

        def once() -> float:
            started = time.perf_counter()
            find(text)
            return time.perf_counter() - started

        return min(once() for _ in range(5))

    assert seconds(6000) < 30 * seconds(10)
