"""Loading of the trainer's models, and the check that they fit.

Forward passes use `model.dtype`. Weights that learn are float32 beside it, since steps with a small
learning rate vanish in bfloat16, or bfloat16 with steps that are rounded at random
(`training.weights_dtype`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from turnwise.config import Config, OtherModel
from turnwise.core.gguf import resolve_model, resolve_tokenizer
from turnwise.errors import InputError
from turnwise.training.attention import use_packed_attention
from turnwise.training.context import check_divisible
from turnwise.training.lora import Role, add_adapters
from turnwise.training.shards import can_be_sliced, read_shards, read_tensor, weight_files

_GIB = 2**30
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


def check_room(
    config: Config,
    device: torch.device,
    ranks: int,
    frozen: OtherModel | None,
    trained: OtherModel | None,
) -> None:
    """Check that a rank has memory for all models and their optimizers; ignores activations.

    Args:
        frozen: The reference model, if any.
        trained: The value model, if any.

    Raises:
        InputError: when they do not fit, or a model does not know all of the policy's tokens.
    """
    roles = shared_roles(config, frozen, trained)
    count, learning, _ = _size(config, POLICY, roles)
    bytes_needed = learning * _trained_bytes(config, POLICY) + (count - learning) * _frozen_bytes(
        config
    )
    for key, role, other, each in (
        (
            "algorithm.kl.model",
            "reference",
            frozen,
            learning_dtype(config, frozen or POLICY).itemsize,
        ),
        (
            "algorithm.advantage.model",
            "value",
            trained,
            _trained_bytes(config, trained or POLICY),
        ),
    ):
        if other is None or role in roles:
            continue
        more, _, words = _size(config, other)
        bytes_needed += more * each
        if other.path and words < (tokens := _tokens(config)):
            raise InputError(
                f"{key}: {other.path} has a vocabulary of {words:,} tokens, and the policy's "
                f"tokenizer has {tokens:,}: both models must have the same tokenizer"
            )
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // ranks  # CPU ranks may share a machine
    needed = bytes_needed / ranks
    if needed > free:
        raise InputError(
            f"the model {config.model.path} does not fit: its {count / 1e6:,.0f} M parameters "
            f"need {needed / _GIB:.1f} GiB on each of {ranks} ranks (weights, gradients, AdamW), "
            f"and {free / _GIB:.1f} GiB are free; raise training.ranks"
        )


def _trained_bytes(config: Config, other: OtherModel) -> int:
    """Return the bytes of a parameter that learns: itself, its gradient, AdamW's two moments."""
    return 4 * learning_dtype(config, other).itemsize


def _frozen_bytes(config: Config) -> int:
    """Return the bytes of a frozen parameter of the policy."""
    return dtype_of(config, POLICY).itemsize


def parameters_of(config: Config, other: OtherModel) -> int:
    """Return the number of a model's parameters, without loading its weights.

    Raises:
        InputError: when its configuration cannot be read.
    """
    return _size(config, other)[0]


def _size(config: Config, other: OtherModel, roles: Sequence[Role] = ()) -> tuple[int, int, int]:
    """Return a model's parameters, those that learn, and its vocabulary, without its weights."""
    path, trust = path_of(config, other), config.model.trust_remote_code
    with _refusals(path), torch.device("meta"):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        kind = AutoModelForSequenceClassification if _scores(shape) else AutoModelForCausalLM
        empty = kind.from_config(shape, trust_remote_code=trust)
        if roles:
            add_adapters(empty, config.model.lora, roles)
    sizes = [(p.numel(), p.requires_grad) for p in empty.parameters()]
    words: int = shape.get_text_config().vocab_size
    return sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns), words


def _tokens(config: Config) -> int:
    """Return the size of the policy's tokenizer; a model's vocabulary is often a bit larger."""
    path = resolve_tokenizer(config.model)
    trust = config.model.trust_remote_code
    with _refusals(path):
        return len(AutoTokenizer.from_pretrained(path, trust_remote_code=trust))


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
    with _refusals(path):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    dtype = learning_dtype(config, other)
    if not _scores(shape):
        return load_model(config, other, dtype)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, config, path, dtype)


def _loaded(kind: Any, config: Config, path: str, dtype: torch.dtype = torch.float32) -> Any:
    trust = config.model.trust_remote_code
    with _refusals(path):
        if dist.is_initialized() and (files := weight_files(path)):
            shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
            with torch.device("meta"):
                model = kind.from_config(shape, dtype=dtype, trust_remote_code=trust)
            if can_be_sliced(model):
                _prepare(model, config)
                return _with_head(model, files)
        model = kind.from_pretrained(path, dtype=dtype, trust_remote_code=trust)
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    _prepare(model, config)
    return model.eval()


def _prepare(model: PreTrainedModel, config: Config) -> None:
    exchanges = use_packed_attention(model, config.training.attention)
    check_divisible(model, config.training.context_parallel, exchanges)


def _with_head(model: PreTrainedModel, files: list[str]) -> PreTrainedModel:
    """Read the head of a reward model, from which the value model's is made."""
    if hasattr(model, "score"):
        model.score.weight = nn.Parameter(read_tensor(files, "score.weight").float())
    return model.eval()


def fill(module: nn.Module, config: Config, device: torch.device, other: OtherModel) -> None:
    """Read this rank's shards of a module that has no weights yet.

    Raises:
        InputError: when the model's files do not hold them.
    """
    path = path_of(config, other)
    with _refusals(path):
        if any(parameter.is_meta for parameter in module.parameters()):
            read_shards(module, weight_files(path), device)


def _scores(shape: PretrainedConfig) -> bool:
    """Return whether a checkpoint is a sequence classifier."""
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error
