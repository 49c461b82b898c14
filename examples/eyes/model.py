"""The example's model: Qwen2.5-VL's architecture, small, with random weights, and its processor.

Heads have size 32, the minimum for vLLM's attention on a CPU. Two layers are enough: in the
first, each card can compare itself with the colour that is asked for; in the second, the answer can
find the card that fits.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from examples.calculator.tokenizer import train_tokenizer

from .environment import SIDE

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()
_MARKERS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VOCABULARY = 1024  # at most: each word of the example's texts becomes a token


def build_tokenizer(rows: list[dict[str, Any]]) -> PreTrainedTokenizerBase:
    """Train a tokenizer on conversations (`messages`, `tools`), and add the markers of images."""

    def texts(bare: PreTrainedTokenizerBase) -> list[str]:
        bare.chat_template = TEMPLATE
        made = [
            bare.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
            for row in rows
        ]
        return [text.replace(_IMAGE, "") for text in made]

    tokenizer = train_tokenizer(texts, _VOCABULARY)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_MARKERS]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int
) -> Qwen2_5_VLForConditionalGeneration:
    """Make a float32 model for the tokenizer; the same seed gives the same weights."""
    torch.manual_seed(seed)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in _MARKERS)
    stop = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e3},
        "bos_token_id": None,
        **stop,
    }
    tower = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [0],
        "patch_size": SIDE // 2,  # four patches are one token
        "window_size": 2 * SIDE,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**stop)
    return model


def save(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write the model with its tokenizer and the settings of its image processor."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": SIDE // 2,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))
