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
from transformers import AutoConfig, AutoModelForCausalLM

from turnwise.config import Config, SamplingConfig
from turnwise.errors import InputError
from turnwise.training.batching import MicroBatch
from turnwise.training.scoring import Scores, hidden_before, score

_TRAINED_BYTES = 16
"""Of one parameter: weight, gradient, and AdamW's two moments, in float32."""
_FROZEN_BYTES = 4
_GIB = 2**30


class Scorer(nn.Module):
    """A causal language model whose forward pass scores tokens."""

    def __init__(self, model: Any, sampling: SamplingConfig) -> None:
        super().__init__()
        self.model = model
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
    """PPO's value model: the same backbone, and a number for each token to come."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone = model.base_model
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """What the return will be, told before each masked token: [N]."""
        hidden_NH = hidden_before(
            self.backbone, batch.token_ids_BT, batch.mask_BT, batch.position_ids_BT
        )
        values_N: torch.Tensor = self.head(hidden_NH)[:, 0].float()
        return values_N


def check_room(config: Config, device: torch.device, ranks: int, copies: int) -> None:
    """Raises `InputError` when the model, its optimizer and its frozen or second `copies` cannot
    fit into what this rank may use; activations are not counted."""
    trust = config.model.trust_remote_code
    with _refusals(config), torch.device("meta"):
        shape = AutoConfig.from_pretrained(config.model.path, trust_remote_code=trust)
        empty = AutoModelForCausalLM.from_config(shape, trust_remote_code=trust)
    count = sum(p.numel() for p in empty.parameters())
    needed = count * (_TRAINED_BYTES + _FROZEN_BYTES * copies) / ranks
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available // ranks  # CPU ranks may share a machine
    if needed > free:
        raise InputError(
            f"the model {config.model.path} does not fit: its {count / 1e6:,.0f} M parameters "
            f"need {needed / _GIB:.1f} GiB on each of {ranks} ranks (weights, gradients, AdamW), "
            f"and {free / _GIB:.1f} GiB are free; raise training.ranks"
        )


def load_model(config: Config) -> Any:
    """The model of `model.path` in float32, without dropout, which would make every ratio wrong.

    Raises:
        InputError: when it cannot be loaded.
    """
    with _refusals(config):
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=torch.float32,
            trust_remote_code=config.model.trust_remote_code,
        )
    if config.training.offload:  # storages that map a file cannot be emptied
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model.eval()


@contextmanager
def _refusals(config: Config) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"the model {config.model.path} cannot be loaded: {error}") from error


def distribute(
    module: nn.Module, config: Config, device: torch.device, *, trained: bool = True
) -> nn.Module:
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
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    options: dict[str, Any] = {"mesh": mesh}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
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
