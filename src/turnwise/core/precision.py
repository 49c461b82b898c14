"""The precision of a run's model, where `model.dtype` leaves it open."""

from turnwise.config import Config
from turnwise.core.gguf import resolve_model
from turnwise.errors import InputError, first_line


def with_precision(config: Config, on_gpu: bool) -> Config:
    """Return a configuration whose `model.dtype` is set: if it is null, to float32 on a CPU, and on
    a GPU to the precision of the model's files; InputError when they cannot be read.

    Example:
        >>> from turnwise.config import parse_config
        >>> config = parse_config({"model": {"path": "gpt2"}}, ["environment", "data.path"])
        >>> config.model.dtype, with_precision(config, on_gpu=False).model.dtype
        (None, 'float32')
    """
    if config.model.dtype is not None:
        return config
    return config.changed({"model": {"dtype": _of_files(config) if on_gpu else "float32"}})


def _of_files(config: Config) -> str:
    """Return bfloat16 for files of half precision, whose range float16 lacks in training."""
    from transformers import AutoConfig  # seconds to import

    path, trust = config.model.path, config.model.trust_remote_code
    try:
        shape = AutoConfig.from_pretrained(resolve_model(path), trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.path: {path} cannot be read: {first_line(error)}") from error
    found = shape.dtype or shape.get_text_config().dtype
    return "bfloat16" if found is not None and found.itemsize == 2 else "float32"
