"""Encoding by segments returns the ids that the tokenizer returns for the whole text."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
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
from turnwise.trajectory.chat_template import IdCache, by_segments, segment_starts

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
