"""The precision of the model if `model.dtype` is not set; no other module chooses it."""

from turnwise.config import ModelConfig
from turnwise.core.gguf import resolve_model
from turnwise.errors import InputError, first_line


def precision(model: ModelConfig, on_gpu: bool) -> str:
    """Return `model.dtype` if it is set. Else return float32 on a CPU, and on a GPU the precision
    of the model's files, but bfloat16 in place of float16, whose range is too small for training.
    Raise InputError when the files cannot be read."""
    if model.dtype is not None or not on_gpu:
        return model.dtype or "float32"
    from transformers import AutoConfig  # seconds to import

    path, trust = model.path, model.trust_remote_code
    try:
        shape = AutoConfig.from_pretrained(resolve_model(path), trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path: {path} cannot be read: {first_line(error)}") from error
    found = shape.dtype or shape.get_text_config().dtype
    return "bfloat16" if found is not None and found.itemsize == 2 else "float32"
