"""Models as the trainer has them: loaded, checked for room, sharded over ranks by FSDP2.

Master weights are float32 whatever `model.dtype` is, since steps of a small learning rate vanish
in bfloat16; forward passes have `model.dtype`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from turnwise.config import Config, OtherModel, SamplingConfig
from turnwise.errors import InputError
from turnwise.training.batching import MicroBatch
from turnwise.training.scoring import Scores, hidden_before, score

_TRAINED_BYTES = 16
"""Of one parameter: weight, gradient, and AdamW's two moments, in float32."""
_FROZEN_BYTES = 4
_GIB = 2**30
POLICY = OtherModel()
"""The model of `model.path` itself."""


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens."""

    def __init__(self, model: Any, sampling: SamplingConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        """Data type of forward passes."""
        self._sampling = sampling

    def forward(self, batch: MicroBatch, sampling: SamplingConfig | None = None) -> Scores:
        return score(
            self.model,
            batch.token_ids_BT,
            batch.mask_BT,
            batch.position_ids_BT,
            sampling or self._sampling,
        )


class Critic(nn.Module):
    """PPO's value model: a backbone, and a number for each token to come. The head is that of a
    reward model, or new and says 0."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = model.base_model
        self.dtype = dtype
        """Data type of forward passes."""
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)
        trained = getattr(model, "score", None)
        with torch.no_grad():
            if trained is None:
                self.head.weight.zero_()
            else:
                self.head.weight.copy_(trained.weight)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """What the return will be, told before each masked token: [N]."""
        hidden_NH = hidden_before(
            self.backbone, batch.token_ids_BT, batch.mask_BT, batch.position_ids_BT
        )
        values_N: torch.Tensor = self.head(hidden_NH)[:, 0].float()
        return values_N


def check_room(
    config: Config,
    device: torch.device,
    ranks: int,
    frozen: OtherModel | None,
    trained: OtherModel | None,
) -> None:
    """Raises `InputError` when the policy, a reference model (`frozen`) and a value model
    (`trained`) cannot fit into what this rank may use with their optimizers, or cannot read the
    policy's tokens; activations are not counted."""
    count, _ = _size(config, POLICY)
    bytes_needed = count * _TRAINED_BYTES
    for key, other, each in (
        ("algorithm.kl.model", frozen, _FROZEN_BYTES),
        ("algorithm.advantage.model", trained, _TRAINED_BYTES),
    ):
        if other is None:
            continue
        more, words = _size(config, other)
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


def _size(config: Config, other: OtherModel) -> tuple[int, int]:
    """A model's parameters and its vocabulary, without its weights."""
    path, trust = path_of(config, other), config.model.trust_remote_code
    with _refusals(path), torch.device("meta"):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        kind = AutoModelForSequenceClassification if _scores(shape) else AutoModelForCausalLM
        empty = kind.from_config(shape, trust_remote_code=trust)
    return sum(p.numel() for p in empty.parameters()), shape.get_text_config().vocab_size


def _tokens(config: Config) -> int:
    """Size of the policy's tokenizer; models often have room for some more."""
    path = config.model.tokenizer or config.model.path
    trust = config.model.trust_remote_code
    with _refusals(path):
        return len(AutoTokenizer.from_pretrained(path, trust_remote_code=trust))


def path_of(config: Config, other: OtherModel) -> str:
    """Return the path of a model beside the policy: its own, or the policy's."""
    return other.path or config.model.path


def dtype_of(config: Config, other: OtherModel) -> torch.dtype:
    """The precision of the forward passes of a model beside the policy."""
    dtype: torch.dtype = getattr(torch, other.dtype or config.model.dtype)
    return dtype


def load_model(config: Config, other: OtherModel = POLICY) -> Any:
    """A causal language model in float32, without dropout, which would make every ratio wrong.

    Args:
        other: By default the policy, the model of `model.path`.

    Raises:
        InputError: when it cannot be loaded.
    """
    return _loaded(AutoModelForCausalLM, config, path_of(config, other))


def load_value_model(config: Config, other: OtherModel) -> Any:
    """What the value model starts from: a causal language model, or a reward model.

    Raises:
        InputError: when it cannot be loaded, or has other than one output.
    """
    path, trust = path_of(config, other), config.model.trust_remote_code
    with _refusals(path):
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    if not _scores(shape):
        return load_model(config, other)
    if shape.num_labels != 1:
        raise InputError(
            f"algorithm.advantage.model: {path} has {shape.num_labels} outputs; a value model "
            "starts from a reward model with one, or from a language model"
        )
    return _loaded(AutoModelForSequenceClassification, config, path)


def _loaded(kind: Any, config: Config, path: str) -> Any:
    with _refusals(path):
        model = kind.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
        )
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model.eval()


def _scores(shape: Any) -> bool:
    """Tell whether a checkpoint is a sequence classifier's."""
    return any("SequenceClassification" in name for name in shape.architectures or ())


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {path} cannot be loaded: {error}") from error


def distribute(
    module: "Scorer | Critic", config: Config, device: torch.device, *, trained: bool = True
) -> "Scorer | Critic":
    """Put a module where it computes: on the device, and over all ranks where there are several.

    Each decoder layer is gathered for its own computation alone. One rank needs no sharding and
    pays nothing for it.
    """
    layers = [m for m in module.modules() if type(m).__name__ in _layer_names(module)]
    if config.training.activation_checkpointing and trained:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if not dist.is_initialized():
        return module.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if module.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=module.dtype, reduce_dtype=torch.float32
        )
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    return module.to(device)


def _layer_names(module: nn.Module) -> set[str]:
    """The classes of decoder layers, as Transformers' models tell them."""
    names: set[str] = set()
    for part in module.modules():
        names |= set(getattr(part, "_no_split_modules", None) or ())
    return names


def full_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter whole, one at a time; every rank must take every one of them."""
    for name, parameter in module.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
