"""A tiny model that reads images, with random weights, and pictures for it."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pictures

from turnwise.config import Config, parse_config

PATCH = 28  # a square of pixels of this side is one token
_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n' + call.function | tojson }}
{{- '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def make_qwen_vl(folder: Path, hidden_size: int = 64, layers: int = 2) -> str:
    """Save a tiny Qwen2.5-VL, its tokenizer and its processor; returns a folder."""
    # Seconds to import, which processes of environments with pictures need not spend.
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from examples.calculator.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(0, 100)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_TOKENS]})
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in _TOKENS)
    torch.manual_seed(0)
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        # Of 32, the least that vLLM's attention takes on a CPU.
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [1],
        "patch_size": PATCH // 2,
        "window_size": 56,
    }
    shape = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    Qwen2_5_VLForConditionalGeneration(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    size = {"shortest_edge": PATCH**2, "longest_edge": 64 * PATCH**2}
    parts = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH // 2}
    parts |= {"merge_size": 2, "temporal_patch_size": 2, "size": size}
    parts |= {"processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(parts))
    return str(folder)


def vision_config(path: str, **sections: Any) -> Config:
    """Return a small configuration of this model."""
    tree: dict[str, Any] = {
        "environment": "examples.calculator.environment:Calculator",
        "model": {"path": path, "max_length": 512},
        "data": {"path": "rows.jsonl"},
        "engine": {"kv_cache_gib": 0.0625},
        "sampling": {"n": 2, "max_tokens": 12},
    }
    sections["training"] = {"threads": 1, **sections.get("training", {})}
    return parse_config(tree | sections)


def picture(width: int = 56, height: int = 84, seed: int = 0) -> Pictures.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pictures.fromarray(pixels)


def encoded(image: Pictures.Image, format: str = "PNG") -> bytes:
    """Return the file of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def asked(*parts: Any, role: str = "user") -> dict[str, Any]:
    """Return a message of texts and pictures, as users give them."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": role, "content": content}
