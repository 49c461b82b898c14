"""One rank of the trainer: one frozen model, and an adapter for each model of a client.

A pass adds up gradients of one adapter, until a step uses them. Adapters that were not used for
the longest time are offloaded where the device has no room for all. Nothing here knows of sessions,
owners or engines. Methods raise `InputError` where the client is wrong.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from turnwise.config import Config, LoraConfig, SamplingConfig
from turnwise.core.optional import Foreign
from turnwise.engine.adapters import read_adapter
from turnwise.errors import InputError
from turnwise.internals.transformers import activate
from turnwise.tinker.losses import Inputs, TinkerLoss, loss_named
from turnwise.tinker.requests import AdamStep, AdapterSpec
from turnwise.tinker.wire import Array, Datum, TrainingRequest
from turnwise.training import lora
from turnwise.training.batching import (
    Columns,
    Layout,
    RankBatches,
    micro_batch_tokens,
    plan_micro_batches,
)
from turnwise.training.layout_check import check_run
from turnwise.training.loading import load_models, path_of
from turnwise.training.memory import GIB, check_room
from turnwise.training.model import backbone_of, hidden_before, score_hidden
from turnwise.training.offload import Offload
from turnwise.training.rank import begin_process
from turnwise.training.sample import Sample
from turnwise.trajectory.images import PromptIds

ALPHA = 32.0
"""The `lora_alpha` of clients' adapters of every rank, unless `model.lora.alpha` is set: that of
Tinker, so that learning rates mean the same."""
_BYTES = 16
"""Bytes of each parameter of an adapter: value, gradient and two moments in float32."""
_NEAR, _FAR = 0.25, 0.5
"""Shares of the memory that is free when the base model is loaded: of the device's for adapters
that compute at once, and of the host's for all others."""
_OPTIMIZER = "optimizer.pt"
_PLAIN = SamplingConfig()
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
"""Names of the modules of a decoder layer that are its attention; others are its MLP."""


@dataclass(slots=True, eq=False)
class _Adapter:
    label: str
    """PEFT's name of it; names of clients may have dots."""
    parameters: dict[str, nn.Parameter]
    """By PEFT's names."""
    optimizer: torch.optim.AdamW
    is_away: bool = False
    """Whether its tensors are offloaded."""

    @property
    def nbytes(self) -> int:
        return _BYTES * sum(parameter.numel() for parameter in self.parameters.values())

    def tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters.values():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
            yield from self.optimizer.state[parameter].values()


class AdapterRank:
    """The model on one rank, with the adapters of all clients. Arguments are `TrainerRank`'s."""

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        address: str = "",
    ) -> None:
        self._config = config
        self.device = begin_process(config, rank, ranks, address)
        check_room(config, self.device, ranks)
        self._models = models = load_models(config, self.device)
        self.layouts, self.layouts_said, self._no_images = check_run(models, config)
        self._model = models.policy.get_submodule("model")
        self._layers = lora.adapted_layers(self._model)
        self.adapters_said = lora.said_without_adapter(self._model, config.model.lora)
        lora.remove_adapter(self._model, "default")  # of `load_models`, which found the layers
        self._adapters: dict[str, _Adapter] = {}
        """By name, the least recently used first."""
        self._numbers = itertools.count(1)
        self._tensors: dict[str, Callable[[], Iterator[torch.Tensor]]] = {}
        self._offload = Offload(self._tensors, folder or Path(gettempdir()))
        host = psutil.virtual_memory().available
        on_gpu = self.device.type == "cuda"
        free = torch.cuda.mem_get_info(self.device)[0] if on_gpu else host
        self._near = int(_NEAR * free)
        self._most = (self._near if on_gpu else 0) + int(_FAR * host)

    def create(self, name: str, spec: AdapterSpec) -> None:
        """Add an adapter."""
        own = self._config.model.lora
        targets = [
            layer
            for layer in self._layers
            if (spec.train_attn if _ATTENTION.search(layer) else spec.train_mlp)
        ]
        if not targets:
            raise InputError("lora_config: train_attn and train_mlp leave no layer to train")
        self._check_memory(spec.rank, targets)
        label = f"client{next(self._numbers)}"
        settings = LoraConfig(rank=spec.rank, alpha=own.alpha or ALPHA, rslora=own.rslora)
        seed = int(torch.randint(2**62, ())) if spec.seed is None else spec.seed
        try:
            lora.add_adapter(self._model, settings, label, targets, seed)
            parameters = dict(lora.adapter_parameters(self._model, label))
            for parameter in parameters.values():
                parameter.data = parameter.data.to(self.device)
        except BaseException:  # the device may be full; nobody could remove a part of an adapter
            lora.remove_adapter(self._model, label)
            raise
        made = _Adapter(label, parameters, torch.optim.AdamW(parameters.values()))
        self._adapters[name], self._tensors[name] = made, made.tensors

    def _check_memory(self, rank: int, targets: Sequence[str]) -> None:
        """Make room on the device for a new adapter; InputError when there is none for it."""
        layers = [self._layers[name].base_layer for name in targets]
        needed = _BYTES * rank * sum(each.in_features + each.out_features for each in layers)
        taken = sum(each.nbytes for each in self._adapters.values())
        if taken + needed > self._most:
            raise InputError(
                f"create_model: the trainer has no room for another adapter of rank {rank}, which "
                f"needs {needed / GIB:.2f} GiB: its {len(self._adapters)} models have "
                f"{taken / GIB:.2f} of {self._most / GIB:.2f} GiB; ask for a lower rank, or wait "
                "until a session ends"
            )
        self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        """Offload the adapters that were not used for the longest time."""
        near = {name: each for name, each in self._adapters.items() if not each.is_away}
        taken = sum(each.nbytes for each in near.values())
        for name, each in near.items():
            if taken + needed <= self._near:
                return
            self._offload.put_away([name])
            each.is_away = True
            taken -= each.nbytes

    def run(self, name: str, run: TrainingRequest) -> tuple[list[Array], float]:
        """Run a forward pass with an adapter, and unless `forward_only` add its gradient, half of
        it if this fails; return log-prob and loss of each datum's targets, [2, T] or [2, T, K], and
        the sum of the loss."""
        adapter = self._of(name)
        loss = loss_named(run.loss, run.loss_config)
        if self._no_images and any(datum.images for datum in run.data):
            raise InputError(self._no_images)
        outputs, total = dict[int, Array](), 0.0
        activate(self._layers.values(), [adapter.label])
        with torch.set_grad_enabled(not run.forward_only):
            share = self._share(run)
            for samples in share.micro_batches:
                chosen = [run.data[sample.sequence] for sample in samples]
                logprobs_N, inputs = self._score(samples, share.layout, chosen, loss)
                loss_N = loss.compute(logprobs_N, inputs)
                if not run.forward_only:
                    loss_N.sum().backward()  # type: ignore[no-untyped-call]
                total += float(loss_N.detach().sum())
                both_2N = torch.stack([logprobs_N.detach(), loss_N.detach()]).float().cpu()
                parts = torch.split(both_2N, [len(d.token_ids_T) for d in chosen], dim=1)
                for sample, datum, part in zip(samples, chosen, parts, strict=True):
                    shape = datum.inputs["target_tokens"].shape
                    own = part.reshape(2, shape[0], -1)[:, :, : shape[1] if shape[1:] else 1]
                    outputs[sample.sequence] = own.reshape(2, *shape).numpy()
        return [outputs[number] for number in range(len(run.data))], total

    def _share(self, run: TrainingRequest) -> RankBatches:
        """Divide the data into micro-batches; a sample has one token more, since each token is
        scored by the one before it."""
        samples = [
            Sample.to_score(
                PromptIds([*d.token_ids_T.tolist(), 0], d.images),
                [0] + [1] * len(d.token_ids_T),
                number,
            )
            for number, d in enumerate(run.data)
        ]
        most = micro_batch_tokens(self._config.training, self.device.type == "cuda")
        ((share,),) = plan_micro_batches(samples, 1, 1, most, self.layouts)
        return share

    def _score(
        self, samples: Sequence[Sample], layout: Layout, data: Sequence[Datum], loss: TinkerLoss
    ) -> tuple[torch.Tensor, Inputs]:
        """Return the log-probs of the targets, [N], and the tensors that the loss needs; if a datum
        has several targets for each token, [N, K], where those of others are filled up with 0."""
        wide = max((each.inputs["target_tokens"].shape[1:] for each in data), default=())

        def joined(name: str, default: float | None = None) -> torch.Tensor:
            parts = list[Array]()
            for each in data:
                target = each.inputs["target_tokens"]
                values = each.inputs.get(name)
                if values is None:
                    values = np.full(target.shape, default, np.float32)
                if wide:
                    values = values.reshape(len(target), -1)
                    values = np.pad(values, ((0, 0), (0, wide[0] - values.shape[1])))
                parts.append(values)
            return torch.from_numpy(np.concatenate(parts)).to(self.device)

        lengths = torch.tensor([len(each.token_ids_T) for each in data], device=self.device)
        inputs = {name: joined(name).float() for name in loss.needs}
        inputs |= {name: joined(name, value).float() for name, value in loss.defaults.items()}
        inputs["datum"] = torch.repeat_interleave(lengths)
        targets_N = joined("target_tokens").long()
        learns_N = torch.ones_like(inputs["datum"], dtype=torch.bool)
        if loss.factor and torch.is_grad_enabled():
            learns_N = (inputs[loss.factor].reshape(len(learns_N), -1) != 0).any(dim=1)
        with self._models.computing(self._models.policy):
            columns = Columns.of(samples, layout, self.device)
            images = self._models.policy.images
            hidden_NH = hidden_before(backbone_of(self._model), columns, images)
            logprobs_N, _ = score_hidden(
                self._model, hidden_NH[learns_N], targets_N[learns_N], _PLAIN
            )
            if not learns_N.all():  # a head's backward pass is much of the work
                with torch.no_grad():
                    others = hidden_NH[~learns_N], targets_N[~learns_N]
                    given_N, _ = score_hidden(self._model, *others, _PLAIN)
                order_N = torch.cat([learns_N.nonzero(), (~learns_N).nonzero()])[:, 0]
                logprobs_N = torch.cat([logprobs_N, given_N])[order_N.argsort()]
        return logprobs_N.float(), inputs

    def step(self, name: str, step: AdamStep) -> dict[str, float]:
        """Take an optimizer step, unless the gradient is not finite; return its metrics."""
        adapter = self._of(name)
        limit = step.grad_clip_norm if step.grad_clip_norm > 0 else math.inf
        norm = float(nn.utils.clip_grad_norm_(adapter.parameters.values(), limit))
        if math.isfinite(norm):
            settings = step.model_dump(include={"eps", "weight_decay"}) | {"lr": step.learning_rate}
            for group in adapter.optimizer.param_groups:
                group.update(settings, betas=(step.beta1, step.beta2))
            adapter.optimizer.step()
        adapter.optimizer.zero_grad()
        if not math.isfinite(norm):
            raise InputError(
                f"optim_step: the gradient's norm is {norm}, so the step was skipped and "
                "the gradient dropped: look at the weights, advantages and log-probs of the data"
            )
        return {"grad_norm": norm}

    def drop(self, name: str) -> None:
        """Drop the gradient that has been added up."""
        self._of(name).optimizer.zero_grad()

    def write(self, name: str, folder: Path, optimizer: bool = False) -> None:
        """Write an adapter in PEFT's format into a folder, and what its optimizer remembers."""
        adapter, base = self._of(name), path_of(self._config)
        found = adapter.parameters.items()
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in found}
        settings: dict[str, Foreign] = lora.adapter_config(self._model, base, adapter.label)
        names = {target.rpartition(".")[2] for target in settings["target_modules"]}
        lora.write_adapter(folder, settings | {"target_modules": sorted(names)}, tensors)
        if optimizer:
            torch.save(adapter.optimizer.state_dict(), folder / _OPTIMIZER)

    def read(self, name: str, folder: Path, optimizer: bool) -> None:
        """Load a saved adapter into one, with the state of its optimizer, or none; a gradient that
        has been added up is dropped."""
        adapter, moments = self._of(name), folder / _OPTIMIZER
        state = adapter.optimizer.state_dict() | {"state": {}}
        _, saved = read_adapter(str(folder), "load_weights")
        if optimizer and not moments.is_file():
            raise InputError(
                "load_weights: the checkpoint has no state of an optimizer, because it was saved "
                "to be sampled from: create_training_client_from_state takes its weights alone"
            )
        if optimizer:
            state = torch.load(moments, map_location="cpu", weights_only=True)
        found = load_file(folder / lora.ADAPTER_TENSORS)
        own = adapter.parameters
        settings = lora.adapter_config(self._model, "", adapter.label)
        fits = {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in own.items()}
        if not fits or any(saved[key] != settings[key] for key in ("lora_alpha", "use_rslora")):
            raise InputError(
                "load_weights: the checkpoint's adapter has other layers, another rank or another "
                "scaling than the model's: create_training_client_from_state makes one that fits"
            )
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(found[key])
        adapter.optimizer.load_state_dict(state)
        for moments in adapter.optimizer.state.values():  # those of a file cannot be offloaded
            moments.update({key: value.clone() for key, value in moments.items()})
        adapter.optimizer.zero_grad()

    def vocabulary(self, _: str) -> int:
        """Return the number of ids that the model knows."""
        config: Foreign = self._model.config
        return int(config.get_text_config().vocab_size)

    def remove(self, name: str) -> None:
        """Forget an adapter; one that is unknown is forgotten already."""
        if (adapter := self._adapters.pop(name, None)) is not None:
            del self._tensors[name]
            self._offload.forget(name)
            lora.remove_adapter(self._model, adapter.label)

    def close(self) -> None:
        """Do nothing: no file of the rank outlives its process."""

    def _of(self, name: str) -> _Adapter:
        """Return an adapter, which is on the device from now on."""
        if (adapter := self._adapters.pop(name, None)) is None:
            raise InputError(f"the trainer holds no model {name}: it was not saved before it left")
        self._adapters[name] = adapter
        if adapter.is_away:
            self._make_room(adapter.nbytes)
            self._offload.bring_back([name])
            adapter.is_away = False
        return adapter
