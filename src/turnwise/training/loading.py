"""Loading of the trainer's models.

Forward passes use `model.dtype`. Weights that learn are float32 beside it, since steps with a small
learning rate vanish in bfloat16, or bfloat16 with steps that are rounded at random
(`training.weights_dtype`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from turnwise.config import Config, OtherModel
from turnwise.core.gguf import resolve_model
from turnwise.errors import InputError
from turnwise.training.attention import use_packed_attention
from turnwise.training.context import check_divisible
from turnwise.training.lora import Role
from turnwise.training.shards import can_be_sliced, read_shards, read_tensor, weight_files

POLICY = OtherModel()
"""The model of `model.path` itself."""


def shared_roles(
    config: Config, reference: OtherModel | None, value: OtherModel | None
) -> tuple[Role, ...]:
    """Return the roles that the policy's backbone plays with adapters; none without LoRA.

    A model beside the policy is one of them unless it has a path or a precision of its own.
    """
    if not config.model.lora.rank:
        return ()

    def shared(other: OtherModel | None) -> bool:
        return (
            other is not None
            and path_of(config, other) == path_of(config, POLICY)
            and other.dtype in (None, config.model.dtype)
        )

    return (
        "policy",
        *(("reference",) if shared(reference) else ()),
        *(("value",) if shared(value) else ()),
    )


def path_of(config: Config, other: OtherModel) -> str:
    """Return from where a model beside the policy is loaded: its own path, or the policy's."""
    return resolve_model(other.path or config.model.path)


def dtype_of(config: Config, other: OtherModel) -> torch.dtype:
    """Return the precision of the forward passes of a model beside the policy."""
    dtype: torch.dtype = getattr(torch, other.dtype or config.model.dtype)
    return dtype


def learning_dtype(config: Config, other: OtherModel) -> torch.dtype:
    """Return the type in which the weights of a model that learns are kept, and of a reference."""
    kept: torch.dtype = getattr(torch, config.training.weights_dtype)
    return kept if dtype_of(config, other) == kept else torch.float32


def load_model(
    config: Config, other: OtherModel = POLICY, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load a causal language model without dropout, which would make every ratio wrong.

    With several ranks it has no weights yet where `fill` can read each rank's shards.

    Args:
        other: By default the policy, the model of `model.path`.
        dtype: Type of its weights.

    Raises:
        InputError: when it cannot be loaded.
    """
    return _loaded(AutoModelForCausalLM, config, path_of(config, other), dtype)


def load_value_model(config: Config, other: OtherModel) -> PreTrainedModel:
    """Load the model that the value model starts from: a causal language model, or a reward model.

    Raises:
        InputError: when it cannot be loaded, or has other than one output.
    """
    path, trust = path_of(config, other), config.model.trust_remote_code
    with translate_unreadable(path):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    dtype = learning_dtype(config, other)
    if not is_classifier(shape):
        return load_model(config, other, dtype)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, config, path, dtype)


def _loaded(kind: Any, config: Config, path: str, dtype: torch.dtype = torch.float32) -> Any:
    trust = config.model.trust_remote_code
    with translate_unreadable(path):
        if dist.is_initialized() and (files := weight_files(path)):
            shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            with torch.device("meta"):
                model = kind.from_config(shape, dtype=dtype, trust_remote_code=trust)
            if can_be_sliced(model):
                _prepare(model, config)
                if hasattr(model, "score"):  # the head of a reward model, for the value model's
                    model.score.weight = nn.Parameter(read_tensor(files, "score.weight").float())
                return model.eval()
        model = kind.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    _prepare(model, config)
    return model.eval()


def _prepare(model: PreTrainedModel, config: Config) -> None:
    exchanges = use_packed_attention(model, config.training.attention)
    check_divisible(model, config.training.context_parallel, exchanges)


def fill(module: nn.Module, config: Config, device: torch.device, other: OtherModel) -> None:
    """Read this rank's shards of a module that has no weights yet.

    Raises:
        InputError: when the model's files do not hold them.
    """
    path = path_of(config, other)
    with translate_unreadable(path):
        if any(parameter.is_meta for parameter in module.parameters()):
            read_shards(module, weight_files(path), device)


def is_classifier(shape: PretrainedConfig) -> bool:
    """Return whether a checkpoint is a sequence classifier."""
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def translate_unreadable(path: str) -> Iterator[None]:
    """Raise an InputError that names the model, for errors of what reads it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error
