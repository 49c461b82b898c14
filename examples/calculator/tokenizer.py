"""A small byte-level BPE tokenizer with Qwen's special tokens and a Qwen-style chat template.

Pre-tokenisation follows Qwen2: words keep the space before them, every digit is a token.
One rule is added: JSON between two numbers is one word, so that a tool's schema and the fixed
parts of a tool call are one token each. Training is deterministic.
"""

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .conversations import conversation_text
from .problems import train_problems

VOCABULARY = 1280

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip

_JSON = r"(?:\{|, )\"[^\r\n\p{N}]*"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(seed: int, conversations: int = 1000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on solved problems in all phrasings, tool preamble included."""
    rows = train_problems(conversations, seed)
    return train_tokenizer(lambda bare: [conversation_text(bare, row) for row in rows], VOCABULARY)


def train_tokenizer(
    render: Callable[[PreTrainedTokenizerFast], list[str]], vocabulary: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of this kind.

    Args:
        render: Makes the texts to train on, with the chat template of an untrained tokenizer.
        vocabulary: Number of tokens, special ones included.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{_JSON}|{_WORDS}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    texts = render(_with_template(backend))
    for marker in _SPECIAL + _MARKERS:
        texts = [text.replace(marker, "\0") for text in texts]
    pieces = [piece for text in texts for piece in text.split("\0")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_SPECIAL) - len(_MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pieces, trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in _MARKERS])
    return _with_template(backend)


def _with_template(backend: Tokenizer) -> PreTrainedTokenizerFast:
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
