"""Chat templates as published, on two tokenizers: what the bridge has to cope with.

The templates are package data of `trl`. The tokenizers are tekken, from `mistral_common`, and a
byte-level BPE trained here; each template's own markers are added as special tokens.
"""

import base64
import importlib.util
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from turnwise.trajectory import ChatTemplate

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluates an expression.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": "It."}},
                "required": ["a"],
            },
        },
    }
]
TOKENIZERS = ("bpe", "tekken")
WANTS_PARTS = ("idefics3", "smolvlm", "llava_next")

_MARKER = re.compile(
    r"<\|[^|<>\s{}']*\|>|<｜[^｜]*｜>|<\|[a-z_]+>|<[a-z_]+\|>|</?[a-z_]+>|\[/?[A-Z_]+\]"
)
_EOS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "llama": "<|eot_id|>",
    "llava": "</s>",
    "muse": "<|eot|>",
    "phi": "<|endoftext|>",
    "smolvlm": "<end_of_utterance>",
}
TURN_ENDS = {*_EOS.values(), "<|im_end|>", "<|end|>", "<|call|>"} - {"<|endoftext|>"}


def _folder() -> Path:
    spec = importlib.util.find_spec("trl")  # finds the package without importing it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


SOURCES = {path.stem: path.read_text() for path in sorted(_folder().glob("*.jinja"))}


def eos_of(name: str) -> str:
    fitting = [prefix for prefix in _EOS if name.startswith(prefix)]
    return _EOS[max(fitting, key=len)] if fitting else "<|im_end|>"


@cache
def chat_template(name: str, tokenizer: str) -> ChatTemplate:
    """A published template on one of the two tokenizers."""
    return template_of(SOURCES[name], eos_of(name), tokenizer)


def template_of(source: str, eos: str = "<|im_end|>", tokenizer: str = "bpe") -> ChatTemplate:
    """A template's text on one of the two tokenizers."""
    markers = sorted({*_MARKER.findall(source), eos, "<s>"})
    make = {"bpe": _bpe, "tekken": Tekken}[tokenizer]
    return ChatTemplate(make(markers, eos), chat_template=source)


def _bpe(markers: list[str], eos: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_trained_bpe())
    backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=eos
    )


@cache
def _trained_bpe() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SOURCES.values(), trainer)
    return str(backend.to_str())


@cache
def _tekken() -> dict[str, Any]:
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.origin is not None
    data = json.loads((Path(spec.origin).parent / "data" / "tekken_240911.json").read_text())
    config = data["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(v["token_bytes"]): v["rank"] for v in data["vocab"][:size]}
    return {"name": "tekken", "pat_str": config["pattern"], "mergeable_ranks": ranks}


class Tekken:
    """Tekken with special tokens of one's own, behind the face of a slow Hugging Face tokenizer."""

    chat_template = None
    name_or_path = "tekken"

    def __init__(self, markers: list[str], eos: str) -> None:
        parts = _tekken()
        special = {m: len(parts["mergeable_ranks"]) + i for i, m in enumerate(markers)}
        self._encoding = tiktoken.Encoding(special_tokens=special, **parts)
        self._special = special
        self.eos_token_id = special[eos]
        self.all_special_tokens, self.all_special_ids = list(special), list(special.values())

    def get_added_vocab(self) -> dict[str, int]:
        return self._special

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int], **options: Any) -> str:
        return self._encoding.decode(ids)

    def apply_chat_template(
        self, messages: list[Any], *, tools: Any, chat_template: str, **options: Any
    ) -> str:
        eos = self._encoding.decode([self.eos_token_id])
        generation_prompt = options.pop("add_generation_prompt")
        (text,), _ = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=generation_prompt,
            bos_token="<s>",
            eos_token=eos,
            pad_token=eos,
        )
        return str(text)


def spelled(template: ChatTemplate, text: str, rng: random.Random) -> list[int]:
    """Ids that decode to `text` as a model might sample it: rarely the tokenizer's own."""
    ids: list[int] = []
    position = 0
    while position < len(text):
        marker = template.special_token_pattern.match(text, position)
        end = marker.end() if marker else min(len(text), position + rng.randint(1, 6))
        if not marker and (found := template.special_token_pattern.search(text, position)):
            end = min(end, found.start())
        ids += template.encode(text[position:end])
        position = end
    return ids
