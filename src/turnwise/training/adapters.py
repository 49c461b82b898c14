"""The adapters that are added to a trainer while it runs, each with its gradient and optimizer.

Every rank holds all adapters whole, and averages their gradients over the ranks before a step. The
least recently used adapters are offloaded if the device has no room for all of them. Methods raise
`InputError` if the caller made a mistake.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from turnwise.config import LoraConfig, ModelConfig, TrainingConfig
from turnwise.core.optional import Foreign
from turnwise.engine.adapters import read_adapter
from turnwise.errors import InputError
from turnwise.training import lora
from turnwise.training.loading import path_of
from turnwise.training.memory import GIB
from turnwise.training.offload import Offload
from turnwise.training.optimizer import TrainableModule

ALPHA = 32.0
"""`lora_alpha` of adapters of any rank, unless `model.lora.alpha` is set. It is Tinker's value, so
that learning rates have the same effect as in Tinker."""
_BYTES = 16
"""Bytes for each parameter of an adapter: its value, gradient and two moments in float32."""
_NEAR, _FAR = 0.25, 0.5
"""Shares of the memory that is free once the base model is loaded: the share of the device's memory
for adapters that are not offloaded, and the share of the host's memory for offloaded adapters."""
_OPTIMIZER = "optimizer.pt"
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
"""Matches names of layers that are part of attention; all other layers count as part of the MLP."""


class AdapterSpec(NamedTuple):
    """An adapter to add."""

    rank: int
    seed: int
    """Seed of the adapter's initial values."""
    attention: bool = True
    """Whether to adapt the layers of attention."""
    mlp: bool = True
    """Whether to adapt all other layers."""


@dataclass(slots=True, eq=False)
class Adapter:
    """An added adapter with its optimizer."""

    label: str
    """PEFT's name of the adapter. It differs from the caller's name, which may have dots, because
    PEFT refuses dots."""
    learner: TrainableModule
    offloaded: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.learner.module.parameters())

    @property
    def nbytes(self) -> int:
        return _BYTES * sum(parameter.numel() for parameter in self.parameters)

    def tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            yield from self.learner.optimizer.state[parameter].values()

    def average(self) -> None:
        """Replace the adapter's gradient by its mean over all ranks."""
        if not dist.is_initialized():
            return
        for parameter in self.parameters:
            if parameter.grad is None:  # this rank had no sample for the adapter
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Adapters:
    """All added adapters on one rank; PEFT has wrapped the layers of their model."""

    def __init__(
        self,
        settings: ModelConfig,
        training: TrainingConfig,
        rate: float,
        model: nn.Module,
        device: torch.device,
        folder: Path,
    ) -> None:
        self._settings, self._training, self._rate = settings, training, rate
        self._model, self._device = model, device
        self._layers = lora.adapted_layers(model)
        self._held: dict[str, Adapter] = {}
        """Adapters by name, in order of use; the least recently used adapter is the first."""
        self._numbers = itertools.count(1)
        self._tensors: dict[str, Callable[[], Iterator[torch.Tensor]]] = {}
        self._offload = Offload(self._tensors, folder)
        host = psutil.virtual_memory().available
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else host
        self._near = int(_NEAR * free)
        self._capacity = (self._near if on_gpu else 0) + int(_FAR * host)

    def add(self, name: str, spec: AdapterSpec) -> None:
        own = self._settings.lora
        targets = [
            layer
            for layer in self._layers
            if (spec.attention if _ATTENTION.search(layer) else spec.mlp)
        ]
        if not targets:
            raise InputError("lora_config: train_attn and train_mlp leave no layer to train")
        self._check_memory(spec.rank, targets)
        label = f"added{next(self._numbers)}"
        settings = LoraConfig(rank=spec.rank, alpha=own.alpha or ALPHA, rslora=own.rslora)
        try:
            lora.add_adapter(self._model, settings, label, targets, spec.seed)
            for _, parameter in lora.adapter_parameters(self._model, label):
                parameter.data = parameter.data.to(self._device)
            part = lora.trained_part(self._model, label)
            learner = TrainableModule(part, self._training, self._rate, None)
        except BaseException:  # such as a full device: leave no part of an adapter behind
            lora.remove_adapter(self._model, label)
            raise
        made = Adapter(label, learner)
        self._held[name], self._tensors[name] = made, made.tensors

    def _check_memory(self, rank: int, targets: Sequence[str]) -> None:
        """Make room on the device for a new adapter; raise InputError if there is not enough
        memory."""
        layers = [self._layers[name].base_layer for name in targets]
        needed = _BYTES * rank * sum(each.in_features + each.out_features for each in layers)
        taken = sum(each.nbytes for each in self._held.values())
        if taken + needed > self._capacity:
            raise InputError(
                f"create_model: the trainer has no room for another adapter of rank {rank}, which "
                f"needs {needed / GIB:.2f} GiB: its {len(self._held)} models have "
                f"{taken / GIB:.2f} of {self._capacity / GIB:.2f} GiB; ask for a lower rank, or "
                "wait until a session ends"
            )
        self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        """Offload the least recently used adapters until `needed` bytes fit on the device."""
        near = {name: each for name, each in self._held.items() if not each.offloaded}
        taken = sum(each.nbytes for each in near.values())
        for name, each in near.items():
            if taken + needed <= self._near:
                return
            self._offload.put_away([name])
            each.offloaded = True
            taken -= each.nbytes

    def use(self, name: str) -> Adapter:
        """Return an adapter, after moving it to the device if it was offloaded. It becomes the most
        recently used adapter."""
        if (adapter := self._held.pop(name, None)) is None:
            raise InputError(
                f"the trainer has no adapter {name}: it was removed before it was saved"
            )
        self._held[name] = adapter
        if adapter.offloaded:
            self._make_room(adapter.nbytes)
            self._offload.bring_back([name])
            adapter.offloaded = False
        return adapter

    def write(self, name: str, folder: Path, optimizer: bool = False) -> None:
        """Write an adapter in PEFT's format into a folder; with `optimizer`, also write the state
        of the adapter's optimizer."""
        adapter, base = self.use(name), path_of(self._settings)
        found = lora.adapter_parameters(self._model, adapter.label)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in found}
        settings: dict[str, Foreign] = lora.adapter_config(self._model, base, adapter.label)
        names = {target.rpartition(".")[2] for target in settings["target_modules"]}
        lora.write_adapter(folder, settings | {"target_modules": sorted(names)}, tensors)
        if optimizer:
            torch.save(adapter.learner.optimizer.state_dict(), folder / _OPTIMIZER)

    def read(self, name: str, folder: Path, optimizer: bool) -> None:
        """Load the values of a saved adapter into the adapter `name`; also load the saved state of
        its optimizer, or reset this state. Gradients that were added are dropped."""
        adapter, moments = self.use(name), folder / _OPTIMIZER
        own = adapter.learner.optimizer
        state = own.state_dict() | {"state": {}}
        _, saved = read_adapter(str(folder), "load_weights")
        if optimizer and not moments.is_file():
            raise InputError(
                "load_weights: the checkpoint has no state of an optimizer, because it was saved "
                "to be sampled from: create_training_client_from_state takes its weights alone"
            )
        if optimizer:
            state = state | {"state": _moments(moments)}
        found = load_file(folder / lora.ADAPTER_TENSORS)
        parameters = dict(lora.adapter_parameters(self._model, adapter.label))
        settings = lora.adapter_config(self._model, "", adapter.label)
        fits = {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in parameters.items()}
        if not fits or any(saved[key] != settings[key] for key in ("lora_alpha", "use_rslora")):
            raise InputError(
                "load_weights: the checkpoint's adapter has other layers, another rank or another "
                "scaling than the model's: create_training_client_from_state makes one that fits"
            )
        with torch.no_grad():
            for key, tensor in parameters.items():
                tensor.copy_(found[key])
        own.load_state_dict(state)
        for values in own.state.values():  # copy: tensors loaded from a file cannot be offloaded
            values.update({key: value.clone() for key, value in values.items()})
        own.zero_grad()

    def remove(self, name: str) -> None:
        """Remove an adapter; do nothing if it is unknown."""
        if (adapter := self._held.pop(name, None)) is not None:
            del self._tensors[name]
            self._offload.forget(name)
            lora.remove_adapter(self._model, adapter.label)


def _moments(file: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the moments of a saved optimizer, by the index of the parameter."""
    found: dict[int, dict[str, torch.Tensor]]
    found = torch.load(file, map_location="cpu", weights_only=True)["state"]
    return found
