"""The texts of choices, read after the end of their prompts alone."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from turnwise.engine.protocol import Chunk
from turnwise.internals import vllm_server as vllm
from turnwise.serving.openai import choices
from turnwise.serving.openai.choices import ChoiceReader

TEXT = "Grüße aus Köln: 東京 12 + 45 = 57 👩‍👧 naïve\n\n  two  spaces\tand a tab. " * 3


def sentencepiece() -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes spaces as ▁ and unknown characters as bytes."""
    pieces = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *map(chr, range(33, 127)), "▁a", "an", "and", "▁and"]
    merges = [("▁", "a"), ("a", "n"), ("an", "d"), ("▁a", "n"), ("▁", "and")]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, "▁an"]))}
    made = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")


def request_of(ids: list[int], **params: Any) -> vllm.EngineCoreRequest:
    return vllm.EngineCoreRequest(
        request_id="one",
        prompt_token_ids=ids,
        mm_features=None,
        sampling_params=vllm.SamplingParams(**params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_text_does_not_depend_on_the_beginning_of_its_prompt(
    kind: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = tokenizer if kind == "bytes" else sentencepiece()
    ids: list[int] = used.encode(TEXT, add_special_tokens=False)
    assert len(ids) > 3 * choices._CONTEXT
    source = random.Random(0)

    def text_of(prompt: list[int], sampled: list[int], **params: Any) -> list[str]:
        reader = ChoiceReader(used, request_of(prompt, **params))
        chunks = [Chunk([token], [0.0], [0]) for token in sampled]
        return [reader.read(chunk).text for chunk in chunks]

    for _ in range(60):
        cut = source.randrange(2 * choices._CONTEXT, len(ids))
        sampled = (ids[cut:] + ids)[:40]
        for params in ({}, {"skip_special_tokens": False}, {"stop": [" and"]}):
            found = text_of(ids[:cut], sampled, **params)
            with monkeypatch.context() as whole:
                whole.setattr(choices, "_CONTEXT", 10**6)
                assert text_of(ids[:cut], sampled, **params) == found
            assert TEXT[:20] not in found[0], (
                "a prompt that ends within a character is not repeated"
            )
    assert any(found)


def test_a_prompt_of_special_tokens_alone_has_a_text_after_it(tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    reader = ChoiceReader(tokenizer, request_of([end] * 200))
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert reader.read(Chunk([token], [0.0], [0])).text == "a"
